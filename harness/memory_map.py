"""A memory map: where the buffer of a case lies, how far it is used, and what was written outside, in numbers.

Read off a record of the matrix, and of nothing else:

    buffer    shape and dtype of each buffer that was written past (``overflow.hits`` of the last leg that has one);
              else what the leg with every fix in reported of its own (``facts``)
    stray     side, elements and offsets of the same hit
    zones     ``zone_bytes``, rounded up to 512 as a detector does, where the detector is a red zone
    needed    of ``params``: row i of draft kv_indices takes topk * (sum(seq_lens) + num_seqs * (i + 1)) elements, so
              that what exceeds a row lands in the next one, and what exceeds the last row leaves the buffer
    written   of ``params``: the rows that ``slots`` name

Elements are of the buffer's dtype. Offsets are bytes, from the buffer's end for what lies after it, from its start for
what lies before. A buffer is taken to be contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ITEMSIZE = {
    **dict.fromkeys(("int64", "float64", "uint64"), 8), **dict.fromkeys(("int32", "float32", "uint32"), 4),
    **dict.fromkeys(("int16", "float16", "bfloat16", "uint16"), 2), **dict.fromkeys(("int8", "uint8", "bool"), 1),
}  # fmt: skip
_ZONE_STEP = 512


@dataclass(frozen=True)
class Stray:
    side: str  # "before" or "after"
    elements: int
    first: int  # bytes, where the lowest stray element starts
    last: int  # bytes, where the highest one starts


@dataclass(frozen=True)
class MemoryMap:
    """One buffer. ``zone``: bytes watched on each side, 0 where none are."""

    label: str
    out: tuple[str, ...]  # the fixes that are out in the leg that is shown
    rows: int
    width: int  # elements of a row
    dtype: str
    width_in: int | None = None  # elements of a row with every fix in, where that is another number
    needed: tuple[int, ...] = ()  # elements, a row
    written: tuple[int, ...] = ()  # rows
    zone: int = 0
    stray: Stray | None = None

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.rows * self.width * self.itemsize

    def stray_span(self) -> tuple[int, int]:
        """Bytes from the buffer's start, from the first stray byte to behind the last."""
        assert self.stray is not None
        origin = self.nbytes if self.stray.side == "after" else 0
        return origin + self.stray.first, origin + self.stray.last + self.itemsize

    def lines(self) -> list[str]:
        """The picture in words and exact numbers."""
        said = [
            f"{_n(self.rows)} {'row' if self.rows == 1 else 'rows'} of {_n(self.width)} {self.dtype} elements: "
            f"{_n(self.rows * self.width)} elements, {_n(self.nbytes)} bytes"
        ]
        if self.width_in is not None:
            size = f"{_n(self.width_in)} elements, {_n(self.width_in * self.itemsize)} bytes"
            said.append(f"a row with every fix in: {size}")
        if self.needed:
            last = self.needed[-1]
            rest = f"{_n(last - self.width)} too many" if last > self.width else f"{_n(self.width - last)} to spare"
            said.append(f"the last row needs {_n(last)} elements: {rest}")
        if self.written:
            named = ", ".join(map(str, self.written[:12])) + (", …" if len(self.written) > 12 else "")
            said.append(f"rows written in bounds: {named}")
        if self.stray:
            said.append(_stray_line(self.stray, self.itemsize))
        if self.zone:
            said.append(f"watched: {_n(self.zone)} bytes before and after the buffer")
        return said


def maps(record: Mapping[str, Any]) -> list[MemoryMap]:
    """The buffers of a case, those that were written past first; none where the record has no numbers of any."""
    if "params" not in record or not record["legs"]:
        return []
    hit_legs = [leg for leg in record["legs"] if leg.get("overflow", {}).get("hits")]
    if not hit_legs:
        return _from_facts(record)
    leg = hit_legs[-1]
    over, found = leg["overflow"], []
    for hit, label in zip(over["hits"], over["buffers"], strict=True):
        if hit["dtype"] not in ITEMSIZE:
            continue
        rows, width = hit["shape"][0], math.prod(hit["shape"][1:])
        if len(hit["shape"]) == 1:
            rows, width = 1, hit["shape"][0]
        found.append(
            MemoryMap(
                label=label.partition(" at ")[2] or label,
                out=tuple(leg["reverted"]),
                rows=rows,
                width=width,
                dtype=hit["dtype"],
                width_in=wide if (wide := _facts(record).get("row")) != width else None,
                needed=_needed(record["params"], rows) if over["detector"] == "red-zone" else (),
                written=_written(record["params"], rows),
                zone=_zone(record),
                stray=Stray(hit["side"], hit["elements"], hit["first_offset_bytes"], hit["last_offset_bytes"]),
            )
        )
    return found


def _from_facts(record: Mapping[str, Any]) -> list[MemoryMap]:
    facts, params = _facts(record), record["params"]
    common: dict[str, Any] = {"label": "with every fix in", "out": (), "zone": _zone(record)}
    if "row" in facts and (needed := _needed(params, facts["rows"])):
        dtype = "int64" if record["backend"] == "triton" else "int32"  # as SGLang's and this project's backends have it
        return [MemoryMap(rows=facts["rows"], width=facts["row"], dtype=dtype, needed=needed, **common)]
    if "size_limit" in facts and params.get("row_bytes", 0) % 4 == 0 and "slots" in params:
        rows = facts["size_limit"]
        written = _written(params, rows)
        return [MemoryMap(rows=rows, width=params["row_bytes"] // 4, dtype="int32", written=written, **common)]
    return []


def _facts(record: Mapping[str, Any]) -> Mapping[str, Any]:
    facts: Mapping[str, Any] = record["legs"][0].get("facts", {})
    return facts


def _needed(params: Mapping[str, Any], rows: int) -> tuple[int, ...]:
    if not {"topk", "seq_lens", "num_steps"} <= set(params) or params["num_steps"] != rows:
        return ()
    lens: Sequence[int] = params["seq_lens"]
    return tuple(params["topk"] * (sum(lens) + len(lens) * (row + 1)) for row in range(rows))


def _written(params: Mapping[str, Any], rows: int) -> tuple[int, ...]:
    return tuple(sorted({slot for slot in params.get("slots", ()) if 0 <= slot < rows}))


def _zone(record: Mapping[str, Any]) -> int:
    asked = record["zone_bytes"] if record["detector"] == "red-zone" else 0
    return int(-(-asked // _ZONE_STEP) * _ZONE_STEP)


def _stray_line(stray: Stray, itemsize: int) -> str:
    where = "after its end" if stray.side == "after" else "before its start"
    first, last = (f"{at // itemsize:+,} ({at:+,} bytes)" for at in (stray.first, stray.last))
    what = "element" if stray.elements == 1 else "elements"
    holes = (stray.last - stray.first) // itemsize + 1 - stray.elements
    gaps = f", {_n(holes)} of them untouched" if holes else ""
    return f"{_n(stray.elements)} stray {what} {where}, counted from there: element {first} to {last}{gaps}"


def _n(number: int) -> str:
    return f"{number:,}"
