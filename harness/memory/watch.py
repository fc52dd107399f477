"""What every memory detector shares: redirected factories, allocation records, hits.

A detector is a context manager around *unmodified* code. While it is open, a ``TorchFunctionMode`` sends each
factory call (``torch.empty``, ``x.new_zeros``, ``torch.arange`` ...) to the detector, which decides where the bytes
live. ``empty/zeros/ones/full`` ask the meta device for shape and strides, so the plain tensor never exists (it may
be 12 GB); the others run for real and are copied in.

Boundary, for every detector:

- Only factory calls made from Python are seen: not the results of operators (``a + b``, ``clone``, ``cat``,
  ``.to``), not C++ allocations, not the legacy ``torch.IntTensor(...)`` constructors, not compiled graphs.
- Passed through untouched: zero elements, pinned, meta, sparse, quantized and named tensors, ``out=``, tensor
  subclasses, aliases of foreign memory (``from_numpy``, ``as_tensor(ndarray)``), any device but CPU and CUDA, and
  all that is allocated while the current CUDA stream is capturing.
- A watched tensor has the shape, strides and dtype asked for, but its storage may be larger and its
  ``storage_offset()`` need not be 0; ``resize_`` may grow it into a watched zone.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch.overrides import TorchFunctionMode

DEFAULT_ZONE_BYTES = 64 * 1024
VALUES_KEPT = 4
_SKIPPED_FRAMES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))

_T = torch.Tensor
_FILL_ARGUMENT = object()  # the caller names the value: torch.full and friends
_PLACED: dict[Any, Any] = {
    **dict.fromkeys((torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted), None),
    **dict.fromkeys((_T.new_empty, _T.new_empty_strided), None),
    **dict.fromkeys((torch.zeros, torch.zeros_like, _T.new_zeros), 0),
    **dict.fromkeys((torch.ones, torch.ones_like, _T.new_ones), 1),
    **dict.fromkeys((torch.full, torch.full_like, _T.new_full), _FILL_ARGUMENT),
}
_COPIED = {
    *(torch.tensor, torch.as_tensor, torch.scalar_tensor, _T.new_tensor, torch.arange, torch.range, torch.eye),
    *(torch.linspace, torch.logspace, torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal),
    *(torch.rand_like, torch.randn_like, torch.randint_like, torch.tril_indices, torch.triu_indices),
}


@dataclass(frozen=True)
class Allocation:
    """One watched tensor as its factory call made it. ``nbytes`` is the payload: strides included, zones not."""

    label: str  # text of the source line that allocated it
    site: str  # file:line of the first frame outside torch and the detectors
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    nbytes: int
    address: int

    def as_dict(self) -> dict[str, Any]:
        shown = {"label": self.label, "site": self.site, "shape": list(self.shape), "nbytes": self.nbytes}
        return shown | {"dtype": str(self.dtype).removeprefix("torch."), "device": self.device}


@dataclass(frozen=True)
class Hit:
    """Stray bytes on one side of one payload, counted in elements (cells of the payload's item size).

    Offsets are where the lowest and the highest stray element start, in bytes: from the payload's end for
    ``after`` (0 is the first one past it), from its start for ``before`` (``-itemsize`` is the last one ahead of
    it). ``values`` holds the first few as ``(offset, old, new)``, read as integers of the item size.
    ``lower_bound``: the stray elements reach the far end of what is watched, so there may be more.
    """

    side: str  # "before" | "after"
    elements: int
    first_offset_bytes: int
    last_offset_bytes: int
    allocation: Allocation
    detector: str
    values: tuple[tuple[int, int, int], ...] = ()
    lower_bound: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {
            "side": self.side,
            "elements": self.elements,
            "first_offset_bytes": self.first_offset_bytes,
            "last_offset_bytes": self.last_offset_bytes,
            "lower_bound": self.lower_bound,
            "values": [{"offset_bytes": at, "old": old, "new": new} for at, old, new in self.values],
            "allocation": self.allocation.as_dict(),
            "detector": self.detector,
        }


@dataclass
class Zone:
    """Bytes next to a payload that nobody may write: ``data`` is 1-D uint8 and a whole number of elements long.

    The fill alternates two bytes, so that no value made of one repeated byte (0, -1, memset) can match it. It goes by
    the position in the storage, not in the zone, so that a zone may be cut out of one that is armed.
    """

    PATTERNS: ClassVar[dict[str, tuple[int, int]]] = {"before": (0xB7, 0x4E), "after": (0xD2, 0x6B)}

    data: torch.Tensor
    side: str
    allocation: Allocation

    def pattern(self) -> tuple[int, int]:
        first, second = self.PATTERNS[self.side]
        return (second, first) if self.data.storage_offset() % 2 else (first, second)

    def arm(self) -> Zone:
        if self._is_paired():
            self.data.view(torch.int16).fill_(self._pair())
        else:
            self.data[0::2], self.data[1::2] = self.pattern()
        return self

    def is_changed(self) -> torch.Tensor:
        """0-dim bool on the zone's device: whether any byte changed."""
        if self._is_paired():
            return (self.data.view(torch.int16) != self._pair()).any()
        return self.changed().any()

    def _is_paired(self) -> bool:
        return self.data.storage_offset() % 2 == 0 and self.data.numel() % 2 == 0

    def _pair(self) -> int:
        return int.from_bytes(bytes(self.pattern()), sys.byteorder, signed=True)

    def changed(self) -> torch.Tensor:
        """(elements,) bool on the zone's device: which cells hold at least one changed byte."""
        even, odd = self.pattern()
        stray = torch.empty_like(self.data, dtype=torch.bool)
        stray[0::2] = self.data[0::2] != even
        stray[1::2] = self.data[1::2] != odd
        return stray.view(-1, self.allocation.dtype.itemsize).any(dim=1)

    def hit(self, detector: str) -> Hit:
        """Describe a zone whose ``changed()`` has a true cell."""
        item = self.allocation.dtype.itemsize
        stray = self.changed()
        cells = stray.nonzero().flatten()
        first, last = int(cells[0]), int(cells[-1])
        origin = self.data.numel() if self.side == "before" else 0
        far_end = first == 0 if self.side == "before" else last == stray.numel() - 1
        values = tuple((c * item - origin, *self._old_and_new(c)) for c in cells[:VALUES_KEPT].tolist())
        ends = (first * item - origin, last * item - origin)
        return Hit(self.side, cells.numel(), *ends, self.allocation, detector, values, far_end)

    def _old_and_new(self, cell: int) -> tuple[int, int]:
        dtype = self.allocation.dtype
        start, stop = cell * dtype.itemsize, (cell + 1) * dtype.itemsize
        old = bytes(self.pattern()[at % 2] for at in range(start, stop))
        new = bytes(self.data[start:stop].tolist())
        signed = dtype.is_signed
        return int.from_bytes(old, sys.byteorder, signed=signed), int.from_bytes(new, sys.byteorder, signed=signed)


STALE = 0xA5  # in each byte of memory that others used: as an int32 it is negative, so no slot, length or offset


class Watch(TorchFunctionMode):
    """Base of the detectors: ``with X(zone_bytes=n) as watch: ...; watch.check()``.

    A subclass says where the bytes live (``place``) and which zones to compare (``zones``). ``zone_bytes`` is
    rounded up to whole 512 B.
    """

    name: ClassVar[str]
    # What each byte is set to that a factory leaves as it is, in a process that ran other legs: they may have left the
    # very values there that this one must compute. None: nobody was there before.
    fresh: ClassVar[int | None] = None

    def __init__(self, zone_bytes: int = DEFAULT_ZONE_BYTES) -> None:
        super().__init__()
        if zone_bytes <= 0:
            raise ValueError(f"zone_bytes is {zone_bytes}: must be positive")
        self.zone_bytes = -(-zone_bytes // 512) * 512
        self.allocations: list[Allocation] = []

    def place(self, nbytes: int, itemsize: int, device: torch.device) -> tuple[torch.Tensor, bool]:
        """A (nbytes,) uint8 tensor in watched memory, and whether it is known to hold zeros."""
        raise NotImplementedError

    def placed(self, payload: torch.Tensor, allocation: Allocation) -> None:
        """Called once ``payload`` (what ``place`` returned) has its record; arm its zones here."""

    def zones(self) -> Iterable[Zone]:
        return ()

    def check(self) -> list[Hit]:
        """Every zone that changed since it was armed, in order of allocation; they are armed again.

        Synchronises CUDA first, so a device error of the code under test is raised here at the latest.
        """
        _synchronize()
        with torch._C.DisableTorchFunction(), torch.no_grad():
            by_device: dict[torch.device, list[Zone]] = {}
            for zone in self.zones():
                by_device.setdefault(zone.data.device, []).append(zone)
            hits = []
            for zones in by_device.values():
                dirty = torch.stack([zone.is_changed() for zone in zones]).tolist()
                for zone in (zone for zone, is_dirty in zip(zones, dirty, strict=True) if is_dirty):
                    hits.append(zone.hit(self.name))
                    zone.arm()
        _synchronize()
        return hits

    def allocation_of(self, tensor: torch.Tensor) -> Allocation | None:
        """The newest record whose payload holds the tensor's first element; views count."""
        at = tensor.data_ptr()
        holders = (a for a in reversed(self.allocations) if a.address <= at < a.address + a.nbytes)
        return next(holders, None)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PLACED and _is_plain(args, kwargs):
            return self._place_like_meta(func, args, kwargs)
        made = func(*args, **kwargs)
        if func in _COPIED and _is_plain(args, kwargs) and _is_owned_result(func, made, args, kwargs):
            watched, _ = self._build(made, made.device)
            with torch.no_grad():
                watched.copy_(made)
            return watched.requires_grad_(made.requires_grad)
        return made

    def _place_like_meta(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device, fill = _device_asked_for(args, kwargs), _PLACED[func]
        if device.type not in ("cpu", "cuda"):
            return func(*args, **kwargs)
        if _capturing(device):  # a fill is captured, too, and runs at each replay
            made = func(*args, **kwargs)
            return self._freshened(made) if fill is None else made
        meta = func(*args, **kwargs | {"device": "meta"})
        if meta.numel() == 0 or meta.layout != torch.strided or meta.is_quantized:
            return func(*args, **kwargs)
        if fill is _FILL_ARGUMENT:
            fill = kwargs["fill_value"] if "fill_value" in kwargs else args[-1]
        built, holds_zeros = self._build(meta, device)
        if fill is None and not holds_zeros:
            built = self._freshened(built)
        elif fill is not None and not (holds_zeros and _PLACED[func] == 0):
            with torch.no_grad():
                built.fill_(fill)
        return built.requires_grad_(meta.requires_grad)

    def _freshened(self, made: torch.Tensor) -> torch.Tensor:
        if self.fresh is not None and made.numel() and made.layout == torch.strided and not made.is_quantized:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                made.detach().as_strided((_span(made),), (1,)).view(torch.uint8).fill_(self.fresh)
        return made

    def _build(self, like: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, bool]:
        """A tensor like it in watched memory, and whether it is known to hold zeros."""
        nbytes = _span(like) * like.dtype.itemsize
        with torch.no_grad():
            payload, holds_zeros = self.place(nbytes, like.dtype.itemsize, device)
            tensor = torch.empty(0, dtype=like.dtype, device=payload.device)
            offset = payload.storage_offset() // like.dtype.itemsize
            tensor.set_(payload.untyped_storage(), offset, like.shape, like.stride())
            where = (*_call_site(), tuple(like.shape), like.dtype, str(payload.device), nbytes, tensor.data_ptr())
            allocation = Allocation(*where)
            self.allocations.append(allocation)
            self.placed(payload, allocation)
        return tensor, holds_zeros


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """While a scenario computes what it compares with: no detector places those tensors, however many they are."""
    with torch._C.DisableTorchFunction():
        yield


class NoDetector(Watch):
    """Watches nothing and redirects nothing; ``check`` only synchronises."""

    name = "none"

    def __enter__(self) -> NoDetector:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None


DETECTORS: dict[str, type[Watch]] = {NoDetector.name: NoDetector}
_W = TypeVar("_W", bound=type[Watch])


def register(detector: _W) -> _W:
    """Class decorator: enter a detector into ``DETECTORS`` under its ``name``."""
    DETECTORS[detector.name] = detector
    return detector


def _span(tensor: torch.Tensor) -> int:
    """Elements from its first to its last, those between them that are not its own counted."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _is_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if kwargs.get("out") is not None or kwargs.get("names") is not None or kwargs.get("pin_memory"):
        return False
    source = args[0] if args else kwargs.get("input")
    return not isinstance(source, torch.Tensor) or type(source) in (torch.Tensor, torch.nn.Parameter)


def _device_asked_for(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    device = kwargs.get("device")
    source = args[0] if args else kwargs.get("input")
    if device is None:
        device = source.device if isinstance(source, torch.Tensor) else torch.get_default_device()
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _is_owned_result(func: Any, made: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    source = args[0] if args else kwargs.get("data")
    if func is torch.as_tensor and not isinstance(source, (list, tuple, int, float, bool, complex)):
        return False
    if type(made) is not torch.Tensor or made.device.type not in ("cpu", "cuda") or made.numel() == 0:
        return False
    return made.layout == torch.strided and not made.is_quantized and not _capturing(made.device)


def _call_site() -> tuple[str, str]:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED_FRAMES):
        frame = frame.f_back
    file, line = frame.f_code.co_filename, frame.f_lineno
    return linecache.getline(file, line).strip(), f"{file}:{line}"
