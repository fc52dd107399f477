"""Chunked prefill: what the draft model is fed after a chunk that ends inside of a prompt.

EAGLE's draft model reads each prompt one token ahead: ``tokens[1:]`` and then a tail. The tail is the token that the
target predicts, but where the chunk ends before its prompt does, the prompt itself says what comes next (#26329). One
request of a batch can be chunked; here it is the last one, as where SGLang's scheduler puts it.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.case import Case
from harness.errors import UsageError

FIX = "26329:prompt-tail"
OPTIONS = ("seq_lens", "chunk_end", "prefix_len")


def case(fix: str, *, seq_lens: Sequence[int] = (3, 6), chunk_end: int | None = None, prefix_len: int = 0) -> Case:
    """``seq_lens``: prompt lengths; of the last prompt, the tokens from ``prefix_len`` to ``chunk_end`` are prefilled.

    ``chunk_end`` is the middle of the last prompt without. Raises UsageError where there is no such chunk.
    """
    if fix != FIX:
        raise UsageError(f"{fix} is not about chunked prefill; this scenario shows {FIX}")
    if not seq_lens or min(seq_lens) < 1:
        raise UsageError(f"seq_lens {list(seq_lens)}: at least one prompt, of at least one token each")
    end = chunk_end if chunk_end is not None else max(1, seq_lens[-1] // 2)
    if not 0 <= prefix_len < end <= seq_lens[-1]:
        raise UsageError(f"a chunk from {prefix_len} to {end} of a prompt of {seq_lens[-1]} tokens: there is none")
    inside = end < seq_lens[-1]
    where = "inside of" if inside else "at the end of"
    return Case(
        id=f"chunk{prefix_len}to{end}-prompts{'+'.join(map(str, seq_lens))}",
        entry=f"{__name__}_{{target}}:run",
        params={"seq_lens": list(seq_lens), "chunk_end": end, "prefix_len": prefix_len},
        backend="eagle",
        tells=inside,
        why=f"the chunk ends {where} its prompt: token {end} of {seq_lens[-1]}",
        detector="none",
    )
