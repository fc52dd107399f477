"""The leg's side of the expand scenario on SGLang's own FlashAttention backend, in one step's CUDA-graph replay.

Real: ``init_cuda_graph_state``, ``_bind_metadata_buffers`` and ``_apply_cuda_graph_metadata`` of its class, and
``draft_decode_set_expand_metadata``, which scatters. Not FlashAttention-3: none of these call it.

Stand-ins: the instance skips its constructor, which asks for a GPU's attention library, and has the attributes that the
three methods read. The slots are laid out here, as an allocator of pages lays them: those of a branch start in a page
of its own. ``torch.compile`` is told to run eagerly (``force_eager``): torch's own ``scatter_`` is what minds bounds.
"""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import torch

from regressions.scenarios import sglang_world as world
from regressions.scenarios.compare import same
from regressions.scenarios.expand import pages_of

BACKEND = "sglang.srt.layers.attention.flashattention_backend"
PRELOAD = (BACKEND, "sglang.srt.model_executor.forward_batch_info")


def run(params: dict[str, Any], device: str) -> dict[str, Any]:
    torch.compiler.set_stance("force_eager")
    seq_lens, topk, page_size = params["seq_lens"], params["topk"], params["page_size"]
    num_seqs, decode_length = len(seq_lens), params["step"] + 1
    slots = torch.tensor([_slots(branch, params) for branch in range(num_seqs * topk)], dtype=torch.int64)
    with world.on(device):
        backend = _backend(params, device)
        backend.init_cuda_graph_state(num_seqs, num_seqs * topk)
        mode = importlib.import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode.DECODE
        lens = torch.tensor(seq_lens, dtype=torch.int64)
        backend._bind_metadata_buffers(num_seqs, num_seqs * topk, None, mode, SimpleNamespace(), lens.device)
        arguments = {
            "bs": num_seqs, "req_pool_indices": torch.arange(1, num_seqs + 1, device=device),
            "seq_lens": lens.to(device), "seq_lens_sum": sum(seq_lens), "encoder_lens": None, "forward_mode": mode,
            "spec_info": SimpleNamespace(), "seq_lens_cpu": lens, "out_cache_loc": slots.flatten().to(device),
            "plan": None,
        }  # fmt: skip
        known = inspect.signature(backend._apply_cuda_graph_metadata).parameters
        backend._apply_cuda_graph_metadata(**{name: arguments[name] for name in known})
    metadata = backend.draft_decode_metadata_topk_expand[num_seqs]
    columns = metadata.page_table.shape[1]
    for branch in range(num_seqs * topk):
        last = seq_lens[branch // topk] % page_size
        live = [slot // page_size for slot in slots[branch, :decode_length].tolist()]
        pages = torch.tensor(list(dict.fromkeys(live)))
        if len(pages) != pages_of(last, decode_length, page_size):
            raise AssertionError(f"{pages.tolist()} are not the pages that the layout says: mend this scenario")
        same(f"page_table[{branch}]", metadata.page_table[branch, : len(pages)], pages)
        same(
            f"cache_seqlens[{branch}]",
            metadata.cache_seqlens_int32[branch : branch + 1],
            torch.tensor([last + decode_length]),
        )
    return {"columns": columns, "rows": num_seqs * topk}


def _slots(branch: int, params: dict[str, Any]) -> list[int]:
    """The slots of a branch: in pages counted down, so that a page's number is not its place in the row."""
    page_size, last = params["page_size"], params["seq_lens"][branch // params["topk"]] % params["page_size"]
    pages = pages_of(last, params["num_steps"], page_size)
    top = 1000 - branch * pages
    places = range(last, last + params["num_steps"])
    return [(top - place // page_size) * page_size + place % page_size for place in places]


def _backend(params: dict[str, Any], device: str) -> Any:
    module: Any = importlib.import_module(BACKEND)
    backend = module.FlashAttentionBackend.__new__(module.FlashAttentionBackend)
    context = max(params["seq_lens"]) + params["topk"] * params["num_steps"] * params["page_size"]
    num_seqs = len(params["seq_lens"])
    vars(backend).update(
        device=device, page_size=params["page_size"], max_context_len=context, topk=params["topk"],
        speculative_num_steps=params["num_steps"], speculative_step_id=params["step"],
        speculative_num_draft_tokens=params["topk"] * params["num_steps"] + 1,
        req_to_token=torch.zeros((num_seqs + 1, context), dtype=torch.int32, device=device),
        decode_cuda_graph_metadata={}, target_verify_metadata={}, is_draft_runner=True, skip_prefill=False,
        is_encoder_decoder=False, use_sliding_window_kv_pool=False, use_mla=False, has_swa=False,
        sliding_window_size=None,
        has_local_attention=False, local_attn_builder=None, attention_chunk_size=None, is_prefill_aware_swa=False,
        _get_scheduler_metadata=None, _sched_meta_buf=None, _verify_mask=None, forward_metadata=None,
    )  # fmt: skip
    return backend
