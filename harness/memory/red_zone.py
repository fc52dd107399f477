"""Red zone: one owning allocation ``[front zone | payload | back zone]`` around every tensor.

The payload starts on a 512 B boundary, as the CUDA caching allocator gives it; the pad that this takes is part of
the front zone. The back zone is flush with the payload's end. Each zone holds its own two-byte pattern and is
compared byte for byte on the device; only one flag a zone and, for a hit, a handful of values reach the host.

Boundary. It does not see:

- a write of the value that the zone already holds, in part or in full (one byte in 256 for one-byte elements);
- a write that is undone before ``check``;
- a write farther out than ``zone_bytes``: size it above the overflow that you expect (``Hit.lower_bound`` says when
  a hit reaches the far end of its zone);
- a stray write inside the payload, such as one row running into the next;
- a stray read.

Every watched allocation stays alive until the detector is dropped, so that a buffer that was overrun and freed
is still reported: memory grows with the number of factory calls, by ``2 * zone_bytes`` each plus the payload.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from .watch import DEFAULT_ZONE_BYTES, Allocation, Watch, Zone, register

ALIGNMENT = 512


@register
class RedZone(Watch):
    """See the module's text. ``zone_bytes``: size of each zone, 64 KiB unless told."""

    name = "red-zone"
    zone: ClassVar[type[Zone]] = Zone  # what both zones are

    def __init__(self, zone_bytes: int = DEFAULT_ZONE_BYTES) -> None:
        super().__init__(zone_bytes)
        self._zones: list[Zone] = []

    def place(self, nbytes: int, itemsize: int, device: torch.device) -> tuple[torch.Tensor, bool]:
        whole = torch.empty(self.zone_bytes + ALIGNMENT + nbytes + self.zone_bytes, dtype=torch.uint8, device=device)
        start = self.zone_bytes + -(whole.data_ptr() + self.zone_bytes) % ALIGNMENT
        return whole[start : start + nbytes], False

    def placed(self, payload: torch.Tensor, allocation: Allocation) -> None:
        start, stop = payload.storage_offset(), payload.storage_offset() + payload.numel()
        whole = torch.empty(0, dtype=torch.uint8, device=payload.device).set_(payload.untyped_storage())
        self._zones.append(self.zone(whole[:start], "before", allocation).arm())
        self._zones.append(self.zone(whole[stop : stop + self.zone_bytes], "after", allocation).arm())

    def zones(self) -> list[Zone]:
        return self._zones
