"""Which of our overflows other tools see: `python benchmarks/detectors.py --sanitizer`, on a GPU.

Each row is a case with its fixes out, or a small kernel that is wrong on purpose, and runs in a Python of its own:

    nothing     no detector: what the comparison with a reference shows, or the device by itself
    ours        under the detector that the row names, and that comparison
    memcheck    compute-sanitizer's; each tensor an allocation of its own (PYTORCH_NO_CUDA_MEMORY_CACHING=1)
    padded      the same with `--padding 128`
    cached      memcheck with torch's allocator as it is: tensors are parts of larger allocations
    debug       TRITON_DEBUG=1: asserts in Triton kernels, on integers that overflow, too

"Caught" is what the tool itself reports, not what the comparison does beside it. Seconds are of the whole process, its
imports included; memory is the most that the GPU had in use, above what it had before, contexts included.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import fixes, overlay
from harness.prover import Prover
from regressions.scenarios import draft, store

ROOT = Path(__file__).resolve().parents[1]
PATH = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks")]
SECONDS = 600
MEMCHECK = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "86"]
APART = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


@dataclass(frozen=True)
class Tool:
    command: Sequence[str] = ()
    env: dict[str, str] = field(default_factory=dict)
    is_ours: bool = False


TOOLS = {
    "nothing": Tool(),
    "ours": Tool(is_ours=True),
    "memcheck": Tool(MEMCHECK, APART),
    "padded": Tool([*MEMCHECK, "--padding", "128"], APART),
    "cached": Tool(MEMCHECK),
    "debug": Tool(env={"TRITON_DEBUG": "1"}),
}


@dataclass(frozen=True)
class Row:
    name: str
    out: tuple[str, ...]  # fixes
    entry: str
    params: dict[str, Any]
    detector: str
    zone_bytes: int = 4096
    device: str = "cuda"


def rows() -> list[Row]:
    wide = {"topk": 8, "num_steps": 1, "max_bs": 2, "max_context_len": 512, "seq_lens": [500, 500]}
    narrow = draft.case("27338:topk-factor", **wide)
    wall = draft.case("own:aiter-capacity-assert", topk=1, num_steps=2, max_bs=1, max_context_len=8, seq_lens=[7])
    far = {"topk": 2, "num_steps": 5, "max_bs": 2, "max_context_len": 150_000_000, "seq_lens": [100, 100]}
    wraps = draft.case("own:int32-rows", backend="aiter", path="cuda_graph", **far)
    unchecked = ("27338:topk-factor", "27338:capacity-assert")
    slots = {slot: store.case("27486:slot-assert", slots=[slot]) for slot in (-1, 8, 8 + 4096, 2**40)}

    def of(name: str, case: Any, *out: str, detector: str = "", device: str = "cuda") -> Row:
        entry = case.entry.replace("{target}", "eagle_kv")
        return Row(name, out, entry, dict(case.params), detector or case.detector, case.zone_bytes, device)

    def wrong(name: str, entry: str, detector: str) -> Row:
        return Row(name, (), f"detector_legs:{entry}", {}, detector)

    return [
        of("28 KB past the end", narrow, *unchecked),
        of("28 KB past the end, to fault", narrow, *unchecked, detector="guard-page"),
        of("one element past the end", wall, "own:aiter-capacity-assert"),
        of("the row before the buffer", slots[-1], "27486:slot-assert"),
        of("the row behind the buffer", slots[8], "27486:slot-assert"),
        of("a row 1 MiB behind the buffer", slots[8 + 4096], "27486:slot-assert"),
        of("a row 2**48 bytes behind the buffer", slots[2**40], "27486:slot-assert"),
        of("an offset that wraps in int32", wraps, "own:int32-rows"),
        of("the row before, in the C++ build", slots[-1], "27486:slot-assert", device="cpu"),
        wrong("a row into the next one", "row_into_row", "red-zone"),
        wrong("an element read past the end", "read_past", "poison"),
        wrong("an element not written", "too_little", "red-zone"),
    ]


def tables(device: str, jobs: int, only: str) -> Iterator[list[dict[str, Any]]]:
    """What each tool made of each row, so far. Ends with exit code 4 where there is nothing to compare with."""
    if device != "cuda" or not shutil.which(MEMCHECK[0]):
        print("benchmark: --sanitizer needs a GPU, and compute-sanitizer on PATH", file=sys.stderr)
        raise SystemExit(4)
    wanted = [row for row in rows() if only in row.name]
    with Prover(fixes.load(ROOT / "toggles"), device=device, root=ROOT) as prover:
        trees = {row.name: overlay.build(prover.edits(row.out)) for row in wanted}
    work = [(row, name) for row in wanted for name in TOOLS]
    made: list[dict[str, Any]] = []
    with ThreadPoolExecutor(jobs) as pool:
        found = pool.map(lambda one: _tried(one[0], one[1], trees[one[0].name], alone=jobs == 1), work)
        for (row, name), tried in zip(work, found, strict=True):
            if name == next(iter(TOOLS)):
                made.append({"row": row.name, "detector": row.detector, "out": row.out, "device": row.device})
            made[-1][name] = tried
            if len(made[-1]) == 4 + len(TOOLS):
                yield made


def _tried(row: Row, name: str, tree: Path | None, *, alone: bool) -> dict[str, Any]:
    tool = TOOLS[name]
    if not tool.command:  # what is compiled once must not be in the seconds
        _run(row, tool, tree, alone=False)
    print(f"benchmark: {row.name}, {name}", file=sys.stderr)
    return _run(row, tool, tree, alone=alone)


def _run(row: Row, tool: Tool, tree: Path | None, *, alone: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        request = {"entry": row.entry, "params": row.params, "device": row.device, "targets": []}
        request |= {"detector": row.detector if tool.is_ours else "none", "zone_bytes": row.zone_bytes}
        Path(folder, "request.json").write_text(json.dumps(request))
        path = [*([str(tree)] if tree else []), *PATH, os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, **tool.env, "PYTHONPATH": os.pathsep.join(path).rstrip(os.pathsep)}
        if row.device == "cpu":
            env["TRITON_INTERPRET"] = "1"
        log = ["--log-file", f"{folder}/log"] if tool.command else []
        command = [*tool.command, *log, sys.executable, "-m", "harness.leg", folder]
        watch = _Memory() if alone else None
        started = time.monotonic()
        with open(f"{folder}/said", "wb") as said:
            process = subprocess.Popen(command, env=env, stdout=said, stderr=said, start_new_session=True)
            try:
                status: int | None = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                status = None
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        seconds = round(time.monotonic() - started, 2)
        answer = _read(Path(folder), status, tool)
    return {**answer, "seconds": seconds, "bytes": watch.stop() if watch else None}


def _read(folder: Path, status: int | None, tool: Tool) -> dict[str, Any]:
    """Whether the tool itself caught it, and in a few words what it said, or what happened."""
    if status is None:
        return {"caught": False, "said": f"did not end within {SECONDS} s"}
    report = json.loads((folder / "report.json").read_text()) if (folder / "report.json").exists() else None
    said = (folder / "said").read_text(errors="replace")
    happened = _happened(report, status, said)
    if tool.command:
        log = (folder / "log").read_text(errors="replace") if (folder / "log").exists() else said
        if found := re.search(r"ERROR SUMMARY: (\d+) error", log):
            first = re.search(r"(Invalid .*|Program hit .*)", log)
            errors = int(found.group(1))
            words = f"{errors} errors: {first.group(1).strip()[:80] if first else ''}" if errors else happened
            return {"caught": bool(errors), "said": words}
        return {"caught": False, "said": f"no summary: {log.strip()[-200:]}"}
    if "TRITON_DEBUG" in tool.env:
        return {"caught": "assert" in f"{report and report['raised']}{said}".lower(), "said": happened}
    return {"caught": happened != "nothing", "said": happened}


def _happened(report: dict[str, Any] | None, status: int, said: str) -> str:
    if report is None:
        words = re.findall(r"Assertion .*|Fatal Python error: .*", said)
        name = signal.Signals(-status).name if status < 0 else f"exit {status}"
        return f"{name} {words[0] if words else ''}".strip()
    if report["hits"]:
        return "; ".join(f"{hit['elements']} elements {hit['side']}" for hit in report["hits"])
    if report["raised"]:
        first = (report["raised"]["message"].strip().splitlines() or [""])[0]
        return f"{report['raised']['type']}: {first}"[:100]
    return f"wrong: {report['wrong']}" if report["wrong"] else "nothing"


def show(found: list[dict[str, Any]]) -> None:
    """A mark for each tool, how many times as long as nothing it took, and the memory in MiB."""
    print(f"{'':38}" + "".join(f"{name:>20}" for name in TOOLS))
    for row in found:
        cells = []
        for name in TOOLS:
            took = row[name]["seconds"] / row["nothing"]["seconds"]
            memory = "" if row[name]["bytes"] is None else f" {row[name]['bytes'] >> 20}M"
            cells.append(f"{'caught' if row[name]['caught'] else '-'} {took:.1f}x{memory}")
        print(f"{row['row']:38}" + "".join(f"{cell:>20}" for cell in cells))
        print(f"{'':38}ours ({row['detector']}): {row['ours']['said']}; memcheck: {row['memcheck']['said']}")


def versions() -> dict[str, str]:
    said = subprocess.run([MEMCHECK[0], "--version"], capture_output=True, text=True, check=False).stdout
    return {"compute-sanitizer": said.strip().splitlines()[-1] if said.strip() else ""}


class _Memory(threading.Thread):
    """The most memory of the first visible GPU that is in use until `stop`, above what is as it starts."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._nvml, self._handle, self._ended = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), threading.Event()
        self._nvml.nvmlInit_v2()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        self._nvml.nvmlDeviceGetHandleByIndex_v2(int(visible) if visible.isdigit() else 0, ctypes.byref(self._handle))
        self._before = self._most = self._used()
        self.start()

    def _used(self) -> int:
        memory = (ctypes.c_ulonglong * 3)()  # total, free, used
        self._nvml.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(memory))
        return int(memory[2])

    def run(self) -> None:
        while not self._ended.wait(0.02):
            self._most = max(self._most, self._used())

    def stop(self) -> int:
        self._ended.set()
        self.join()
        return self._most - self._before
