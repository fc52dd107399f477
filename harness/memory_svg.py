"""A memory map as a drawing: an SVG to scale, whose widths are percentages, so that it fits any screen.

Up to three bands, each with a scale of its own and none stretched:

    rows      one bar a row: what it has, what it is used for, what it needs beyond, and its width with every fix in
    buffer    all of the buffer between its zones, and the stray bytes
    close-up  the stray bytes and the edge that they crossed, where they are too small to see in the whole

Colours are classes of the page's style sheet: have, used, over, ghost, zone, stray, edge.
"""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from harness.memory_map import MemoryMap

ROWS_SHOWN = 6
CELLS_SHOWN = 128  # row borders in the whole buffer: more would be one grey area
CLOSE_UP = 0.05  # of the whole buffer: stray bytes below that get a band of their own
_TEXT, _BAR, _GAP = 16, 16, 8  # pixels


class _Canvas:
    def __init__(self) -> None:
        self.parts: list[Markup] = []
        self.y = 0
        self.low, self.high = 0.0, 1.0

    def scale(self, low: float, high: float) -> None:
        self.low, self.high = low, max(high, low + 1)

    def at(self, value: float) -> str:
        share = (value - self.low) / (self.high - self.low)
        return f"{min(max(share, 0.0), 1.0) * 100:.4f}%"

    def text(self, words: str) -> None:
        self.parts.append(Markup('<text x="0" y="{}">{}</text>').format(self.y + 12, words))
        self.y += _TEXT

    def bar(self, kind: str, start: float, stop: float, *, inset: int = 0) -> None:
        start, stop = max(start, self.low), min(stop, self.high)
        if stop <= start:
            return
        share = f"{(stop - start) / (self.high - self.low) * 100:.4f}%"
        self.parts.append(
            Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}"/>').format(
                kind, self.at(start), self.y + inset, share, _BAR - 2 * inset
            )
        )

    def line(self, value: float, *, over: int = 3) -> None:
        x = self.at(value)
        self.parts.append(
            Markup('<line class="edge" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(
                x, x, self.y - over, self.y + _BAR + over
            )
        )

    def next(self) -> None:
        self.y += _BAR + _GAP


def draw(memory: MemoryMap) -> Markup:
    """The SVG element. It says nothing that ``memory.lines()`` does not, so it is hidden from screen readers."""
    canvas = _Canvas()
    if memory.needed:
        _rows(canvas, memory)
    _buffer(canvas, memory)
    if memory.stray:
        start, stop = memory.stray_span()
        if (stop - start) / (memory.nbytes + 2 * memory.zone) < CLOSE_UP:
            _close_up(canvas, memory)
    body = Markup("").join(canvas.parts)
    return Markup('<svg class="memory" aria-hidden="true" focusable="false" width="100%" height="{}">{}</svg>').format(
        canvas.y, body
    )


def _rows(canvas: _Canvas, memory: MemoryMap) -> None:
    widest = max(memory.width, memory.width_in or 0, *memory.needed)
    canvas.scale(0, widest)
    for row in _shown(memory.rows):
        if row is None:
            canvas.text(f"… {memory.rows - ROWS_SHOWN:,} more")
            continue
        needed = memory.needed[row]
        beyond = "past the end" if row == memory.rows - 1 else "too many"
        more = f", {needed - memory.width:,} {beyond}" if needed > memory.width else ""
        canvas.text(f"row {row}: {needed:,} of {memory.width:,}{more}")
        if memory.width_in is not None:
            canvas.bar("ghost", 0, memory.width_in)
        canvas.bar("have", 0, memory.width)
        canvas.bar("used", 0, min(needed, memory.width), inset=3)
        canvas.bar("over", memory.width, needed, inset=3)
        canvas.line(memory.width)
        canvas.next()


def _shown(rows: int) -> Iterator[int | None]:
    """Row numbers to draw; None where rows are left out."""
    if rows <= ROWS_SHOWN:
        yield from range(rows)
        return
    yield from range(ROWS_SHOWN - 1)
    yield None
    yield rows - 1


def _buffer(canvas: _Canvas, memory: MemoryMap) -> None:
    low, high = -memory.zone, memory.nbytes + memory.zone
    if memory.stray:  # a hit is inside of what is watched, but a zone may be unknown
        start, stop = memory.stray_span()
        low, high = min(low, start), max(high, stop)
    zones = f", zones {memory.zone:,} B" if memory.zone else ""
    canvas.text(f"buffer {memory.nbytes:,} B{zones}")
    canvas.scale(low, high)
    _band(canvas, memory)


def _close_up(canvas: _Canvas, memory: MemoryMap) -> None:
    start, stop = memory.stray_span()
    edge = memory.nbytes if memory.stray and memory.stray.side == "after" else 0
    margin = max((max(stop, edge) - min(start, edge)) // 3, 4 * memory.itemsize)
    canvas.text(f"close up: edge {start - edge:+,} to {stop - edge:+,} B")
    canvas.scale(min(start, edge) - margin, max(stop, edge) + margin)
    _band(canvas, memory)


def _band(canvas: _Canvas, memory: MemoryMap) -> None:
    row = memory.width * memory.itemsize
    if memory.zone:
        canvas.bar("zone", -memory.zone, 0)
        canvas.bar("zone", memory.nbytes, memory.nbytes + memory.zone)
    canvas.bar("have", 0, memory.nbytes)
    for at, needed in enumerate(memory.needed[: CELLS_SHOWN + 1]):
        canvas.bar("used", at * row, min(at * row + needed * memory.itemsize, memory.nbytes), inset=3)
    for at in memory.written[: CELLS_SHOWN + 1]:
        canvas.bar("used", at * row, (at + 1) * row, inset=3)
    if memory.rows <= CELLS_SHOWN:
        for at in range(1, memory.rows):
            if canvas.low < at * row < canvas.high:
                canvas.line(at * row, over=-3)
    if memory.stray:
        canvas.bar("stray", *memory.stray_span(), inset=1)
    for edge in (0, memory.nbytes):
        if canvas.low <= edge <= canvas.high:
            canvas.line(edge)
    canvas.next()
