"""How many random shapes a second: `python benchmarks/sweep.py [--device cuda] [--quick]`.

    shapes   one fix, with 100 to 2000 shapes: seconds against shapes, and the rate that the slope of it says
    toggles  the whole command in a copy of the checkout with 0, 100 and 500 more toggle files, in turn within each
             round: its own rate, its wall time, and what of that is spent on reading toggle files
    jobs     side by side in 1, 2, 4, … processes: which number is best (harness.sweep_cli.JOBS)
    fixes    each fix that has a strategy

Rates are `Swept.rate`: to draw, run and judge all shapes with all their legs, the fork servers up and kernels compiled.
`cold` is the very first sweep, which compiles them. What the servers take to start is in the command's wall time.

Prints a table and writes results/sweep-DEVICE.json (--json for another place), anew after each part.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

import record  # noqa: E402

from harness import fixes  # noqa: E402
from harness.company import Company  # noqa: E402
from harness.device import resolve_device  # noqa: E402
from harness.sweep import Sweeper, Swept  # noqa: E402
from harness.sweep_cli import JOBS, concerning  # noqa: E402
from regressions import strategies  # noqa: E402

FIX = "27338:topk-factor"
MORE_TOGGLES = (0, 100, 500)
SIZES = {"cpu": (20, 40, 80, 160), "cuda": (100, 300, 1000, 2000)}
EACH = {"cpu": 30, "cuda": 100}
Sweep = Callable[[str, int, int], Swept]
LARGE = ("27486:int32-guard", "own:int32-rows")  # some of their shapes hold gigabytes, one at a time


@contextlib.contextmanager
def sweeping(device: str, jobs: int) -> Iterator[Sweep]:
    """``sweep(fix, examples, seed)``, by this many processes, whose servers are up after the first."""
    registered = fixes.load(ROOT / "toggles")
    catalogue = concerning(registered, [fix.id for fix in registered if fix.scenario in strategies.SCENARIOS])

    def sweep(fix: str, examples: int, seed: int) -> Swept:
        space = strategies.space(fix, catalogue.fix(fix).scenario, device)
        assert space is not None
        swept = prover.sweep(space, examples, seed)
        if swept.stopped or swept.smallest or swept.disturbed:
            raise SystemExit(f"{fix} is not as declared: {swept.as_dict()}")
        return swept

    with Sweeper(catalogue, device=device, root=ROOT, company=Company(device, jobs)) as prover:
        yield sweep


def by_jobs(device: str, examples: int) -> dict[int, float]:
    """Shapes a second for each number of processes."""
    most = min(12 if device == "cuda" else 8, os.cpu_count() or 1)
    rates = {}
    for jobs in sorted({1, 2, 4, 8, most}):
        if jobs <= most:
            with sweeping(device, jobs) as sweep:
                rates[jobs] = round(sweep(FIX, examples, 0).rate, 1)
    return rates


def by_shapes(sweep: Sweep, sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    """Median seconds for each number of shapes, and the line through them."""
    points = []
    for examples in sizes:
        runs = [sweep(FIX, examples, seed) for seed in range(rounds)]
        points.append((median(run.shapes for run in runs), median(run.seconds for run in runs)))
    slope, start = _line(points)
    return {
        "points": [{"shapes": n, "seconds": round(s, 3), "a_second": round(n / s, 1)} for n, s in points],
        "seconds_a_shape": round(slope, 5), "start_seconds": round(start, 3), "a_second_by_slope": round(1 / slope, 1),
        "off_the_line": round(max(abs(start + slope * n - s) / s for n, s in points), 3),
    }  # fmt: skip


def by_fix(sweep: Sweep, device: str, examples: int) -> list[dict[str, Any]]:
    """Each twice: what is compiled at first use is there for the second time."""
    rows = []
    for fix in fixes.load(ROOT / "toggles"):
        if strategies.space(fix.id, fix.scenario, device):
            some = examples // 3 if fix.id in LARGE else examples
            sweep(fix.id, some, 0)
            rows.append(sweep(fix.id, some, 0).as_dict())
    return rows


def by_toggles(device: str, examples: int, rounds: int) -> list[dict[str, Any]]:
    """The command in a checkout with that many more toggle files."""
    seen: dict[int, list[dict[str, float]]] = {more: [] for more in MORE_TOGGLES}
    with tempfile.TemporaryDirectory() as folder:
        checkouts = {more: _checkout(Path(folder, str(more)), more) for more in MORE_TOGGLES}
        for seed in range(rounds):
            for more, checkout in checkouts.items():
                seen[more].append(_command(checkout, device, examples, seed))
    rows = [
        {"more_toggle_files": more, **{key: round(median(run[key] for run in runs), 3) for key in runs[0]}}
        for more, runs in seen.items()
    ]
    return [{**row, "rate_to_none": round(row["a_second"] / rows[0]["a_second"], 3)} for row in rows]


def _checkout(at: Path, more: int) -> Path:
    for name in ("harness", "kernels", "regressions", "toggles"):
        shutil.copytree(ROOT / name, at / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, at / name)
    pattern = (at / "toggles" / "27338.yaml").read_text()
    for number in range(900_000, 900_000 + more):
        text = pattern.replace("pr: 27338", f"pr: {number}").replace("row (too small", f"row {number} (too small")
        (at / "toggles" / f"{number}.yaml").write_text(text)
    return at


def _command(checkout: Path, device: str, examples: int, seed: int) -> dict[str, float]:
    out = checkout / "sweep.json"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), str(checkout / "kernels")] + sys.path[2:])}
    options = ["--examples", str(examples), "--seed", str(seed), "--device", device, "--json", str(out)]
    started = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "harness.cli", "sweep", FIX, *options], cwd=checkout, env=env,
        stdout=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    wall = time.monotonic() - started
    started = time.monotonic()
    fixes.load(checkout / "toggles")
    reading = time.monotonic() - started
    [swept] = json.loads(out.read_text())["fixes"]
    return {"a_second": swept["shapes_per_second"], "wall_seconds": wall, "reading_seconds": reading}


def _jobs(device: str) -> int:
    return min(JOBS[device], os.cpu_count() or 1)


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Slope and start of the least-squares line."""
    xs, ys = zip(*points, strict=True)
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a in xs)
    return slope, y - slope * x


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--device", default="auto")
    asked.add_argument("--rounds", type=int, default=2)
    asked.add_argument("--json", type=Path)
    asked.add_argument("--quick", action="store_true", help="small numbers, to see that it works; writes nothing")
    options = asked.parse_args()
    device, rounds = resolve_device(options.device), options.rounds
    if options.quick:
        SIZES[device], EACH[device], rounds = (10, 20), 10, 1
    sizes = SIZES[device]
    document: dict[str, Any] = {
        "schema_version": 1,
        "command": "python " + " ".join(["benchmarks/sweep.py", *sys.argv[1:]]),
        "environment": _environment(device), "fix": FIX, "jobs": _jobs(device),
    }  # fmt: skip

    def found(**figures: Any) -> None:
        document.update(figures)
        show(figures)
        if not options.quick:
            to.write_text(json.dumps(document, indent=1) + "\n")

    to = options.json or ROOT / "results" / f"sweep-{device}.json"
    with sweeping(device, _jobs(device)) as sweep:
        found(cold=sweep(FIX, sizes[-1], 0).as_dict())
        found(by_shapes=by_shapes(sweep, sizes, rounds))
    found(by_toggles=by_toggles(device, sizes[1], rounds))
    found(by_jobs={"shapes": sizes[1], "a_second": by_jobs(device, sizes[1])})
    with sweeping(device, _jobs(device)) as sweep:
        found(by_fix=by_fix(sweep, device, EACH[device]))


def show(figures: dict[str, Any]) -> None:
    if cold := figures.get("cold"):
        print(f"{FIX}, cold: {cold['shapes']} shapes, {cold['shapes_per_second']} a second")
    if jobs := figures.get("by_jobs"):
        print("processes  a second   " + ", ".join(f"{n}: {rate}" for n, rate in jobs["a_second"].items()))
    if shapes := figures.get("by_shapes"):
        for row in shapes["points"]:
            print(f"{row['shapes']:6.0f} shapes {row['seconds']:9.3f} s {row['a_second']:9.1f} a second")
        print(
            f"line: {shapes['start_seconds']} s + {shapes['seconds_a_shape']} s a shape, {shapes['a_second_by_slope']} "
            f"a second; no point is off it by more than {100 * shapes['off_the_line']:.0f}%"
        )
    for row in figures.get("by_fix", []):
        legs = row["legs"]
        print(
            f"{row['fix']:30} {row['shapes']:5} shapes, {row['told']:4} tell; {row['shapes_per_second']:7} a second; "
            f"{legs['together']} legs in {legs['processes']} processes, {legs['alone']} alone"
        )
    for row in figures.get("by_toggles", []):
        print(
            f"{row['more_toggle_files']:4} more toggle files {row['a_second']:8} a second, {row['rate_to_none']} of "
            f"the first; the command {row['wall_seconds']} s, of that reading them {row['reading_seconds']} s"
        )


def _environment(device: str) -> dict[str, Any]:
    from harness.sandbox import Request, Sandbox

    with Sandbox(device) as sandbox:
        path = [str(ROOT), str(ROOT / "kernels")]
        report = sandbox.run(Request("harness.leg:environment", device=device, path=path)).report
    assert report is not None
    cores = len(os.sched_getaffinity(0))
    return {**report["facts"], "cores": cores, "kernel": platform.release(), **record.made_of()}


if __name__ == "__main__":
    main()
