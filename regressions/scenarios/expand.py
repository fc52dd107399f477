"""Draft decode in FlashAttention-3, topk above 1: the page table of what each branch has drafted so far.

A branch's slots of one round, num_steps of them, start behind the last, partly filled page of its prefix. Step number
``step`` attends to the first ``decode_length = step + 1``, through a row of ``decode_length + 1`` page columns:

    last     seq_len % page_size
    needed   ceil((last + decode_length) / page_size)   never more than the columns
    unsliced ceil((last + num_steps) / page_size)       what #27360 found: pages of all steps scattered into that row
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.case import Case
from harness.errors import UsageError

OPTIONS = ("topk", "num_steps", "page_size", "seq_lens")
SLICE, GUARD = "27360:decode-slice", "27360:page-table-assert"


def case(
    fix: str, *, topk: int = 2, num_steps: int = 4, page_size: int = 2, step: int = 0, seq_lens: Sequence[int] = (3,)
) -> Case:
    """The case of one batch at one step. Raises UsageError for a batch or a step that no server has."""
    for name, value, least in (("topk", topk, 2), ("num_steps", num_steps, 2), ("page_size", page_size, 1)):
        if value < least:
            raise UsageError(f"{name} {value}: must be at least {least}")
    if not 0 <= step < num_steps - 1:
        raise UsageError(f"step {step}: must be 0 to {num_steps - 2}, the last step of a round attends to nothing")
    if not seq_lens or min(seq_lens) < 1:
        raise UsageError(f"seq_lens {list(seq_lens)}: one length of at least 1 a request, and at least one request")
    columns = step + 2
    pages = max(pages_of(length, num_steps, page_size) for length in seq_lens)
    stopped = page_size > 1 and num_steps > columns
    if page_size == 1:
        why = "pages of one slot are copied, not scattered: no row can overflow"
    elif not stopped:
        why = f"{num_steps} slots fit a row of {columns} columns, sliced or not"
    else:
        why = f"{num_steps} slots, {pages} pages at most, meet a row of {columns} columns"
    fits = stopped and pages <= columns
    return Case(
        id=f"topk{topk}-steps{num_steps}-page{page_size}-step{step}-lens{'+'.join(map(str, seq_lens))}",
        entry=f"{__name__}_{{target}}:run",
        params={"topk": topk, "num_steps": num_steps, "page_size": page_size, "step": step, "seq_lens": list(seq_lens)},
        backend="fa3",
        tells=stopped and not (fits and fix == GUARD),
        why=why,
        # the scatter stays inside, and what it writes too many of, no step reads
        expect={frozenset({SLICE, GUARD}): "clean"} if fits and fix == SLICE else {},
    )


def pages_of(seq_len: int, slots: int, page_size: int) -> int:
    """Pages that the partly filled page of a prefix and ``slots`` more slots touch."""
    return -(-(seq_len % page_size + slots) // page_size)
