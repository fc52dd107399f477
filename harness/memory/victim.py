"""Victim: allocations laid next to each other, as a CUDA graph's private pool lays them.

What an overflow does depends on who lives behind the buffer. In issue 26340 it was the int64 draft-token list, and
the stray int32 slots became token ids far out of the vocabulary. A bump arena makes that neighbour certain: each
allocation starts at the next 512 B boundary behind the last one, the rule of the CUDA caching allocator, so the
tensor allocated right after a buffer is the one that its overflow stomps. Nothing is protected: the code under test
reads the stomped values and shows what it makes of them.

``neighbour(tensor)`` is the victim itself. ``check`` reports only bytes that belong to nobody: the gaps up to the next
512 B boundary, the unused rest of a chunk, and a zone of ``zone_bytes`` at both ends of a chunk.

Boundary. It does not see:

- a stray write into a neighbour's payload: compare ``neighbour``'s values with what they should be;
- same-value writes into a gap, writes undone before ``check``, writes beyond a chunk's end zones, stray reads;
- stray bytes where a later allocation has been placed since: they are the payload's now, and those behind it are put
  down to it rather than to the buffer that wrote them;
- the real allocator's reuse of freed blocks and its size classes: nothing is ever reused here.

A request that does not fit the chunk's rest starts a new chunk; one larger than ``chunk_bytes`` gets its own. There the
neighbour in memory is a zone, and ``neighbour`` answers None.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest

import torch

from .watch import DEFAULT_ZONE_BYTES, Allocation, Watch, Zone, register

ALIGNMENT = 512
DEFAULT_CHUNK_BYTES = 64 << 20


@dataclass
class _Chunk:
    """``data``: uint8, [front zone | bump area | back zone], starting on a 512 B boundary."""

    data: torch.Tensor
    used: int  # where the next allocation starts
    limit: int  # where the back zone starts
    payloads: list[torch.Tensor] = field(default_factory=list)
    zones: list[Zone] = field(default_factory=list)  # the front one, then one behind each payload


@register
class Victim(Watch):
    """See the module's text. ``chunk_bytes``: how much neighbours share, 64 MiB unless told."""

    name = "victim"

    def __init__(self, zone_bytes: int = DEFAULT_ZONE_BYTES, *, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> None:
        super().__init__(zone_bytes)
        if chunk_bytes < ALIGNMENT:
            raise ValueError(f"chunk_bytes is {chunk_bytes}: must be at least {ALIGNMENT}")
        self.chunk_bytes = _round_up(chunk_bytes)
        self._chunks: list[_Chunk] = []
        self._open: dict[torch.device, _Chunk] = {}
        self._filling: _Chunk  # where the last ``place`` went

    def place(self, nbytes: int, itemsize: int, device: torch.device) -> tuple[torch.Tensor, bool]:
        room = _round_up(nbytes)
        chunk = self._open.get(device)
        if room > self.chunk_bytes:
            chunk = self._new_chunk(room, device)
        elif chunk is None or chunk.used + room > chunk.limit:
            chunk = self._open[device] = self._new_chunk(self.chunk_bytes, device)
        start, chunk.used = chunk.used, chunk.used + room
        self._filling = chunk
        return chunk.data[start : start + nbytes], False

    def placed(self, payload: torch.Tensor, allocation: Allocation) -> None:
        chunk = self._filling
        start = payload.storage_offset() - chunk.data.storage_offset()
        rest = chunk.data[start + payload.numel() :]
        if chunk.payloads:
            # The free rest behind the last payload shrinks to the gap ahead of this one.
            gap = chunk.zones[-1].data
            chunk.zones[-1].data = gap[: gap.numel() - rest.numel() - payload.numel()]
            chunk.zones.append(Zone(rest, "after", allocation))
        else:
            chunk.zones += [Zone(chunk.data[:start], "before", allocation).arm(), Zone(rest, "after", allocation).arm()]
        chunk.payloads.append(payload)

    def zones(self) -> list[Zone]:
        return [zone for chunk in self._chunks for zone in chunk.zones if zone.data.numel()]

    def neighbour(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The bytes, (n,) uint8, of the allocation right behind the one that holds ``tensor``; None if there is none.

        ``neighbour(buffer).view(torch.int64)`` reads the victim's values; it shares the victim's memory. Raises
        ValueError if this arena did not make ``tensor``.
        """
        at = tensor.data_ptr()
        for chunk in self._chunks:
            for payload, behind in zip_longest(chunk.payloads, chunk.payloads[1:]):
                if payload.data_ptr() <= at < payload.data_ptr() + payload.numel():
                    return behind
        raise ValueError(f"no allocation of this arena holds address {at:#x}")

    def _new_chunk(self, room: int, device: torch.device) -> _Chunk:
        total = self.zone_bytes + room + self.zone_bytes
        whole = torch.empty(total + ALIGNMENT, dtype=torch.uint8, device=device)
        start = -whole.data_ptr() % ALIGNMENT
        chunk = _Chunk(whole[start : start + total], self.zone_bytes, self.zone_bytes + room)
        self._chunks.append(chunk)
        return chunk


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
