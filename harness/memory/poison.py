"""Poison: a red zone whose bytes are values, so that what an out-of-range *read* takes from it shows in the result.

The layout is the red zone's, ``[front zone | payload | back zone]``. Every element of a zone, of the payload's own
dtype, is

    floating, complex   NaN: whatever is computed from it is NaN
    integer, bool       1: as an index it leads to an element that is there, so the run goes on, and to a wrong one

The detector itself reports stray writes only (``check``, as the red zone does). A read leaves no trace in memory: it is
the comparison with a reference that finds it, and a scenario that knows what 1 leads to can say how often it was read.
Without poison the same read meets whatever the allocator left there, and the result is right on most days.

Boundary. It does not see:

- a read whose value reaches nothing that is compared: masked out, clamped, overwritten;
- a read farther out than ``zone_bytes``, or one inside the payload, such as a row's surplus in the next row;
- an integer read where 1 happens to be right; make the inputs so that it is not;
- a stray write of NaN or of 1: the red zone's own pattern is the better one for writes.

Where the read must be seen whatever becomes of its value, use the guard page.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from .red_zone import RedZone
from .watch import Zone, register


@dataclass
class PoisonZone(Zone):
    """A zone of one value, repeated; ``data`` is a whole number of elements long and starts on one."""

    def arm(self) -> PoisonZone:
        self.cells()[:] = self._value()
        return self

    def is_changed(self) -> torch.Tensor:
        return self.changed().any()

    def changed(self) -> torch.Tensor:
        return (self.cells() != self._value()).any(dim=1)

    def cells(self) -> torch.Tensor:
        """(elements, itemsize) uint8, the zone itself: NaN equals itself byte by byte."""
        return self.data.view(-1, self.allocation.dtype.itemsize)

    def _value(self) -> torch.Tensor:
        dtype = self.allocation.dtype
        value = float("nan") if dtype.is_floating_point or dtype.is_complex else 1
        return torch.tensor([value], dtype=dtype).view(torch.uint8).to(self.data.device)

    def _old_and_new(self, cell: int) -> tuple[int, int]:
        signed = self.allocation.dtype.is_signed
        old, new = (bytes(cells.tolist()) for cells in (self._value(), self.cells()[cell]))
        return int.from_bytes(old, sys.byteorder, signed=signed), int.from_bytes(new, sys.byteorder, signed=signed)


@register
class Poison(RedZone):
    """See the module's text. ``zone_bytes``: size of each zone, 64 KiB unless told."""

    name = "poison"
    zone = PoisonZone
