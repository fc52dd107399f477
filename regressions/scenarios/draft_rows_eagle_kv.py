"""The draft scenario without its attention, for sweeps: size, fill, and compare every row. Imported in a leg's process.

What a fix of this scenario is about has happened by then; planning and attending would take most of a leg's time. The
same case with both is what ``unfix repro`` runs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from eagle_kv import reference
from eagle_kv.backends import BACKENDS
from eagle_kv.batch import DraftBatch, DraftConfig, make_req_to_token

from regressions.scenarios import draft_memory
from regressions.scenarios.compare import same


def run(params: dict[str, Any], device: str) -> dict[str, Any]:
    draft_memory.expect(params)
    sizes = {name: params[name] for name in ("topk", "num_steps", "page_size", "max_bs", "max_context_len")}
    config, lens = DraftConfig(**sizes, device=device), params["seq_lens"]
    # only positions that the batch reaches need slots, as in the whole scenario
    table = dataclasses.replace(config, max_context_len=max([1, *lens]), device="cpu")
    slots = make_req_to_token(table, seed=7)
    rows = list(range(config.max_bs))[::-1][: len(lens)]
    batch = DraftBatch.of(lens, config.topk, req_pool_indices=rows, device=device)
    backend = BACKENDS[params["backend"]](config, slots.to(device))
    backend.plan = lambda *_: None  # type: ignore[method-assign]
    if params["path"] == "eager":
        backend.init_forward_metadata(batch)
    else:
        backend.init_cuda_graph_state(config.max_bs)
        backend.init_forward_metadata_replay(batch)
    assert backend.kv_indices is not None
    # each to the CPU once: a GPU that several processes share is waited for each time
    used = params["topk"] * (sum(lens) + len(lens) * config.num_steps)
    filled, indptr = backend.kv_indices[:, :used].cpu(), backend.kv_indptr.cpu()
    with torch._C.DisableTorchFunction():  # a detector need not watch what the reference allocates
        for i, want in enumerate(reference.kv_indptr(lens, topk=config.topk, num_steps=config.num_steps)):
            same(f"kv_indptr[{i}]", indptr[i, : len(want)], want)
        shape = {"topk": config.topk, "num_steps": config.num_steps, "page_size": config.page_size}
        for i, want in enumerate(reference.kv_indices(rows, slots, lens, **shape)):
            same(f"kv_indices[{i}]", filled[i, : len(want)], want)
    return {"row": backend.kv_indices.shape[1], "rows": config.num_steps}
