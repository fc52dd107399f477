"""Payloads of gigabytes of which a case touches kilobytes: address space, and hardly any memory.

A scenario knows what its case may touch. It says so in the leg, before the code under test allocates:

    touches(nbytes, spans)   A payload of so many bytes holds zeros, and is accessed in these (start, stop) bytes only.
                             No other page of it is mapped, so that an access there faults like one outside.
    folds(nbytes)            One that is written all over, and of which no value is asked afterwards. All of its pages
                             are the same few, so that what is read from it is whatever was written last.

The guard page does so; under another detector a payload is allocated in full. Boundary:

- a payload below ``LEAST`` bytes is mapped in full: it may not be the only one of its size;
- one that is filled with anything but zeros as it is made, or read as a whole, is no case for this: it faults;
- a CPU folds nothing: there, memory is what was written.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.overrides import _get_current_function_mode_stack

from .guard_page import GuardPage, Span

LEAST = 1 << 26


def touches(nbytes: int, spans: Iterable[Span]) -> None:
    """Spans are in bytes from the payload's start; parts outside of it are left out."""
    kept = [(max(0, start), min(stop, nbytes)) for start, stop in spans]
    _tell(nbytes, tuple(span for span in kept if span[0] < span[1]))


def folds(nbytes: int) -> None:
    _tell(nbytes, None)


def _tell(nbytes: int, spans: tuple[Span, ...] | None) -> None:
    for mode in _get_current_function_mode_stack():
        if isinstance(mode, GuardPage) and nbytes >= LEAST:
            mode.sparse[nbytes] = spans
