"""What a process of its own costs a leg: `python benchmarks/isolation.py [--device cuda] [--jobs 1,4,12]`.

Measured in turn within each round, so that ratios hold on a machine that others use, too:

    bare       a fork of a process that has torch loaded; on a GPU it makes a context (`torch.cuda.init()` and
               `synchronize()`); it ends. "ready" is until the context is there, "gone" until it is reaped.
    nothing    legs that do nothing, one right after the other, through Sandbox.run
    draft      the same of a real leg: draft kv_indices, topk 8, 5 steps, a context of 4096
    fresh      `python -m harness.leg` doing each of these two once, from nothing

Then each job count: that many of each side by side, as a matrix with so many workers runs them.

Prints a table and writes results/isolation-DEVICE.json.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import record

ROOT = record.ROOT
sys.path[:0] = [str(ROOT)]

from harness.device import resolve_device  # noqa: E402
from harness.sandbox import Request, Sandbox  # noqa: E402
from regressions.scenarios import draft  # noqa: E402

PATH = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks")]
IN_A_ROW = 5


def requests(device: str) -> dict[str, Request]:
    batch = [4091 if device == "cuda" else 60] * 8  # Triton's interpreter takes a while
    case = draft.case("27338:topk-factor", topk=8, num_steps=5, max_bs=8, max_context_len=4096, seq_lens=batch)
    return {
        "nothing": Request("isolation_legs:nothing", device=device, path=PATH),
        "draft": Request(
            case.entry.replace("{target}", "eagle_kv"), case.params, device, PATH,
            detector=case.detector, zone_bytes=case.zone_bytes, timeout=600,
        ),
    }  # fmt: skip


def bare(device: str) -> dict[str, float]:
    """Seconds from before a fork until its child runs, until it has a context, and until it is reaped."""
    torch = sys.modules["torch"]
    read, write = os.pipe()
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        forked = time.monotonic()
        if device == "cuda":
            torch.cuda.init()
            torch.cuda.synchronize()
        os.write(write, json.dumps([forked, time.monotonic()]).encode())
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    gone = time.monotonic()
    os.close(write)
    said = os.read(read, 1000)
    os.close(read)
    if status or not said:
        raise SystemExit(f"a forked process could not use the {device}: wait status {status}")
    forked, ready = json.loads(said)
    return {"fork": forked - started, "ready": ready - started, "gone": gone - started}


def leg(sandbox: Sandbox, request: Request) -> dict[str, float]:
    """Seconds of one leg, in all and by its own account."""
    started = time.monotonic()
    ending = sandbox.run(request)
    total = time.monotonic() - started
    if not ending.report or ending.report["raised"] or ending.report["wrong"] or ending.report["hits"]:
        raise SystemExit(f"{request.entry} is not clean: {ending}")
    phases: dict[str, float] = ending.report["seconds"]
    return {"total": total, **phases, "around": total - sum(phases.values())}


def fresh(request: Request) -> float:
    """Seconds of a Python of its own that does what the leg does."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(PATH)}
    if request.device == "cpu":
        env |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "request.json").write_text(json.dumps(dataclasses.asdict(request)))
        started = time.monotonic()
        subprocess.run([sys.executable, "-m", "harness.leg", directory], env=env, check=True)
        took = time.monotonic() - started
        assert json.loads(Path(directory, "report.json").read_text())["raised"] is None
    return took


def one_by_one(device: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Median seconds of each phase. ``apart``: with a pause before, so that a spare is ready; ``gone``: its exit."""
    wanted = requests(device)
    seen: dict[str, list[dict[str, float]]] = {}

    def note(name: str, row: dict[str, float]) -> None:
        seen.setdefault(name, []).append(row)

    with Sandbox(device) as sandbox:
        for request in wanted.values():  # JIT builds, file caches
            leg(sandbox, request)
        for at in range(rounds):
            for _ in range(IN_A_ROW):
                note("bare", bare(device))
            for name, request in wanted.items():
                sandbox.settle()
                for _ in range(IN_A_ROW):
                    note(name, leg(sandbox, request))
                sandbox.settle()
                time.sleep(1)
                apart = leg(sandbox, request)
                started = time.monotonic()
                sandbox.settle()
                note(f"{name} apart", {**apart, "gone": time.monotonic() - started})
                if at == 0:
                    fresh(request)
                note(f"{name} fresh", {"total": fresh(request)})
        params = {"entry": wanted["draft"].entry, "params": wanted["draft"].params}
        twice = dataclasses.replace(wanted["draft"], entry="isolation_legs:twice", params=params)
        report = sandbox.run(twice).report
    assert report is not None
    rows: dict[str, dict[str, Any]] = {
        name: {key: round(median(row[key] for row in runs), 4) for key in runs[0]} for name, runs in seen.items()
    }
    first, second = report["facts"]["seconds"]
    imported = report["facts"]["installed"]
    return rows | {"draft twice": {"first": round(first, 4), "second": round(second, 4), "imported": imported}}


def side_by_side(device: str, jobs: int) -> dict[str, float]:
    """How many a second, with ``jobs`` at it: bare forks, legs that do nothing, draft legs."""
    started = time.monotonic()
    for pid in [_forks_a_few(device) for _ in range(jobs)]:
        if os.waitpid(pid, 0)[1]:
            raise SystemExit("a bare fork failed")
    rates = {"bare": jobs * IN_A_ROW / (time.monotonic() - started)}

    def busy(sandbox: Sandbox, request: Request, legs: int) -> None:
        for _ in range(legs):
            leg(sandbox, request)

    with contextlib.ExitStack() as stack:
        sandboxes = [stack.enter_context(Sandbox(device)) for _ in range(jobs)]
        pool = stack.enter_context(ThreadPoolExecutor(jobs))
        for name, request in requests(device).items():
            list(pool.map(functools.partial(busy, request=request, legs=1), sandboxes))  # servers start
            started = time.monotonic()
            list(pool.map(functools.partial(busy, request=request, legs=IN_A_ROW), sandboxes))
            rates[name] = jobs * IN_A_ROW / (time.monotonic() - started)
    return {name: round(rate, 2) for name, rate in rates.items()}


def _forks_a_few(device: str) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for _ in range(IN_A_ROW):
                bare(device)
            code = 0
        finally:
            os._exit(code)
    return pid


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """What the targets are about."""
    ready, leg = rows["bare"]["ready"], rows["nothing"]["total"]
    return {
        "leg / bare fork and context": round(leg / ready, 2),
        "leg / bare, exit included": round(leg / rows["bare"]["gone"], 2),
        "leg with a spare ready / bare": round(rows["nothing apart"]["total"] / ready, 2),
        "fresh Python / leg": round(rows["nothing fresh"]["total"] / leg, 1),
        "fresh Python / draft leg": round(rows["draft fresh"]["total"] / rows["draft"]["total"], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", default="1,2")
    arguments = parser.parse_args()
    device = resolve_device(arguments.device)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # nothing before a fork may initialise CUDA
    import torch  # noqa: F401

    rows = one_by_one(device, arguments.rounds)
    together = {jobs: side_by_side(device, int(jobs)) for jobs in arguments.jobs.split(",")}
    print(f"{'ms':26}" + "".join(f"{name:>9}" for name in ("total", "around", "import", "run", "check", "gone")))
    for name, row in rows.items():
        if name not in ("bare", "draft twice"):
            cells = (row.get(key) for key in ("total", "around", "import", "run", "check", "gone"))
            print(f"{name:26}" + "".join(f"{1000 * cell:9.1f}" if cell is not None else f"{'':9}" for cell in cells))
    for name in ("bare", "draft twice"):
        numbers = {key: value for key, value in rows[name].items() if isinstance(value, float)}
        print(f"{name:26}  " + ", ".join(f"{key} {1000 * value:.1f}" for key, value in numbers.items()))
    for name, ratio in ratios(rows).items():
        print(f"{name:30} {ratio:8}")
    print(f"{'a second, side by side':26}" + "".join(f"{name:>9}" for name in ("bare", "nothing", "draft")))
    for jobs, rates in together.items():
        print(f"{jobs:>26}" + "".join(f"{rate:9}" for rate in rates.values()))
    figures = {"seconds": rows, "ratios": ratios(rows), "side_by_side": together}
    record.save(ROOT / "results" / f"isolation-{device}.json", device, figures)


if __name__ == "__main__":
    main()
