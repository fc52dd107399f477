"""The leg's side of the context reserve on SGLang: a row's width, and one decode step's allocation into it.

Real, unmodified: ``get_req_to_token_extra_context_len``, ``ReqToTokenPool``, the paged allocator (for page_size 1 the
token allocator), and the step's ``prepare_for_decode`` with its kernels, which a CPU interprets. Stand-ins: the batch,
its requests and the prefix cache, namespaces of what that function reads; there is nothing to evict.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch

from harness.leg import WrongValues
from regressions.scenarios import sglang_world as world
from regressions.scenarios.compare import same

SIZING = ("sglang.srt.mem_cache.allocation_sizing", "sglang.srt.mem_cache.common")  # newest place first
PREPARE = "sglang.srt.speculative.eagle_utils"
PRELOAD = ("sglang.srt.mem_cache.memory_pool", "sglang.srt.mem_cache.allocator", PREPARE)


def run(params: dict[str, Any], device: str) -> dict[str, Any]:
    context, page_size, num_seqs = params["max_context_len"], params["page_size"], params["num_seqs"]
    with world.on(device):
        server_args = world.publish(
            {
                "device": device, "page_size": page_size, "speculative_algorithm": "EAGLE",
                "speculative_eagle_topk": params["topk"], "speculative_num_steps": params["num_steps"],
                "speculative_num_draft_tokens": params["num_draft_tokens"],
            }
        )  # fmt: skip
        extra = params["extra"] if params["extra"] is not None else _extra(server_args)
        pool = importlib.import_module("sglang.srt.mem_cache.memory_pool").ReqToTokenPool(
            size=num_seqs, max_context_len=context + extra, device=device, enable_memory_saver=False
        )
        slots = _allocator((context + params["reserve"] + page_size) * num_seqs, page_size, device)
        last = pool.req_to_token.shape[0] - 1
        rows = torch.arange(last, last - num_seqs, -1, device=device)
        for row in rows.tolist():
            pool.req_to_token[row, :context] = slots.alloc(context).to(torch.int32)
        prefixes = pool.req_to_token[:, :context].clone()
        _prepare(_batch(pool, slots, rows, context, device))
        for row in rows.tolist():
            same(f"prefix of row {row}", pool.req_to_token[row, :context], prefixes[row].to("cpu", torch.int64))
    _check(pool.req_to_token.cpu(), rows.tolist(), context + params["reserve"], page_size)
    return {"width": context + extra, "reserved": params["reserve"]}


def _extra(server_args: Any) -> int:
    module: Any = importlib.import_module(next(name for name in SIZING if world.has_module(name)))
    sized = getattr(module, "get_req_to_token_extra_context_len", None)
    if sized is None:
        raise RuntimeError("nothing sizes a row of req_to_token here: this scenario does not know this release")
    return int(sized(*[server_args][: sized.__code__.co_argcount]))


def _allocator(size: int, page_size: int, device: str) -> Any:
    kinds = importlib.import_module("sglang.srt.mem_cache.allocator")
    common = {"dtype": torch.float16, "device": device, "kvcache": None, "need_sort": False}
    if page_size == 1:
        return kinds.TokenToKVPoolAllocator(size, **common)
    return kinds.PagedTokenToKVPoolAllocator(size, page_size, **common)


def _batch(pool: Any, slots: Any, rows: torch.Tensor, context: int, device: str) -> SimpleNamespace:
    reqs = [SimpleNamespace(kv_allocated_len=context, kv_committed_len=context, decode_batch_idx=0) for _ in rows]
    for req in reqs:
        req.kv = req  # where later releases keep the lengths
    lens = torch.full((len(reqs),), context)
    return SimpleNamespace(
        reqs=reqs, batch_size=lambda: len(reqs), device=device, seq_lens=lens.to(device), seq_lens_cpu=lens,
        req_pool_indices=rows, req_to_token_pool=pool, token_to_kv_pool_allocator=slots, hisparse_coordinator=None,
        tree_cache=SimpleNamespace(
            token_to_kv_pool_allocator=slots, is_chunk_cache=lambda: True, supports_prefix_sharing=lambda: False
        ),
        maybe_evict_swa=lambda: None, maybe_wait_verify_done=lambda: None,
        sampling_info=SimpleNamespace(penalizer_orchestrator=SimpleNamespace(is_required=False)),
    )  # fmt: skip


def _prepare(batch: Any) -> None:
    module = importlib.import_module(PREPARE)
    if hasattr(module, "eagle_prepare_for_decode"):
        module.eagle_prepare_for_decode(batch)
    else:
        draft_input = importlib.import_module("sglang.srt.speculative.eagle_info").EagleDraftInput
        draft_input.prepare_for_decode(SimpleNamespace(), batch)


def _check(table: torch.Tensor, rows: list[int], end: int, page_size: int) -> None:
    """Every reserved position has a slot of its own, at its place in a page. ``table``: (rows, width)."""
    seen: dict[int, tuple[int, int]] = {}
    for row in rows:
        for position, slot in enumerate(table[row, :end].tolist()):
            if slot % page_size != position % page_size:
                raise WrongValues(f"req_to_token[{row}, {position}]: slot {slot} is at another place of its page")
            if (other := seen.setdefault(slot, (row, position))) != (row, position):
                raise WrongValues(f"req_to_token[{row}, {position}]: slot {slot}, as in {list(other)}")
