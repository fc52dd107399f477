"""Issue 26340 from end to end: the overflow lands on the draft-token list, and the embedding gather reads it.

The allocations lie behind one another as in a CUDA graph's private pool (the victim detector's arena), so the stray
slot numbers of the kv_indices row become int64 token ids far outside of the vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from harness.case import Case
from harness.leg import WrongValues

SIZE, GUARD = "27338:topk-factor", "27338:capacity-assert"
# an index out of range: torch raises on a CPU, and on a GPU the gather kernel asserts, which ends the context
SEEN = {
    "cpu": ("error", "IndexError: index out of range"),
    "cuda": ("crashed", "vectorized gather kernel index out of bounds|srcIndex < srcSelectDimSize"),
}


def case(
    device: str,
    *,
    topk: int,
    num_steps: int,
    max_bs: int,
    max_context_len: int,
    seq_lens: Sequence[int],
    page_size: int = 1,
) -> Case:
    """The case of one shape, for the fix 27338:topk-factor."""
    used = topk * (sum(seq_lens) + len(seq_lens) * num_steps)
    over = used - max_bs * max_context_len
    outcome, reason = SEEN[device]
    both = frozenset({SIZE, GUARD})
    return Case(
        id=f"draft_loop-topk{topk}-steps{num_steps}-page{page_size}-bs{max_bs}-ctx{max_context_len}-lens{_runs(seq_lens)}",
        entry=f"{__name__}:run",
        params={
            "topk": topk, "num_steps": num_steps, "max_bs": max_bs, "max_context_len": max_context_len,
            "seq_lens": list(seq_lens), "page_size": page_size,
        },
        backend="flashinfer",
        regression="26340",
        tells=over > 0,
        why=f"{used} elements are needed, and a row without the topk factor has {max_bs * max_context_len}"
        if over > 0
        else f"{used} of {max_bs * max_context_len} elements fit without the topk factor, too",
        expect={both: outcome if over > 0 else "clean"},
        reason={both: reason} if over > 0 else {},
        detector="victim",
        cannot={"sglang": "the draft loop is this project's own"},
        cuda_packages=("flashinfer",),
    )  # fmt: skip


def _runs(seq_lens: Sequence[int]) -> str:
    """All lengths in order, equal neighbours as one: 7x1500+3."""
    runs = [(length, len(list(same))) for length, same in itertools.groupby(seq_lens)]
    return "+".join(f"{count}x{length}" if count > 1 else str(length) for length, count in runs) or "none"


def run(params: dict[str, Any], device: str) -> dict[str, Any]:
    import torch
    from eagle_kv.backends import BACKENDS
    from eagle_kv.batch import DraftBatch, DraftConfig, make_req_to_token
    from eagle_kv.draft_loop import DraftGraphRunner
    from eagle_kv.draft_model import DraftModel, check_drafted, make_kv_buffers, prefill

    config = DraftConfig(
        topk=params["topk"], num_steps=params["num_steps"], page_size=params["page_size"], max_bs=params["max_bs"],
        max_context_len=params["max_context_len"], device=device,
        dtype=torch.float16 if device == "cuda" else torch.float32,
    )  # fmt: skip
    model, kv = DraftModel(config), make_kv_buffers(config)
    backend = BACKENDS["flashinfer"](config, make_req_to_token(config, seed=5))
    runner = DraftGraphRunner(model, backend, kv, config.max_bs, capture_bs=[len(params["seq_lens"])])

    generator = torch.Generator().manual_seed(9)
    prompts = [
        torch.randint(model.vocab_size, (length,), generator=generator).to(device) for length in params["seq_lens"]
    ]
    rows = list(range(config.max_bs))[::-1][: len(prompts)]
    prefill(model, kv, backend.req_to_token, rows, prompts)
    batch = DraftBatch.of(params["seq_lens"], config.topk, req_pool_indices=rows, device=device)
    first = torch.randint(model.vocab_size, (len(prompts) * config.topk,), generator=generator).to(device)
    drafted = runner.replay(batch, first)
    try:
        check_drafted(model, prompts, first, drafted)
    except AssertionError as error:
        raise WrongValues(str(error)) from error
    return {"drafted": drafted.numel()}
