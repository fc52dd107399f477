"""The leg's side of the draft-extend scenario on SGLang's own Triton backend: its graph state, a capture and a replay.

Real: the backend, made by its constructor, its buffers and the kernel that fills ``kv_indices``; what stands in around
it is in :mod:`regressions.scenarios.sglang_world`. The backend is told ``num_draft_tokens`` after it was made, since
the world's configuration knows full trees only. A graph is not recorded: both passes fill buffers outside of it.

The stand-in for the draft input has the one field that a replay reads: how many of a request's tokens are new.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from eagle_kv.batch import DraftConfig

from harness.leg import WrongValues
from regressions.scenarios import sglang_world as world
from regressions.scenarios.compare import same

BACKEND = "sglang.srt.layers.attention.triton_backend"
PRELOAD = (BACKEND, "sglang.srt.mem_cache.memory_pool", "sglang.srt.server_args")


def run(params: dict[str, Any], device: str) -> dict[str, Any]:
    prefixes, width = params["seq_lens"], params["num_draft_tokens"]
    context = max(prefixes) + width
    config = DraftConfig(
        topk=params["topk"], num_steps=params["num_steps"], page_size=params["page_size"], max_bs=len(prefixes) + 1,
        max_context_len=context, num_qo_heads=4, num_kv_heads=2,
        dtype=torch.float16 if device == "cuda" else torch.float32, device=device,
    )  # fmt: skip
    with world.on(device):
        runner = world.model_runner(config, [context] * len(prefixes), mla=False)
        backend = _backend(runner, width)
        backend.init_cuda_graph_state(config.max_bs, config.max_bs * width)
        backend.init_forward_metadata_out_graph(_batch([1] * len(prefixes), width, config), in_capture=True)
        _check(backend, [0] * len(prefixes), width, None, runner, config)
        batch = _batch([length + width for length in prefixes], width, config)
        batch.spec_info.extend_seq_lens_tensor = torch.full((len(prefixes),), width, device=device)
        backend.init_forward_metadata_out_graph(batch, in_capture=False)
        _check(backend, prefixes, width, batch.req_pool_indices, runner, config)
    return {"tokens": len(prefixes) * width}


def _backend(runner: Any, width: int) -> Any:
    module: Any = importlib.import_module(BACKEND)
    if type(getattr(module, "is_arch_support_pdl", None)).__module__ == "sgl_kernel":  # asked of an import stub
        module.is_arch_support_pdl = lambda: False
    backend = module.TritonAttnBackend(runner)
    backend.num_draft_tokens = width
    return backend


def _batch(seq_lens: list[int], width: int, config: DraftConfig) -> Any:
    """One round's batch; ``seq_lens`` has the new tokens in, as SGLang's draft extend hands it over."""
    info = importlib.import_module("sglang.srt.model_executor.forward_batch_info")
    batch = world.forward_batch(seq_lens, config)
    batch.forward_mode = info.ForwardMode.DRAFT_EXTEND_V2
    batch.spec_info = SimpleNamespace(extend_seq_lens_tensor=None)
    return batch


def _check(backend: Any, prefixes: list[int], width: int, rows: Any, runner: Any, config: DraftConfig) -> None:
    num_seqs, metadata = len(prefixes), backend.forward_metadata
    same("qo_indptr", metadata.qo_indptr, torch.arange(0, num_seqs * width + 1, width))
    if metadata.max_extend_len != width:
        raise WrongValues(f"max_extend_len: {metadata.max_extend_len}, reference {width}")
    if rows is None:  # a capture has no prefixes yet, and no slots to look up
        return
    indptr = torch.tensor([0, *prefixes]).cumsum(0)
    same("kv_indptr", metadata.kv_indptr, indptr)
    table = runner.req_to_token_pool.req_to_token.cpu()
    slots = [table[row, :length] for row, length in zip(rows.tolist(), prefixes, strict=True)]
    same("kv_indices", metadata.kv_indices[: int(indptr[-1])], torch.cat(slots).to(torch.int64))
