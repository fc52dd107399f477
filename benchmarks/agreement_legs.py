"""The leg's side of a touch: two buffers are made under a detector, touched, and looked at."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from agreement_model import FAR, PITCH, Touch, first
from torch.overrides import TorchFunctionMode

from harness import memory
from harness.memory.guard_page import _CudaBytes

UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MAKES: dict[str, Callable[..., torch.Tensor]] = {
    "zeros": lambda count, **kw: torch.zeros(count, **kw),
    "empty": lambda count, **kw: torch.empty(count, **kw),
    "full": lambda count, **kw: torch.full((count,), 7, **kw),
    "tensor": lambda count, **kw: torch.tensor([3] * count, **kw),
    "scalar": lambda count, **kw: torch.zeros((), **kw),
    "strided": lambda count, **kw: torch.empty_strided((count,), (3,), **kw),
}


class Arena(TorchFunctionMode):
    """Opened around a red zone: what that allocates lies PITCH apart, amid FAR bytes of zeros that are nobody's."""

    def __init__(self, device: str):
        super().__init__()
        size = 2 * FAR[device] + 2 * PITCH
        self.next, self.device = FAR[device], device
        if device == "cuda":
            self.whole = torch.zeros(size, dtype=torch.uint8, device=device)
        else:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
            self.whole = torch.frombuffer(mmap.mmap(-1, size, flags), dtype=torch.uint8)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        placed = func is torch.empty and kwargs.get("dtype") is torch.uint8 and args != (0,)
        if not placed or torch.device(kwargs["device"]).type == "meta":
            return func(*args, **kwargs)
        at = self.whole.data_ptr() + self.next
        self.next += PITCH
        return borrowed(at, args[0], torch.uint8, self.device)


def borrowed(address: int, count: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Memory that something else owns, as a storage of its own."""
    if device == "cuda":
        return torch.as_tensor(_CudaBytes(address, count * dtype.itemsize), device=device).view(dtype)
    return torch.frombuffer((ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address), dtype=dtype)


@triton.jit
def touch_kernel(base, at, out, count, put, ACT: tl.constexpr):
    lanes = tl.arange(0, 8)
    live = lanes < count
    here = base + at + lanes
    if ACT == "put":
        tl.store(here, put, mask=live)
    else:
        held = tl.load(here, mask=live)
        if ACT == "read":
            tl.store(out + lanes, held, mask=live)
        elif ACT == "same":
            tl.store(here, held, mask=live)
        else:
            tl.store(here, ~held, mask=live)
            if ACT == "undone":
                tl.store(here, held, mask=live)


def touched(params: dict[str, Any], device: str) -> dict[str, Any]:
    """A leg's entry: make both buffers under a detector, touch, and say what the detector and the reference see."""
    touch = Touch(**params["touch"])
    out = torch.zeros(8, dtype=UNITS[touch.unit], device=device)
    detector = memory.DETECTORS[params["detector"]](zone_bytes=touch.zone)
    with Arena(device) as arena, detector:
        buffers = [_made(touch, buffer, device) for buffer in range(2)]
        if touch.make == "nothing":
            base, count = torch.empty(0, dtype=UNITS[touch.unit], device=device), 0
        else:
            base, count = buffers[0].as_strided((1,), (1,)).view(UNITS[touch.unit]), touch.count
        act = touch.act.partition(" ")[0]
        put = int.from_bytes(bytes([touch.put] * touch.unit), sys.byteorder, signed=touch.unit > 1)
        if touch.how == "triton":
            touch_kernel[(1,)](base, touch.at // touch.unit, out, count, put, ACT=act)
        elif count:
            _in_torch(act, borrowed(base.data_ptr() + touch.at, count, base.dtype, device), out, put)
        hits, wrong = detector.check(), compared(touch, buffers, out)
        if len(detector.allocations) != 2:
            raise AssertionError(f"{params['detector']} watched {len(detector.allocations)} buffers of 2")
    record_of = {id(allocation): at for at, allocation in enumerate(detector.allocations)}
    shown = [
        [record_of[id(hit.allocation)], hit.side, hit.elements, hit.first_offset_bytes, hit.last_offset_bytes]
        for hit in hits
    ]
    return {"hits": shown, "wrong": wrong, "around": arena.next}


def _made(touch: Touch, buffer: int, device: str) -> torch.Tensor:
    dtype = UNITS[touch.itemsize]
    made = MAKES.get(touch.make, MAKES["zeros"])(touch.elements, dtype=dtype, device=device)
    content = bytearray(first(buffer, offset) for offset in range(touch.nbytes))
    _span(touch, made).copy_(torch.frombuffer(content, dtype=dtype))
    return made


def _span(touch: Touch, made: torch.Tensor) -> torch.Tensor:
    return made.as_strided((touch.nbytes // touch.itemsize,), (1,))


def _in_torch(act: str, here: torch.Tensor, out: torch.Tensor, put: int) -> None:
    for at in range(len(here)):
        held = None if act == "put" else here[at].clone()
        if held is None:
            here[at] = put
        elif act == "read":
            out[at] = held
        elif act == "same":
            here[at] = held
        else:
            here[at] = ~held
            if act == "undone":
                here[at] = held


def compared(touch: Touch, buffers: Sequence[torch.Tensor], out: torch.Tensor) -> dict[str, int]:
    """The reference: a buffer's elements are as they were made, a read has what it should. First wrong byte of each."""
    wrong: dict[str, int] = {}
    for buffer, made in enumerate(buffers):
        got = _span(touch, made).cpu().view(torch.uint8).tolist()
        for offset, byte in enumerate(got):
            if touch.own(offset) and byte != first(buffer, offset):
                wrong.setdefault("ab"[buffer], offset)
    if touch.act == "read" and touch.make != "nothing":
        for offset, byte in enumerate(out.cpu().view(torch.uint8).tolist()[: touch.count * touch.unit]):
            if byte != first(0, touch.wanted + offset):
                wrong.setdefault("out", offset)
    return wrong
