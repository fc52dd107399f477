"""The kernel that lists, for every draft step, the KV slots that every branch reads.

Layout as SGLang's `generate_draft_decode_kv_indices` (srt/speculative, 0.5.13); written anew.
"""

import torch
import triton
import triton.language as tl

BLOCK_SIZE = 1024


@triton.jit
def generate_draft_decode_kv_indices(
    req_pool_indices,
    req_to_token,
    seq_lens,
    positions,
    kv_indices,
    kv_indptr,
    pool_stride,
    row_stride,
    indptr_stride,
    page_size: tl.constexpr,
    seqs_upper: tl.constexpr,
    branches_upper: tl.constexpr,
    steps_upper: tl.constexpr,
    block_size: tl.constexpr,
):
    """Program (step, seq, branch) writes one branch's list and one entry of `kv_indptr`.

    `*_upper` are powers of two that cover the batch. Nothing is checked against the row's width: the caller does.
    """
    step = tl.program_id(0)
    seq = tl.program_id(1)
    branch = tl.program_id(2)
    num_steps = tl.num_programs(0)
    num_seqs = tl.num_programs(1)
    topk = tl.num_programs(2)

    n = step + 1
    kv_indptr += step * indptr_stride
    step = step.to(tl.int64)  # rows are far apart: step * row_stride passes 2**31 in buffers whose rows do not
    kv_indices += step * row_stride

    seq_ids = tl.arange(0, seqs_upper)
    before = tl.sum(tl.load(seq_lens + seq_ids, mask=seq_ids < seq, other=0))
    seq_len = tl.load(seq_lens + seq)
    out = kv_indices + before * topk + seq * n * topk + branch * (seq_len + n)
    slots = req_to_token + tl.load(req_pool_indices + seq).to(tl.int64) * pool_stride

    offs = tl.arange(0, block_size)
    for _ in range(tl.cdiv(seq_len, block_size)):
        mask = offs < seq_len
        tl.store(out + offs, tl.load(slots + offs, mask=mask), mask=mask)
        offs += block_size

    if page_size == 1:
        first = seq_len + branch * num_steps
    else:
        # A lone branch continues the last page; several must not share one, so each starts on its own pages.
        last = seq_len % page_size
        pages = (last + num_steps + page_size - 1) // page_size
        first = seq_len + branch * tl.where(topk == 1, num_steps, pages * page_size)
    new = tl.arange(0, steps_upper)
    tl.store(out + seq_len + new, tl.load(slots + first + new, mask=new < n), mask=new < n)

    num_branches = num_seqs * topk
    z = seq * topk + branch
    if z == 0:
        tl.store(kv_indptr, 0)
        z = num_branches
    branch_ids = tl.arange(0, branches_upper)
    total = tl.sum(tl.load(positions + branch_ids, mask=branch_ids < z, other=0))
    tl.store(kv_indptr + z, total + z * n)


def fill_draft_kv_indices(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    *,
    topk: int,
    page_size: int,
) -> None:
    """Fill `kv_indices` and `kv_indptr` in place for `num_steps = kv_indices.shape[0]` draft steps.

    Shapes: req_pool_indices, seq_lens (num_seqs,); positions (num_seqs*topk,), seq_lens repeated topk times, all
    int64; req_to_token (pool, pool_len) int32; kv_indices (num_steps, width) int32 or int64; kv_indptr
    (num_steps, >= num_seqs*topk + 1) int32. Rows must be dense; row strides are free. No host synchronisation,
    so it can be captured in a CUDA graph. It does not check that a row is wide enough (`sizing.check_row_fits`).
    """
    num_seqs = seq_lens.shape[0]
    num_steps = kv_indices.shape[0]
    if num_seqs == 0:
        kv_indptr[:num_steps, 0] = 0
        return
    generate_draft_decode_kv_indices[(num_steps, num_seqs, topk)](
        req_pool_indices,
        req_to_token,
        seq_lens,
        positions,
        kv_indices,
        kv_indptr,
        req_to_token.stride(0),
        kv_indices.stride(0),
        kv_indptr.stride(0),
        page_size=page_size,
        seqs_upper=triton.next_power_of_2(num_seqs),
        branches_upper=triton.next_power_of_2(num_seqs * topk),
        steps_upper=triton.next_power_of_2(num_steps),
        block_size=BLOCK_SIZE,
    )
