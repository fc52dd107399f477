"""What arithmetic says of a case before it runs: what each must see, and what keeps one from what another sees.

A `Touch` is a kernel's read or write of a few bytes at a random place around one of two buffers.
"""

from __future__ import annotations

import dataclasses
import mmap
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

from harness.memory.watch import Zone

BOUNDARIES = {  # why one does not see what another does
    "a read": "The red zone compares what was written; a read leaves no trace in it.",
    "same value": "A write of the value that stands there changes nothing that could be compared.",
    "undone": "A write that is undone before the check leaves nothing to compare.",
    "beyond the zone": "A write past the zone meets memory that the red zone does not watch.",
    "next allocation": "A write past the zone may land in another payload, and the red zone compares no payload.",
    "inside the payload": "An access inside its own payload meets neither a zone nor a guard.",
    "first page": "Ahead of a payload the rest of its first page is mapped, and the guard page sees nothing there.",
    "not compared": "The reference compares results, and no memory outside of them.",
    "read for nothing": "A stray read whose value is used nowhere, or is the right one, leaves the result right.",
}
NAMES = ("red-zone", "guard-page", "reference")
FAR = {"cpu": 1 << 33, "cuda": 1 << 24}  # bytes on either side of the buffers that are the case's own, at least
PITCH = 1 << 16  # from one buffer of a case to the next, under the red zone
PAGE = {"cpu": mmap.PAGESIZE, "cuda": 1 << 21}  # what a guard page maps at least
UNITS = (1, 2, 4, 8)
MAKES = ("zeros", "empty", "full", "tensor", "scalar", "strided")  # how buffers are made
STALE_VALUES = (0, 1, 255, *(byte for pair in Zone.PATTERNS.values() for byte in pair))  # that a zone may hold, too
Said = dict[str, Any]  # what each of NAMES saw, None for nothing; and how the case was "refused", None where it ran


@dataclass(frozen=True)
class Foretold:
    """What the model says of a case."""

    said: Said
    why: dict[tuple[str, str], set[str]] = field(default_factory=dict)  # (who sees, who doesn't) -> boundaries
    unseen: str = ""  # where none sees an access that is stray: what keeps each of them from it

    @property
    def faults(self) -> bool:
        return self.said["guard-page"] is not None


def disagreeing(seen: dict[str, Any]) -> list[tuple[str, str]]:
    """(who sees something, who sees nothing)."""
    return [(one, other) for one, other in permutations(NAMES, 2) if seen[one] and not seen[other]]


@dataclass(frozen=True)
class Touch:
    """Bytes ``at`` to ``at + count * unit`` from the first buffer's start are read, or written in units."""

    make: str  # of MAKES, for both buffers; "nothing": the bytes would be those of a tensor without elements
    itemsize: int
    elements: int
    zone: int
    how: str  # "torch" or "triton"
    act: str  # "put" a byte, "flip", "same", "undone"; "read", or "read unused"
    at: int
    unit: int
    count: int
    put: int = 0  # the byte that each written one becomes
    wanted: int = 0  # where in the first buffer a read should have been

    @property
    def nbytes(self) -> int:
        """Of one buffer, from its first element to its last."""
        return self.itemsize * (3 * self.elements - 2 if self.make == "strided" else self.elements)

    def own(self, offset: int) -> bool:
        """Whether a payload's byte belongs to an element."""
        return self.make != "strided" or offset // self.itemsize % 3 == 0

    def where(self, offset: int) -> tuple[int, str, int]:
        """Of a byte, under the red zone: the buffer it is nearest to, what it is there, and how far from its start."""
        buffer = int(offset >= PITCH // 2)
        offset -= buffer * PITCH
        if 0 <= offset < self.nbytes:
            return buffer, "payload", offset
        side = "before" if offset < 0 else "after"
        near = -self.zone <= offset < self.nbytes + self.zone
        return buffer, side if near else "nobody's", offset

    def held(self, offset: int) -> int:
        """The byte that stands there, under the red zone: all around is zero, buffers are as `first` fills them."""
        buffer, what, offset = self.where(offset)
        return Zone.PATTERNS[what][offset % 2] if what in Zone.PATTERNS else what == "payload" and first(buffer, offset)

    def becomes(self, offset: int) -> int:
        return {"put": self.put, "flip": 255 - self.held(offset)}.get(self.act, self.held(offset))


def first(buffer: int, offset: int) -> int:
    """What a byte of a buffer is before it is touched."""
    return (37 * offset + 101 * buffer + 11) % 256


def foretell(touch: Touch, device: str) -> Foretold:
    slack = -touch.nbytes % PAGE[device]
    bytes_ = [] if touch.make == "nothing" else range(touch.at, touch.at + touch.count * touch.unit)
    blind: dict[str, dict[int, str]] = {name: {} for name in NAMES}  # for each byte that it doesn't see: why
    cells: dict[tuple[int, str], set[int]] = {}  # of a zone: where those elements start that changed
    wrong: dict[str, int] = {}
    for at in bytes_:
        buffer, what, offset = touch.where(at)
        changed = touch.becomes(at) != touch.held(at)
        unchanged = touch.act if touch.act == "undone" else "same value"
        if touch.act.startswith("read"):
            blind["red-zone"][at] = "a read"
            if touch.act == "read" and touch.held(at) != first(0, touch.wanted + at - touch.at):
                wrong.setdefault("out", at - touch.at)
            else:
                blind["reference"][at] = "read for nothing"
        elif what == "payload":
            blind["red-zone"][at] = "next allocation" if buffer else "inside the payload"
            if changed and touch.own(offset):
                wrong.setdefault("ab"[buffer], offset)
            else:
                blind["reference"][at] = unchanged if touch.own(offset) else "not compared"
        else:
            blind["reference"][at] = "not compared"
            if what == "nobody's":
                blind["red-zone"][at] = "beyond the zone"
            elif not changed:
                blind["red-zone"][at] = unchanged
            else:
                origin = 0 if what == "before" else touch.nbytes
                cell = (offset - origin) // touch.itemsize * touch.itemsize
                cells.setdefault((buffer, what), set()).add(cell)
        if -slack <= at < touch.nbytes:
            blind["guard-page"][at] = "inside the payload" if at >= 0 else "first page"
    seen = {name: [at for at in bytes_ if at not in blind[name]] for name in NAMES}
    why = {(one, other): {blind[other][at] for at in seen[one]} for one, other in disagreeing(seen)}
    hits = [[buffer, side, len(at), min(at), max(at)] for (buffer, side), at in cells.items()]
    answers = (sorted(hits, key=lambda hit: (hit[0], hit[1] == "after")), seen["guard-page"] and "fault", wrong)
    stray = bytes_ if not touch.act.startswith("read") or touch.at != touch.wanted else []
    reasons = "; ".join(" and ".join(sorted(set(blind[name].values()))) for name in NAMES)
    said = {name: answer or None for name, answer in zip(NAMES, answers, strict=True)}
    return Foretold(said | {"refused": None}, why, reasons if stray and not any(seen.values()) else "")


def touches(seed: int, device: str) -> Iterator[tuple[Touch, Foretold]]:
    for number in range(sys.maxsize):
        draw = random.Random(f"{seed} {number}")
        while True:
            touch = _drawn(draw, device)
            foretold = foretell(touch, device)
            if all(len(names) == 1 for names in foretold.why.values()):
                break
        yield touch, foretold


def _drawn(draw: random.Random, device: str) -> Touch:
    item = draw.choice((1, 2, 4, 8))
    unit = draw.choice([size for size in UNITS if size <= item])
    make = draw.choice((*MAKES, *MAKES, "nothing"))
    elements = 1 if make == "scalar" else draw.choice((1, 2, 3, 5, 8, 100, 4096 // item, 4097 // item + 1))
    zone = draw.choice((512, 1024, 4096))
    how = "triton" if device == "cuda" else draw.choice(("torch", "triton"))
    act = draw.choice(("put", "put", "flip", "flip", "same", "undone", "read", "read unused"))
    blank = Touch(make, item, elements, zone, how, act, 0, unit, 1, draw.choice(STALE_VALUES))
    end = blank.nbytes
    count = draw.randint(1, max(1, min(8, end // unit)))
    far = draw.choice((-1, 1)) << draw.randint(17, FAR[device].bit_length() - 2)
    # a place, and how many units around it
    place, around = draw.choice(
        [(0, 4), (end, 1), (end, 8), (end // 2, end // unit // 2), (end // 2, end // unit // 2), (-zone, 12), (far, 64)]
        + [(end + zone, 12), (-PAGE["cpu"], 2000), (-(-end % PAGE["cpu"]), 4), (PITCH, 12), (PITCH + end, 12)]
        + [(PITCH + end // 2, end // unit // 2), (-end, 64), (2 * zone, 1000), (-64, 40)]
    )
    at = (place // unit + draw.randint(-around, around)) * unit
    wanted = draw.randint(0, max(0, end // unit - count)) * unit
    return dataclasses.replace(blank, at=at, count=count, wanted=wanted)
