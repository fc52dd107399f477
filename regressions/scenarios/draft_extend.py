"""Draft extend under CUDA graphs: after a verify, the draft model takes every token of each request's tree.

A request has ``num_draft_tokens`` queries, whatever was accepted: the graph's token layout is fixed. So

    qo_indptr[b]    b * num_draft_tokens
    max_extend_len  num_draft_tokens

which #27545 found as ``num_steps + 1``. The two are equal for a chain (topk 1), whose tree is its steps and the root.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.case import Case
from harness.errors import UsageError

OPTIONS = ("topk", "num_steps", "num_draft_tokens", "page_size", "seq_lens")


def case(
    fix: str,
    *,
    topk: int = 4,
    num_steps: int = 3,
    num_draft_tokens: int = 8,
    page_size: int = 1,
    seq_lens: Sequence[int] = (5, 9),
) -> Case:
    """The case of one batch; ``seq_lens`` are prefixes, in tokens. Raises UsageError for what no server configures."""
    sizes = {"topk": topk, "num_steps": num_steps, "num_draft_tokens": num_draft_tokens, "page_size": page_size}
    for name, value in sizes.items():
        if value < 1:
            raise UsageError(f"{name} {value}: must be at least 1")
    if num_steps < 2:
        raise UsageError(f"num_steps {num_steps}: must be at least 2, SGLang's draft backends read their first child")
    if topk == 1 and num_draft_tokens != num_steps + 1:
        raise UsageError(f"num_draft_tokens {num_draft_tokens}: a chain (topk 1) has num_steps + 1 = {num_steps + 1}")
    if not seq_lens or min(seq_lens) < 1:
        raise UsageError(f"seq_lens {list(seq_lens)}: one prefix of at least 1 a request, and at least one request")
    tells = num_draft_tokens != num_steps + 1
    out = frozenset({fix})
    return Case(
        id=f"topk{topk}-steps{num_steps}-draft{num_draft_tokens}-page{page_size}-lens{'+'.join(map(str, seq_lens))}",
        entry=f"{__name__}_{{target}}:run",
        params={**sizes, "seq_lens": list(seq_lens)},
        backend="triton",
        tells=tells,
        why=f"{num_draft_tokens} draft tokens a request are {'not ' if tells else ''}num_steps + 1",
        reason={out: rf"qo_indptr\[1\]: {num_steps + 1}, reference {num_draft_tokens}; {len(seq_lens)} of"}
        if tells
        else {},
    )
