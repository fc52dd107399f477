"""What an overlay of SGLang costs: `python benchmarks/overlay.py DIR…`, each DIR holding a package `sglang`.

For each fix that a toggle file knows how to take out of these sources, or to put in, from the fix's name to a directory
that is ready for PYTHONPATH. Each in a process that has imported unfix and done nothing else yet:

    cold     with an empty cache
    warm     the same again in another process: the overlay is there
    again    and once more in that process, as for the next case of a run

Milliseconds, the median of the rounds. Prints a table and writes results/overlay.json (--json for another place).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import record  # noqa: E402

from harness import cache, fixes, overlay, variants  # noqa: E402
from harness.errors import UnfixError  # noqa: E402

HOW = {"out": variants.choose, "in": variants.choose_forward}
TARGETS = {"cold": 50.0, "warm": 5.0, "again": 5.0}  # milliseconds
MAKE = "--make-one"  # by this script, of itself
CATALOGUE = fixes.load(ROOT / "toggles")


def make(fix: str, how: str, sources: Path) -> dict[str, float]:
    """Milliseconds of each step of one overlay."""
    laps = [time.perf_counter()]
    reversals = HOW[how](CATALOGUE.fix(fix), "sglang", [sources])
    laps.append(time.perf_counter())
    plan = overlay.plan(reversals, [sources])
    laps.append(time.perf_counter())
    overlay.build(plan)
    laps.append(time.perf_counter())
    steps = dict(zip(("choose", "plan", "build"), (b - a for a, b in zip(laps, laps[1:], strict=False)), strict=True))
    return {name: 1000 * seconds for name, seconds in {**steps, "all": laps[-1] - laps[0]}.items()}


def in_a_process(times: int, fix: str, how: str, sources: Path) -> list[dict[str, float]]:
    """`make`, so many times, in a process of its own; [] where the fix is in already, or not in."""
    command = [sys.executable, __file__, MAKE, str(times), fix, how, str(sources)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    answer: list[dict[str, float]] = json.loads(said)
    return answer


def measure(fix: str, how: str, sources: Path, caches: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Each step's median, by temperature; {} where these sources have the fix already, or lack it."""
    seen: dict[str, list[dict[str, float]]] = {"cold": [], "warm": [], "again": []}
    for _ in range(rounds):
        os.environ["UNFIX_CACHE"] = tempfile.mkdtemp(dir=caches)
        cold = in_a_process(1, fix, how, sources)
        if not cold:
            return {}
        for name, steps in zip(seen, [*cold, *in_a_process(2, fix, how, sources)], strict=True):
            seen[name].append(steps)
    return {
        name: {step: round(median(run[step] for run in runs), 2) for step in runs[0]} for name, runs in seen.items()
    }


def symlink(caches: Path) -> float:
    """Milliseconds for 100 links, most of what an overlay is: ext4 is slow at it where much was just deleted."""
    folder = Path(tempfile.mkdtemp(dir=caches))
    started = time.perf_counter()
    for at in range(100):
        os.symlink("/nowhere", folder / str(at))
    return round(1000 * (time.perf_counter() - started), 2)


def main() -> None:
    if sys.argv[1:2] == [MAKE]:
        times, fix, how, sources = sys.argv[2:]
        try:
            print(json.dumps([make(fix, how, Path(sources)) for _ in range(int(times))]))
        except UnfixError:
            print("[]")
        return
    arguments = argparse.ArgumentParser()
    arguments.add_argument("sources", nargs="+", type=Path)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--json", type=Path, default=ROOT / "results" / "overlay.json")
    asked = arguments.parse_args()
    # on the file system of the real cache, and removed at the end only
    caches = Path(tempfile.mkdtemp(prefix="benchmark-", dir=cache.cache_dir()))
    rows, links = [], []
    try:
        for sources in asked.sources:
            for fix in (fix.id for fix in CATALOGUE if "sglang" in fix.code_bases):
                links.append(symlink(caches))
                for how in HOW:
                    if found := measure(fix, how, sources.absolute(), caches, asked.rounds):
                        rows.append({"sources": sources.name, "fix": fix, "how": how, "milliseconds": found})
    finally:
        shutil.rmtree(caches)
    found = summary(rows)
    print(f"100 symbolic links on this file system: {median(links):.1f} ms")
    print(f"{'ms':8}{'target':>8}{'median':>9}{'worst':>9}   of the worst: choose, plan, build")
    for name, figures in found.items():
        worst, within = figures["worst"], f"{figures['within']} of {len(rows)} within the target"
        steps = ", ".join(f"{worst['milliseconds'][step]:.1f}" for step in ("choose", "plan", "build"))
        print(
            f"{name:8}{TARGETS[name]:8.0f}{figures['median']:9.1f}{worst['milliseconds']['all']:9.1f}   {steps}"
            f" ({worst['fix']} {worst['how']}, {worst['sources']}); {within}"
        )
    record.save(asked.json, "cpu", {"targets": TARGETS, "links": links, "summary": found, "overlays": rows})


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found = {}
    for name, target in TARGETS.items():
        at = [{**row, "milliseconds": row["milliseconds"][name]} for row in rows]
        total = [row["milliseconds"]["all"] for row in at]
        found[name] = {
            "median": median(total),
            "within": sum(each < target for each in total),
            "worst": max(at, key=lambda row: row["milliseconds"]["all"]),
        }
    return found


if __name__ == "__main__":
    main()
