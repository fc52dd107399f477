"""The leg's side of the decode-attention scenario on SGLang's own launchers and Triton kernels, a stage at a time.

``decode_attention_fwd`` launches one kernel of stage one and that of stage two; each wraps by itself, so each is driven
by its own launcher. Nothing stands in: queries, KV cache and slots are made here, and mid_o is strided wider than a
backend would. The reference is attention in plain torch: of stage one, the partial outputs must merge to it; stage two
is handed right ones.
"""

from __future__ import annotations

import importlib
import inspect
import math
from typing import Any, NamedTuple

import torch

from harness import memory
from regressions.scenarios import sglang_world as world
from regressions.scenarios.compare import close
from regressions.scenarios.decode_attention import SPLITS

KERNELS = (  # newest place first
    "sglang.kernels.ops.attention.decode_attention",
    "sglang.srt.layers.attention.triton_ops.decode_attention",
)
PRELOAD = KERNELS
LAUNCHERS = {
    "normal": "_decode_att_m_fwd",
    "grouped": "_decode_grouped_att_m_fwd",
    "reduce": "_decode_softmax_reducev_fwd",
}


class _Batch(NamedTuple):
    q: torch.Tensor  # (num_seqs, heads, head_dim)
    k: torch.Tensor  # (rows, kv_heads, head_dim), as v
    v: torch.Tensor
    slots: torch.Tensor  # (num_seqs, length): the rows of k and v that a request attends to


def run(params: dict[str, Any], device: str) -> dict[str, Any]:
    batch = _batch(params, device)
    num_seqs, heads, head_dim = batch.q.shape
    stride, splits = params["stride"], (num_seqs, heads, SPLITS)
    # of each request, what stands at its stride
    for parts, apart in ((heads * SPLITS * head_dim, stride), (heads * SPLITS, stride // head_dim)):
        starts = [4 * request * apart for request in range(num_seqs)]
        memory.touches(starts[-1] + 4 * parts, [(start, start + 4 * parts) for start in starts])
    # dense but for the first stride; the kernels find a request's lse at its offset in mid_o, divided by head_dim
    mid_o = torch.empty_strided((*splits, head_dim), (stride, SPLITS * head_dim, head_dim, 1), device=device)
    lse = torch.empty_strided(splits, (stride // head_dim, SPLITS, 1), device=device)
    out = torch.empty_like(batch.q)
    length = batch.slots.shape[1]
    indptr = torch.arange(0, num_seqs * length + 1, length, dtype=torch.int32, device=device)
    with world.on(device):
        kernels: Any = importlib.import_module(next(name for name in KERNELS if world.has_module(name)))
        mid_o.zero_()
        lse.fill_(-torch.inf)
        if params["launcher"] == "reduce":
            _fill(mid_o, lse, batch, kernels._MIN_BLOCK_KV)
        arguments = {
            "q": batch.q, "k_buffer": batch.k, "v_buffer": batch.v, "kv_indptr": indptr,
            "kv_indices": batch.slots.flatten(), "att_out": mid_o, "logits": mid_o, "att_lse": lse, "lse": lse,
            "o": out,
            "num_kv_splits": torch.full((num_seqs,), SPLITS, dtype=torch.int32, device=device),
            "max_kv_splits": SPLITS, "sm_scale_withk": head_dim**-0.5, "sm_scale": head_dim**-0.5, "logit_cap": 0.0,
            "v_scale": 1.0,
        }  # fmt: skip
        launch = getattr(kernels, LAUNCHERS[params["launcher"]])
        known = inspect.signature(launch).parameters
        launch(**{name: value for name, value in arguments.items() if name in known})
        if params["launcher"] != "reduce":
            out = (torch.softmax(lse, dim=-1)[..., None] * mid_o).sum(dim=2)
    _check(out, batch)
    return {"last_request_at": (num_seqs - 1) * stride, "splits": SPLITS}


def _batch(params: dict[str, Any], device: str) -> _Batch:
    generator = torch.Generator().manual_seed(5)
    num_seqs, length, head_dim = params["num_seqs"], params["seq_len"], params["head_dim"]
    rows, dtype = num_seqs * length, torch.float16 if device == "cuda" else torch.float32
    q, k, v = (
        torch.randn((count, heads, head_dim), generator=generator).to(device, dtype)
        for count, heads in ((num_seqs, params["num_heads"]), *[(rows, params["num_kv_heads"])] * 2)
    )
    return _Batch(q, k, v, torch.randperm(rows, generator=generator).view(num_seqs, length).to(device))


def _scores(batch: _Batch, request: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One request's scores (heads, length) and values (length, heads, head_dim), in float32."""
    shared = batch.q.shape[1] // batch.k.shape[1]  # query heads of a KV head
    keys, values = (
        cache[batch.slots[request]].float().repeat_interleave(shared, dim=1) for cache in (batch.k, batch.v)
    )
    return torch.einsum("hd,nhd->hn", batch.q[request].float(), keys) * batch.q.shape[2] ** -0.5, values


def _fill(mid_o: torch.Tensor, lse: torch.Tensor, batch: _Batch, block: int) -> None:
    """What stage one must leave: attention over each split, and the logarithm of its weight."""
    length = batch.slots.shape[1]
    size = math.ceil(math.ceil(length / SPLITS) / block) * block  # as the kernels cut it
    for request in range(len(batch.q)):
        scores, values = _scores(batch, request)
        for split, start in enumerate(range(0, length, size)):
            part = slice(start, start + size)
            weights = torch.softmax(scores[:, part], dim=-1)
            mid_o[request, :, split] = torch.einsum("hn,nhd->hd", weights, values[part])
            lse[request, :, split] = torch.logsumexp(scores[:, part], dim=-1)


def _check(out: torch.Tensor, batch: _Batch) -> None:
    for request in range(len(batch.q)):
        scores, values = _scores(batch, request)
        want = torch.einsum("hn,nhd->hd", torch.softmax(scores, dim=-1), values)
        close(f"attention of request {request}", out[request], want, batch.q.dtype)
