"""What a process of its own costs a leg, and what a leg costs that shares one: `python benchmarks/isolation.py`.

    bare               a fork of a process that has torch loaded; on a GPU it makes a context (`torch.cuda.init()` and
                       `synchronize()`); it ends. "ready" is until the context is there, "gone" until it is reaped.
    nothing            legs that do nothing, one right after the other, each in a process of its own
    nothing, shared    the same in a resident process
    draft              a real leg: draft kv_indices, topk 8, 5 steps, a context of 4096
    draft, shared      the same in a resident process
    fresh              `python -m harness.leg` doing each of these two, from nothing

and then that many of a kind side by side (`--jobs 12`), as a matrix with so many workers runs them.

A line is printed, and results/isolation-DEVICE.json written, as soon as each is measured. Kernels are built first,
which takes as long as it takes: `draft, first`.
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
from collections import Counter
from collections.abc import Callable, Sequence
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
Figures = dict[str, Any]


def requests(device: str, target: str = "eagle_kv", path: Sequence[str] = PATH) -> dict[str, Request]:
    batch = [4091 if device == "cuda" else 60] * 8  # Triton's interpreter takes a while
    case = draft.case("27338:topk-factor", topk=8, num_steps=5, max_bs=8, max_context_len=4096, seq_lens=batch)
    return {
        "nothing": Request("isolation_legs:nothing", device=device, path=path),
        "draft": Request(
            case.entry.replace("{target}", target), case.params, device, path,
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


def leg(sandbox: Sandbox, request: Request, shared: bool = False) -> dict[str, Any]:
    """Seconds of one leg, in all and by its own account; what it left in a process that it shared."""
    started = time.monotonic()
    ending = sandbox.run(request, shared=shared)
    total = time.monotonic() - started
    if not ending.report or ending.report["raised"] or ending.report["wrong"] or ending.report["hits"]:
        raise SystemExit(f"{request.entry} is not clean: {ending}")
    if ending.shared != shared:
        raise SystemExit(f"{request.entry}: no process that it could share")
    phases: dict[str, float] = ending.report["seconds"]
    return {"total": total, **phases, "around": total - sum(phases.values()), "left": ending.left}


def many(sandbox: Sandbox, request: Request, count: int, *, shared: bool = False, limit: float = 30.0) -> Figures:
    """Legs one right after the other, until there were ``count`` or ``limit`` seconds are over."""
    started, rows = time.monotonic(), []
    while len(rows) < count and time.monotonic() - started < limit:
        rows.append(leg(sandbox, request, shared))
    took = time.monotonic() - started
    left = Counter(what for row in rows for what in row.pop("left"))
    seconds = {key: round(median(row[key] for row in rows), 4) for key in rows[0]}
    return {"legs": len(rows), "legs_per_second": round(len(rows) / took, 2), "seconds": seconds, "left": dict(left)}


def gone(sandbox: Sandbox) -> Figures:
    """Seconds until a leg's process has been torn down, after its report."""
    started = time.monotonic()
    sandbox.settle()
    return {"seconds": round(time.monotonic() - started, 4)}


def bares(device: str, count: int) -> Figures:
    rows = [bare(device) for _ in range(count)]
    return {"seconds": {key: round(median(row[key] for row in rows), 4) for key in rows[0]}}


def bares_side_by_side(device: str, jobs: int, count: int) -> Figures:
    started = time.monotonic()
    for pid in [_forks_a_few(device, count) for _ in range(jobs)]:
        if os.waitpid(pid, 0)[1]:
            raise SystemExit("a bare fork failed")
    return {"jobs": jobs, "per_second": round(jobs * count / (time.monotonic() - started), 2)}


def side_by_side(request: Request, jobs: int, count: int, *, shared: bool = False) -> Figures:
    """Legs a second, with ``jobs`` servers at it, after one leg each."""
    with contextlib.ExitStack() as stack:
        sandboxes = [stack.enter_context(Sandbox(request.device)) for _ in range(jobs)]
        pool = stack.enter_context(ThreadPoolExecutor(jobs))
        run = functools.partial(many, request=request, shared=shared, limit=15)
        list(pool.map(functools.partial(run, count=1), sandboxes))
        started = time.monotonic()
        found = list(pool.map(functools.partial(run, count=count), sandboxes))
        took = time.monotonic() - started
    left = sum((Counter(one["left"]) for one in found), Counter[str]())
    rate = round(sum(one["legs"] for one in found) / took, 2)
    seconds = {key: round(median(one["seconds"][key] for one in found), 4) for key in found[0]["seconds"]}
    return {"jobs": jobs, "legs_per_second": rate, "seconds": seconds, "left": dict(left)}


def _forks_a_few(device: str, count: int) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for _ in range(count):
                bare(device)
            code = 0
        finally:
            os._exit(code)
    return pid


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


def ratios(found: Figures) -> dict[str, float]:
    """What the targets are about, as far as it was measured."""
    pairs = {
        "leg / bare fork and context": ("nothing", "bare", "ready"),
        "leg / bare, exit included": ("nothing", "bare", "gone"),
        "fresh Python / leg": ("nothing, fresh", "nothing", "total"),
        "fresh Python / draft leg": ("draft, fresh", "draft", "total"),
        "draft leg / the same, shared": ("draft", "draft, shared", "total"),
    }
    return {
        name: round(found[one]["seconds"]["total"] / found[other]["seconds"][of], 2)
        for name, (one, other, of) in pairs.items()
        if one in found and other in found
    }


class Log:
    """Figures, printed and kept as they are found."""

    def __init__(self, path: Path):
        self.path, self.found = path, dict[str, Any]()
        self._started = time.monotonic()

    def note(self, name: str, measure: Callable[[], Figures]) -> None:
        self.found[name] = measure()
        print(f"{time.monotonic() - self._started:6.1f} s  {name:34} {json.dumps(self.found[name])}", flush=True)
        self.path.write_text(json.dumps({"incomplete": True, **self.found}, indent=1) + "\n")


def measure(log: Log, device: str, jobs: int) -> None:
    wanted = requests(device)
    nothing, real = wanted["nothing"], wanted["draft"]
    log.note("bare", lambda: bares(device, 8))
    with Sandbox(device) as sandbox:
        log.note("nothing, first", lambda: many(sandbox, nothing, 1))
        log.note("nothing", lambda: many(sandbox, nothing, 10))
        log.note("nothing, gone", lambda: gone(sandbox))
        log.note("nothing, shared, first", lambda: many(sandbox, nothing, 1, shared=True))
        log.note("nothing, shared", lambda: many(sandbox, nothing, 300, shared=True))
        log.note("draft, first", lambda: many(sandbox, real, 1))
        log.note("draft", lambda: many(sandbox, real, 5))
        log.note("draft, shared", lambda: many(sandbox, real, 100, shared=True))
    log.note(f"bare, {jobs} side by side", lambda: bares_side_by_side(device, jobs, 2))
    log.note(f"nothing, {jobs} side by side", lambda: side_by_side(nothing, jobs, 2))
    log.note(f"draft, shared, {jobs} side by side", lambda: side_by_side(real, jobs, 20, shared=True))
    for name, request in wanted.items():
        log.note(f"{name}, fresh", functools.partial(_fresh_twice, request))


def _fresh_twice(request: Request) -> Figures:
    return {"seconds": {"total": round(min(fresh(request) for _ in range(2)), 4)}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=12)
    arguments = parser.parse_args()
    device = resolve_device(arguments.device)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # nothing before a fork may initialise CUDA
    import torch  # noqa: F401

    log = Log(ROOT / "results" / f"isolation-{device}.json")
    measure(log, device, arguments.jobs)
    found = ratios(log.found)
    for name, ratio in found.items():
        print(f"{name:34} {ratio:8}")
    record.save(log.path, device, {"figures": log.found, "ratios": found})


if __name__ == "__main__":
    main()
