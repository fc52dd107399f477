"""The tables of docs/trust.md, from results/*.json alone: `python benchmarks/trust.py` writes them there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from page import filled

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "trust.md"


def mutation() -> str:
    """Each module's mutants, and what became of them."""
    lines = [
        "| module | tried | killed | of these by time | survived | explained | killed or explained |",
        "|---" * 7 + "|",
    ]
    for name, found in _read("mutation")["modules"].items():
        tried = f"all {found['mutants']}" if found["every"] == 1 else f"{found['mutants']}, one in {found['every']}"
        killed = found["killed"] + found["timed_out"]
        counts = f"{killed} | {found['timed_out']} | {found['survived']} | {found['explained']}"
        lines.append(f"| {name} | {tried} | {counts} | {found['score']:.1f} % |")
    return "\n".join(lines) + "\n"


def fuzz() -> str:
    """Each property's inputs, and the slowest of the real files."""
    document = _read("fuzz")
    lines = ["| property | inputs | seconds | the slowest | failures |", "|---" * 5 + "|"]
    for name, found in document["properties"].items():
        slowest = "" if found["slowest_s"] is None else f"{found['slowest_s']:.3f} s"
        failed = 0 if found["failure"] is None else 1
        lines.append(f"| {name} | {found['inputs']} | {found['seconds']:.0f} | {slowest} | {failed} |")
    totals = document["totals"]
    lines.append(f"| all | {totals['inputs']} | {totals['seconds']:.0f} | | {totals['failures']} |")
    return "\n".join(lines) + f"\n\n`{document['command']}`\n"


def _read(name: str) -> Any:
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def page(text: str) -> str:
    """The page with its tables as the files have them."""
    return filled(text, "benchmarks/trust.py", {"mutation": mutation, "fuzz": fuzz})


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
