"""What the kernels must compute, in plain torch: slot lists in int64, attention in float32."""

from collections.abc import Sequence

import torch

# elements of K or V that attention gathers at a time: on a GPU each operation costs a launch, on a CPU cache misses
GATHERED = {"cuda": 1 << 23, "cpu": 1 << 16}


def draft_positions(seq_len: int, topk: int, num_steps: int, page_size: int) -> torch.Tensor:
    """Positions (topk, num_steps) int64 of a request's draft tokens in its `req_to_token` row.

    With pages and more than one branch, every branch gets pages of its own and keeps the prefix's offset in a page.
    """
    own_pages = page_size > 1 and topk > 1
    pitch = -(-(seq_len % page_size + num_steps) // page_size) * page_size if own_pages else num_steps
    return seq_len + torch.arange(topk)[:, None] * pitch + torch.arange(num_steps)


def kv_indices(
    req_pool_indices: Sequence[int] | torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: Sequence[int] | torch.Tensor,
    *,
    topk: int,
    num_steps: int,
    page_size: int,
) -> list[torch.Tensor]:
    """The used part of every step's row: `num_steps` CPU int64 tensors, the branches one after the other."""
    table = req_to_token.to("cpu", torch.int64)
    pools, lens = torch.as_tensor(req_pool_indices).tolist(), torch.as_tensor(seq_lens).tolist()
    rows: list[list[torch.Tensor]] = [[] for _ in range(num_steps)]
    for pool, seq_len in zip(pools, lens, strict=True):
        prefix = table[pool, :seq_len]
        drafts = table[pool, draft_positions(seq_len, topk, num_steps, page_size)]
        for i, row in enumerate(rows):
            for branch in range(topk):
                row += [prefix, drafts[branch, : i + 1]]
    return [torch.cat(row) if row else torch.empty(0, dtype=torch.int64) for row in rows]


def kv_indptr(seq_lens: Sequence[int] | torch.Tensor, *, topk: int, num_steps: int) -> torch.Tensor:
    """Where every branch's list starts and ends: CPU int64 (num_steps, num_seqs*topk + 1), first column 0."""
    lens = torch.as_tensor(seq_lens, dtype=torch.int64).cpu().repeat_interleave(topk)
    indptr = torch.zeros((num_steps, len(lens) + 1), dtype=torch.int64)
    for i in range(num_steps):
        indptr[i, 1:] = torch.cumsum(lens + i + 1, 0)
    return indptr


def paged_decode_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> torch.Tensor:
    """One query token a branch over the slots that it lists, MHA or GQA; result as q, in q's dtype.

    q (branches, num_qo_heads, head_dim); k_buffer, v_buffer (slots, num_kv_heads, head_dim); kv_indptr
    (branches + 1,). An empty list gives zeros. A list cut short by the end of `kv_indices` is used as it is.
    """
    out = torch.zeros_like(q)
    grouped = q.reshape(q.shape[0], k_buffer.shape[1], -1, q.shape[2]).float()  # the query heads of each KV head
    bounds = kv_indptr.to(kv_indices.device, torch.int64).clamp(max=len(kv_indices))
    starts, stops = bounds[:-1, None], bounds[1:, None]
    lengths = (stops - starts).clamp(min=0).flatten().tolist()
    at_once = max(1, GATHERED[q.device.type] // max(1, max(lengths, default=0) * k_buffer[0].numel()))
    for branches in (slice(first, first + at_once) for first in range(0, q.shape[0], at_once)):
        at = starts[branches] + torch.arange(max(lengths[branches]), device=kv_indices.device)
        if at.numel():
            beyond = (at >= stops[branches])[:, None, None]  # of a shorter list: it repeats its last slot
            slots = kv_indices[at.minimum(stops[branches] - 1).clamp(min=0)].long()
            scores = torch.einsum("bgid,bngd->bgin", grouped[branches], k_buffer[slots].float()) * sm_scale
            weights = scores.masked_fill(beyond, -torch.inf).softmax(-1).masked_fill(beyond, 0)
            values = v_buffer[slots].float().masked_fill(beyond[:, 0, 0, :, None, None], 0)  # zero times infinity isn't
            attended = torch.einsum("bgin,bngd->bgid", weights, values)
            out[branches] = attended.reshape(-1, *q.shape[1:]).to(q.dtype)
    return out


def paged_decode_mla(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv: torch.Tensor,
    kpe: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> torch.Tensor:
    """The same for absorbed MLA: all heads share one latent vector a slot, which is key and value at once.

    q_nope (branches, heads, head_dim_ckv), q_pe (branches, heads, head_dim_kpe), ckv (slots, head_dim_ckv),
    kpe (slots, head_dim_kpe); result as q_nope.
    """
    keys = torch.cat([ckv, kpe], -1)[:, None]
    values = torch.nn.functional.pad(ckv, (0, kpe.shape[-1]))[:, None]
    out = paged_decode_attention(torch.cat([q_nope, q_pe], -1), keys, values, kv_indptr, kv_indices, sm_scale)
    return out[..., : ckv.shape[-1]]
