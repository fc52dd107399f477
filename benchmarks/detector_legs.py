"""What the legs of detectors.py and sanitizer.py run, in a leg's process."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from harness import memory
from harness.leg import WrongValues
from harness.memory import guard_page


def measured(params: dict[str, Any], device: str) -> dict[str, Any]:
    """Runs ``params["entry"]`` on ``params["params"]``: the bytes of memory that its tensors took, and what was wrong.

    On a GPU that is the most that torch reserved and the most that the guard page had at a time; on a CPU what became
    resident. Where ``params["dense"]`` is true, no scenario's word on what is touched is listened to.
    """
    module, _, name = params["entry"].partition(":")
    run = getattr(importlib.import_module(module), name)
    wrong = None
    with _dense() if params["dense"] else contextlib.nullcontext(), _counting(device) as taken:
        try:
            run(params["params"], device)
        except WrongValues as error:
            wrong = str(error)
    return {"bytes": taken(), "wrong": wrong}


@contextlib.contextmanager
def _dense() -> Iterator[None]:
    kept = memory.touches, memory.folds
    memory.touches, memory.folds = (lambda *_: None), (lambda *_: None)
    try:
        yield
    finally:
        memory.touches, memory.folds = kept


@contextlib.contextmanager
def _counting(device: str) -> Iterator[Any]:
    """A function that says how many bytes have been taken since."""
    if device != "cuda":
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM, the most that was resident, starts from here
        before = _resident("VmRSS")
        yield lambda: max(0, _resident("VmHWM") - before)
        return
    driver, held, most = guard_page._cuda_driver, dict[int, int](), [0]

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(driver(), name)

        def cuMemCreate(self, size: int, *rest: Any) -> Any:
            answer = driver().cuMemCreate(size, *rest)
            held[int(answer[1])] = size
            most[0] = max(most[0], sum(held.values()))
            return answer

        def cuMemRelease(self, handle: Any) -> Any:
            held.pop(int(handle))
            return driver().cuMemRelease(handle)

    torch.cuda.reset_peak_memory_stats()
    guard_page._cuda_driver = Counting
    try:
        yield lambda: most[0] + torch.cuda.max_memory_reserved()
    finally:
        guard_page._cuda_driver = driver


def _resident(field: str) -> int:
    [line] = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(f"{field}:")]
    return 1024 * int(line.split()[1])


@triton.jit
def _fill(rows, row_stride, width, block: tl.constexpr):
    """Row by row, its number and one; as many elements as it is told, whatever a row holds."""
    row = tl.program_id(0)
    at = tl.arange(0, block)
    tl.store(rows + row * row_stride + at, tl.full((block,), 0, tl.int32) + row + 1, mask=at < width)


@triton.jit
def _sum(values, count, out, block: tl.constexpr):
    at = tl.arange(0, block)
    tl.store(out, tl.sum(tl.load(values + at, mask=at < count, other=0)))


def row_into_row(params: dict[str, Any], device: str) -> None:
    """The first of two rows is written four elements too far: into the second, and not outside of the buffer."""
    rows = torch.zeros((2, 64), dtype=torch.int32, device=device)
    _fill[(2,)](rows, 64, 64, block=128)
    _fill[(1,)](rows, 64, 68, block=128)
    if (rows[1] != 2).any():
        raise WrongValues("row 1 holds what belongs to row 0")


def read_past(params: dict[str, Any], device: str) -> None:
    """65 of 64 elements are read. On most days what stands behind a buffer is zero, and the sum is right."""
    values = torch.ones(64, dtype=torch.float32, device=device)
    out = torch.zeros(1, dtype=torch.float32, device=device)
    _sum[(1,)](values, 65, out, block=128)
    if out.item() != 64:
        raise WrongValues(f"the sum is {out.item()}, not 64")


def too_little(params: dict[str, Any], device: str) -> None:
    """63 of 64 elements are written: nothing is stray, and one is missing."""
    rows = torch.zeros((1, 64), dtype=torch.int32, device=device)
    _fill[(1,)](rows, 64, 63, block=128)
    if (rows != 1).any():
        raise WrongValues("element 63 was not written")
