"""Context reserve: a decode step reserves slots for its drafts, and writes them into the request's row of req_to_token.

What a step reserves beyond ``seq_len``, and the room behind the context that a row has, in tokens:

    reserve  2 * max(slots, num_draft_tokens); slots: num_steps * topk, or, with page_size > 1 and topk > 1,
             ceil((page_size - 1 + num_steps) / page_size) * page_size * topk, since every branch gets pages of its own
    narrow   4 + num_draft_tokens: what #26972 found
    wide     at least the reserve, with page_size > 1 and topk > 1

A request at the end of its context shows it. Rows are adjacent: only the last one's excess leaves the buffer, so the
first request has the last row. For the assert, the row is made narrow by the scenario, whatever SGLang would make it.

With page_size 1 SGLang's rows stay narrow, whatever a step reserves, and releases differ in how they round a reserve
that is no whole number of pages; a case that would hang on either is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.case import Case, Stray
from harness.errors import UsageError

HEADROOM, ASSERT = "26972:row-headroom", "26972:row-assert"
OPTIONS = ("topk", "num_steps", "num_draft_tokens", "page_size", "max_context_len", "num_seqs")


@dataclass(frozen=True)
class Shape:
    """One batch of requests that are all at the end of their context."""

    topk: int
    num_steps: int
    num_draft_tokens: int
    page_size: int
    max_context_len: int
    num_seqs: int

    @property
    def paged_branches(self) -> bool:
        return self.page_size > 1 and self.topk > 1

    @property
    def reserve(self) -> int:
        slots = self.num_steps * self.topk
        if self.paged_branches:
            slots = -(-(self.page_size - 1 + self.num_steps) // self.page_size) * self.page_size * self.topk
        return 2 * max(slots, self.num_draft_tokens)

    @property
    def narrow(self) -> int:
        return 4 + self.num_draft_tokens

    def __str__(self) -> str:
        steps = f"topk{self.topk}-steps{self.num_steps}-draft{self.num_draft_tokens}"
        return f"{steps}-page{self.page_size}-ctx{self.max_context_len}-bs{self.num_seqs}"


def case(fix: str, **options: int) -> Case:
    """The case of one shape; ``options`` as in OPTIONS. Raises UsageError for a shape of which nobody could say."""
    if fix not in (HEADROOM, ASSERT):
        raise UsageError(f"{fix} is not about the context reserve; this scenario shows {HEADROOM} and {ASSERT}")
    shape = _shape(options)
    over = max(0, shape.reserve - shape.narrow)
    narrow = fix == ASSERT
    common: dict[str, Any] = {
        "id": str(shape),
        "entry": f"{__name__}_{{target}}:run",
        "params": {**vars(shape), "reserve": shape.reserve, "extra": shape.narrow if narrow else None},
        "backend": "eagle",
    }
    fits = f"{shape.reserve} reserved tokens fit the {shape.narrow} that a narrow row has"
    if not over:
        return Case(**common, tells=False, why=fits)
    return Case(
        **common,
        on="guarded" if narrow else "clean",
        why=f"{shape.reserve} tokens are reserved, and a narrow row has {shape.narrow}",
        stray=Stray("after", over),
        zone_bytes=4 * over + 4096,
    )


def _shape(options: dict[str, int]) -> Shape:
    if unknown := set(options) - set(OPTIONS):
        raise UsageError(f"{sorted(unknown)[0]}: no option of this case, which takes {', '.join(OPTIONS)}")
    topk, steps = options.get("topk", 2), options.get("num_steps", 2)
    defaults = {"num_draft_tokens": topk * steps, "page_size": 2, "max_context_len": 16, "num_seqs": 1}
    shape = Shape(**{**defaults, **options, "topk": topk, "num_steps": steps})
    for name in OPTIONS:
        if (value := getattr(shape, name)) < 1:
            raise UsageError(f"{name} {value}: must be at least 1")
    if shape.max_context_len % shape.page_size or shape.reserve % shape.page_size:
        raise UsageError(
            f"max_context_len {shape.max_context_len} and the reserve of {shape.reserve} tokens must be whole pages of "
            f"{shape.page_size}: releases round what is left differently"
        )
    if not shape.paged_branches and shape.reserve > shape.narrow:
        raise UsageError(
            f"{shape.reserve} tokens are reserved and a row has {shape.narrow}: SGLang widens it for page_size > 1 and "
            "topk > 1 only, so this writes past its end with every fix in"
        )
    return shape
