"""The table of docs/performance.md, from results/*.json alone: `python benchmarks/performance.py` writes it there.

A figure is what a file says; one whose file is not there is "not measured", and nothing else is ever written.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- table: python benchmarks/performance.py -->\n", "<!-- end of table -->\n"


@dataclass(frozen=True)
class Figure:
    name: str
    target: str
    baseline: str  # what it is measured beside
    file: str  # below results/
    read: Callable[[dict[str, Any]], str]
    met: Callable[[dict[str, Any]], bool]


def ratio(path: str, most: float) -> tuple[Callable[[Any], str], Callable[[Any], bool]]:
    """A ratio and its spread at a dotted path, which must be ``most`` at most."""

    def read(document: Any) -> str:
        found = at(document, path)
        return f"{found['median']:.3f} ({found['low']:.3f} to {found['high']:.3f})"

    return read, lambda document: at(document, path)["median"] <= most


def number(path: str, shown: str, fits: Callable[[Any], bool]) -> tuple[Callable[[Any], str], Callable[[Any], bool]]:
    return lambda document: shown.format(at(document, path)), lambda document: fits(at(document, path))


def at(document: Any, path: str) -> Any:
    for name in path.split("/"):
        document = document[name]
    return document


def figures() -> list[Figure]:
    isolation, detectors, costs = "isolation-cuda.json", "detectors-cuda.json", "no-cost-cuda.json"
    beside = "under `unfix exec` with nothing out, and a plain Python"
    return [
        Figure(
            "a leg in its own CUDA context", "1.25 at most", "a bare fork and context", isolation,
            *number("ratios/leg / bare fork and context", "{}", lambda found: found <= 1.25),
        ),
        Figure(
            "the same", "12 at least", "a fresh Python doing it", isolation,
            *number("ratios/fresh Python / leg", "{}", lambda found: found >= 12),
        ),
        Figure(
            "a red zone around a draft leg, 8 x 8 x 4096", "1.05 at most", "the leg without a detector", detectors,
            *ratio("legs/ratios/red-zone/leg", 1.05),
        ),
        Figure(
            "memory of the int32 cases, the largest", "under 64 MiB", "rows that are all memory", detectors,
            lambda found: _int32(found, "bytes", lambda value: f"{value / (1 << 20):.0f} MiB"),
            lambda found: all(row["sparse"]["bytes"] < 64 << 20 for row in found["int32"]),
        ),
        Figure(
            "seconds of the int32 cases, the slowest", "under 1 s", "rows that are all memory", detectors,
            lambda found: _int32(found, "seconds", lambda value: f"{value:.2f} s"),
            lambda found: all(row["sparse"]["seconds"] < 1 for row in found["int32"]),
        ),
        Figure(
            "the int32 cases without a GPU, the slowest", "under 1 s", "", "detectors-cpu.json",
            lambda found: _int32(found, "seconds", lambda value: f"{value:.2f} s"),
            lambda found: all(row["sparse"]["seconds"] < 1 for row in found["int32"]),
        ),
        Figure(
            "compiled files that differ with nothing out", "none", "a Python without the harness", costs,
            _differing,
            lambda found: not any(each["differ"] for each in found["same_bytes"].values()),
        ),
        Figure(
            "imports of eagle_kv with nothing out", "1, within noise", beside, costs,
            *within_noise("imports eagle_kv"),
        ),
        Figure(
            "imports of SGLang with nothing out", "1, within noise", beside, costs,
            *within_noise("imports sglang"),
        ),
        *(
            Figure(
                f"an overlay of SGLang, {name}: each", f"under {most} ms", "", "overlay.json",
                lambda found, name=name: _overlay(found, name),
                lambda found, name=name: found["summary"][name]["within"] == len(found["overlays"]),
            )
            for name, most in (("cold", 50), ("warm", 5))
        ),
        Figure(
            "a sweep, shapes a second", "200 at least", "", "sweep-cuda.json",
            *number("by_shapes/a_second_by_slope", "{}", lambda found: found >= 200),
        ),
        Figure(
            "the same with 500 more toggle files", "1", "with none", "sweep-cuda.json",
            lambda found: f"{found['by_toggles'][-1]['rate_to_none']}",
            lambda found: found["by_toggles"][-1]["rate_to_none"] > 0.9,
        ),
    ]  # fmt: skip


def within_noise(name: str) -> tuple[Callable[[Any], str], Callable[[Any], bool]]:
    """Beside the ratio of two plain runs, which is what the noise does to one."""

    def read(document: Any) -> str:
        ours, noise = document[name]["under unfix exec / plain"], document[name]["plain / plain"]
        return f"{ours['median']:.3f}; noise {noise['low']:.3f} to {noise['high']:.3f}"

    def met(document: Any) -> bool:
        noise = document[name]["plain / plain"]
        return bool(noise["low"] <= document[name]["under unfix exec / plain"]["median"] <= noise["high"])

    return read, met


def _differing(document: Any) -> str:
    return ", ".join(
        f"{name}: {len(each['differ'])} of {each['files']}" for name, each in document["same_bytes"].items()
    )


def _int32(document: Any, what: str, shown: Callable[[float], str]) -> str:
    rows = document["int32"]
    worst = max(rows, key=lambda row: row["sparse"][what])
    plain = f", {shown(worst['plain'][what])} plain" if what in worst.get("plain", {}) else ""
    return f"{shown(worst['sparse'][what])}{plain} ({worst['plain_bytes'] / 1e9:.0f} GB of rows)"


def _overlay(document: Any, name: str) -> str:
    found = document["summary"][name]
    worst = found["worst"]
    return (
        f"median {found['median']:.1f} ms; {found['within']} of {len(document['overlays'])} within, the worst"
        f" {worst['milliseconds']['all']:.0f} ms ({worst['fix']})"
    )


def table() -> str:
    lines = ["| figure | target | beside | measured | | command, machine |", "|---|---|---|---|---|---|"]
    for figure in figures():
        file = ROOT / "results" / figure.file
        measured, met, where = "not measured", "", f"`results/{figure.file}` is not there"
        if file.exists():
            document = json.loads(file.read_text())
            try:
                measured, met = figure.read(document), "met" if figure.met(document) else "missed"
            except KeyError as missing:
                measured = f"not measured: the file has no {missing}"
            machine = document["environment"]["device"]
            where = f"`{document['command'].strip()}`, {machine}, {document['environment']['commit']}"
        lines.append(f"| {figure.name} | {figure.target} | {figure.baseline} | {measured} | {met} | {where} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page with the table as the files have it."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
