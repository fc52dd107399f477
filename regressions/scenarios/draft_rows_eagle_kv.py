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

from harness import memory
from regressions.scenarios import draft_memory
from regressions.scenarios.compare import same


def run(params: dict[str, Any], device: str) -> dict[str, Any]:
    draft_memory.expect(params)
    sizes = {name: params[name] for name in ("topk", "num_steps", "page_size", "max_bs", "max_context_len")}
    # FlashInfer's workspace is for what is left out here
    config, lens = DraftConfig(**sizes, device=device, workspace_bytes=1), params["seq_lens"]
    # only positions that the batch reaches need slots, as in the whole scenario
    table = dataclasses.replace(config, max_context_len=max([1, *lens]), device="cpu")
    slots = make_req_to_token(table, seed=7)
    rows = list(range(config.max_bs))[::-1][: len(lens)]
    batch = _moved(DraftBatch.of(lens, config.topk, req_pool_indices=rows), device)
    backend = BACKENDS[params["backend"]](config, slots.to(device, non_blocking=True))
    backend.plan = lambda *_: None  # type: ignore[method-assign]
    if params["path"] == "eager":
        backend.init_forward_metadata(batch)
    else:
        backend.init_cuda_graph_state(config.max_bs)
        backend.init_forward_metadata_replay(batch)
    assert backend.kv_indices is not None
    used = params["topk"] * (sum(lens) + len(lens) * config.num_steps)
    filled, indptr = _to_cpu(backend.kv_indices[:, :used], backend.kv_indptr)
    with memory.unwatched():
        for i, want in enumerate(reference.kv_indptr(lens, topk=config.topk, num_steps=config.num_steps)):
            same(f"kv_indptr[{i}]", indptr[i, : len(want)], want)
        shape = {"topk": config.topk, "num_steps": config.num_steps, "page_size": config.page_size}
        for i, want in enumerate(reference.kv_indices(rows, slots, lens, **shape)):
            same(f"kv_indices[{i}]", filled[i, : len(want)], want)
    return {"row": backend.kv_indices.shape[1], "rows": config.num_steps}


def _moved(batch: DraftBatch, device: str) -> DraftBatch:
    """Unlike `DraftBatch.of`, without waiting for the device."""
    moved: dict[str, Any] = {
        name: each.to(device, non_blocking=True) for name, each in vars(batch).items() if isinstance(each, torch.Tensor)
    }
    return dataclasses.replace(batch, **moved)


@memory.unwatched()
def _to_cpu(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """All of them as one copy: a GPU that several processes share is waited for once."""
    parts = [each.contiguous().view(-1).view(torch.uint8) for each in tensors]
    copied = torch.cat(parts).cpu().split([len(part) for part in parts])
    return [part.clone().view(each.dtype).view(each.shape) for part, each in zip(copied, tensors, strict=True)]
