"""Guard page: the payload ends exactly where mapped memory ends, so the stray write itself faults.

CPU: one anonymous ``mmap`` reservation, all ``PROT_NONE`` but the payload's pages; a stray access is a SIGSEGV at the
guilty instruction. CUDA: an address range reserved through the driver's virtual memory calls (``cuda.bindings``), of
which only the middle is mapped; a stray access is an illegal-address error, raised at the next synchronisation.

The guards are address space, not memory: 16 GiB each side, so an element offset that wrapped in int32 lands in one
of them even for 8-byte elements. On a CPU untouched payload pages cost nothing either: a 12 GB buffer of which a
kernel writes a megabyte takes a megabyte. On CUDA the payload is backed in full, unless the scenario has said which of
its bytes are touched: see :mod:`.sparse`.

Boundary. It does not see:

- a write ahead of the payload that stays in its first page (CPU: less than 4 KiB, CUDA: less than 2 MiB ahead):
  the payload is flush at its end only. The red zone sees those;
- a stray write inside the payload, or one beyond 16 GiB that hits some other mapping;
- which write it was, or how many: ``check`` always answers ``[]``, the death of the process is the finding.

It does see stray *reads*, and writes of an unchanged value, which no comparing detector can.

Flush wins over alignment: a payload of 20 bytes starts 20 bytes ahead of the page end, on a 4-byte boundary. Its start
is always a multiple of the item size, and of the largest power of two that divides its byte count; no factory of torch
would hand out less than 16 (CPU: 64), so a kernel that takes that for granted and issues 16-byte accesses can fail here
without a bug of its own. ``align=16`` restores it, at the price of up to 15 bytes of mapped slack past the payload.

A payload is unmapped once its last tensor is gone (CUDA: at the next allocation, ``check`` or `.scrub` after that), so
using it later faults too.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .watch import DEFAULT_ZONE_BYTES, Hit, Watch, register

Span = tuple[int, int]  # start and stop, in bytes

GUARD_BYTES = 16 << 30
FOLD_BYTES = 32 << 20  # what a folded payload takes on CUDA, or less
_MAP_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
_PROT_NONE = 0
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAPPED: dict[int, int] = {}  # CUDA payloads, by the address that is reserved for each: their bytes
_RETIRED: list[Callable[[], None]] = []  # unmaps that wait until no capture can be disturbed


@register
class GuardPage(Watch):
    """See the module's text. ``zone_bytes`` is there for the common signature: a guard is never smaller."""

    name = "guard-page"

    def __init__(
        self,
        zone_bytes: int = DEFAULT_ZONE_BYTES,
        *,
        front_bytes: int = GUARD_BYTES,
        back_bytes: int = GUARD_BYTES,
        align: int = 1,
    ) -> None:
        super().__init__(zone_bytes)
        if align < 1 or align & (align - 1):
            raise ValueError(f"align is {align}: must be a power of two")
        self.front_bytes = max(front_bytes, self.zone_bytes)
        self.back_bytes = max(back_bytes, self.zone_bytes)
        self.align = align
        self.sparse: dict[int, tuple[Span, ...] | None] = {}  # a payload's bytes -> what of it is touched; None: folded

    def check(self) -> list[Hit]:
        hits = super().check()
        unmap_retired()
        return hits

    def place(self, nbytes: int, itemsize: int, device: torch.device) -> tuple[torch.Tensor, bool]:
        spaced = -(-nbytes // self.align) * self.align
        if device.type == "cuda":
            return self._map_cuda(nbytes, spaced, device), nbytes in self.sparse
        return self._map_cpu(nbytes, spaced), True

    def _map_cpu(self, nbytes: int, spaced: int) -> torch.Tensor:
        front, back = _round_up(self.front_bytes, mmap.PAGESIZE), _round_up(self.back_bytes, mmap.PAGESIZE)
        pages = _round_up(spaced, mmap.PAGESIZE)
        total = front + pages + back
        libc = _libc()
        base = libc.mmap(None, total, _PROT_NONE, _MAP_FLAGS, -1, 0)
        if base in (None, _MAP_FAILED):
            raise MemoryError(f"guard page: no {total} bytes of address space to reserve (errno {ctypes.get_errno()})")
        for start, stop in self._touched(nbytes, pages - spaced, mmap.PAGESIZE):
            if libc.mprotect(base + front + start, stop - start, mmap.PROT_READ | mmap.PROT_WRITE) != 0:
                errno = ctypes.get_errno()
                libc.munmap(base, total)
                raise MemoryError(f"guard page: cannot map {stop - start} payload bytes (errno {errno})")
        payload = (ctypes.c_uint8 * nbytes).from_address(base + front + pages - spaced)
        weakref.finalize(payload, libc.munmap, base, total).atexit = False
        return torch.frombuffer(payload, dtype=torch.uint8)

    def _map_cuda(self, nbytes: int, spaced: int, device: torch.device) -> torch.Tensor:
        unmap_retired()
        driver = _cuda_driver()
        index = device.index if device.index is not None else torch.cuda.current_device()
        with torch.cuda.device(index):
            torch.cuda.synchronize()  # makes the context current
            prop = driver.CUmemAllocationProp()
            prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            prop.location.id = index
            minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
            grain = int(_driven(driver.cuMemGetAllocationGranularity(prop, minimum)))
            front, back = _round_up(self.front_bytes, grain), _round_up(self.back_bytes, grain)
            pages = _round_up(spaced, grain)
            with contextlib.ExitStack() as undo:
                total = front + pages + back
                base = int(_driven(driver.cuMemAddressReserve(total, 0, driver.CUdeviceptr(0), 0)))
                undo.callback(driver.cuMemAddressFree, driver.CUdeviceptr(base), total)
                undo.callback(_MAPPED.pop, base, 0)
                _MAPPED[base] = nbytes
                folded = self.sparse.get(nbytes, ()) is None
                for start, stop in self._touched(nbytes, pages - spaced, grain):
                    held = min(stop - start, FOLD_BYTES) if folded else stop - start
                    _back(undo, prop, base + front + start, stop - start, held)
                    if nbytes in self.sparse:
                        _driven(driver.cuMemsetD8(driver.CUdeviceptr(base + front + start), 0, held))
                        _driven(driver.cuCtxSynchronize())  # zeros for every stream
                undo.callback(driver.cuCtxSynchronize)  # unwound first: nothing may still run on these pages
                payload = _CudaBytes(base + front + pages - spaced, nbytes)
                weakref.finalize(payload, _RETIRED.append, undo.pop_all().close).atexit = False
            return torch.as_tensor(payload, device=torch.device("cuda", index))

    def _touched(self, nbytes: int, start: int, page: int) -> list[Span]:
        """The parts of the middle to map, in whole pages and in order, for a payload that starts there in it."""
        spans = self.sparse.get(nbytes)
        if spans is None:
            return [(0, _round_up(start + nbytes, page))]
        parts: list[Span] = []
        for first, last in sorted([(0, 1), *spans]):  # torch asks the driver whose a payload's first byte is
            low, high = (start + first) // page * page, _round_up(start + last, page)
            if parts and low <= parts[-1][1]:
                parts[-1] = (parts[-1][0], max(high, parts[-1][1]))
            else:
                parts.append((low, high))
        return parts


def unmap_retired() -> int:
    """Give back what no tensor holds any more on CUDA. The bytes of the payloads that one still holds."""
    while _RETIRED:
        _RETIRED.pop()()
    return sum(_MAPPED.values())


def _back(undo: contextlib.ExitStack, prop: Any, at: int, size: int, held: int) -> None:
    """Map device memory of ``held`` bytes at an address, over and over until ``size`` bytes have some."""
    driver = _cuda_driver()
    handle = _driven(driver.cuMemCreate(held, prop, 0))
    undo.callback(driver.cuMemRelease, handle)
    for start in range(at, at + size, held):
        part = min(held, at + size - start)
        _driven(driver.cuMemMap(driver.CUdeviceptr(start), part, 0, handle, 0))
        undo.callback(driver.cuMemUnmap, driver.CUdeviceptr(start), part)
    access = driver.CUmemAccessDesc()
    access.location = prop.location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    _driven(driver.cuMemSetAccess(driver.CUdeviceptr(at), size, [access], 1))


class _CudaBytes:
    """Device bytes as the CUDA array interface describes them; torch keeps this object alive with the storage."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def _cuda_driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ImportError("the guard page on CUDA needs cuda.bindings: pip install cuda-bindings") from error
    return driver


def _driven(answer: tuple[Any, ...]) -> Any:
    """The value of a driver call, or a RuntimeError that names its CUresult."""
    status, *values = answer
    if int(status) != 0:
        raise RuntimeError(f"guard page: the CUDA driver refused: {status}")
    return values[0] if values else None
