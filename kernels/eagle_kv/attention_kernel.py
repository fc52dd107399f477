"""Paged decode attention in Triton: one query token a branch, online softmax over blocks of slots."""

import torch
import triton
import triton.language as tl

BLOCK_KV = 64


@triton.jit
def paged_decode_attention_kernel(
    q,
    k_buffer,
    v_buffer,
    kv_indptr,
    kv_indices,
    out,
    sm_scale,
    q_branch_stride,
    q_head_stride,
    k_slot_stride,
    k_head_stride,
    v_slot_stride,
    v_head_stride,
    out_branch_stride,
    out_head_stride,
    group_size: tl.constexpr,
    head_dim: tl.constexpr,
    dim_upper: tl.constexpr,
    block_kv: tl.constexpr,
):
    """Program (branch, query head). Accumulates in float32; an empty list gives zeros."""
    branch = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    kv_head = head // group_size
    dims = tl.arange(0, dim_upper)
    in_dim = dims < head_dim

    query = tl.load(q + branch * q_branch_stride + head * q_head_stride + dims, mask=in_dim, other=0.0).to(tl.float32)
    query *= sm_scale
    start = tl.load(kv_indptr + branch)
    end = tl.load(kv_indptr + branch + 1)

    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    acc = tl.zeros((dim_upper,), tl.float32)
    offs = start + tl.arange(0, block_kv)
    for _ in range(tl.cdiv(end - start, block_kv)):
        listed = offs < end
        slots = tl.load(kv_indices + offs, mask=listed, other=0).to(tl.int64)
        mask = listed[:, None] & in_dim[None, :]
        k_ptrs = k_buffer + slots[:, None] * k_slot_stride + kv_head * k_head_stride + dims[None, :]
        k = tl.load(k_ptrs, mask=mask, other=0.0).to(tl.float32)
        scores = tl.where(listed, tl.sum(query[None, :] * k, axis=1), float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=0))
        rescale = tl.exp(peak - new_peak)
        weights = tl.exp(scores - new_peak)
        v_ptrs = v_buffer + slots[:, None] * v_slot_stride + kv_head * v_head_stride + dims[None, :]
        v = tl.load(v_ptrs, mask=mask, other=0.0).to(tl.float32)
        acc = acc * rescale + tl.sum(weights[:, None] * v, axis=0)
        total = total * rescale + tl.sum(weights, axis=0)
        peak = new_peak
        offs += block_kv

    result = acc / tl.where(total == 0.0, 1.0, total)
    out_ptrs = out + branch * out_branch_stride + head * out_head_stride + dims
    tl.store(out_ptrs, result.to(out.dtype.element_ty), mask=in_dim)


def paged_decode_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> torch.Tensor:
    """Attention of every branch over the slots that it lists; same arguments as `reference.paged_decode_attention`.

    q (branches, num_qo_heads, head_dim); k_buffer, v_buffer (slots, num_kv_heads, head_dim), last dimension dense;
    kv_indptr (branches + 1,) int32; kv_indices int32 or int64. Result as q. No host synchronisation.
    """
    branches, num_qo_heads, head_dim = q.shape
    out = torch.empty((branches, num_qo_heads, head_dim), dtype=q.dtype, device=q.device)
    if branches == 0:
        return out
    paged_decode_attention_kernel[(branches, num_qo_heads)](
        q,
        k_buffer,
        v_buffer,
        kv_indptr,
        kv_indices,
        out,
        sm_scale,
        *q.stride()[:2],
        *k_buffer.stride()[:2],
        *v_buffer.stride()[:2],
        *out.stride()[:2],
        group_size=num_qo_heads // k_buffer.shape[1],
        head_dim=head_dim,
        dim_upper=triton.next_power_of_2(head_dim),
        block_kv=BLOCK_KV,
    )
    return out
