"""The kernel that lists, for every draft step, the KV slots that every branch reads.

Layout as SGLang's `generate_draft_decode_kv_indices` (srt/speculative, 0.5.13); written anew. Every prefix is written
num_steps * topk times, so speed is that of the writes: 16 bytes a thread, in whole sectors of memory, and programs that
run at the same time write to the same lists. A program reads a tile of a prefix once a branch, as each list is aligned
in its own way; all but the first of these reads are answered by a cache.
"""

import torch
import triton
import triton.language as tl

TILE = 512  # elements; one store of 16 bytes a thread
PROGRAMS = 32768  # a launch's, about: fewer have several tiles each and end unevenly, more have none at short prefixes
EDGE = 7 + 3  # elements of a list before its first whole sector, and behind its last 16 bytes, at most


@triton.jit
def _aligned(element):
    """The next element that is 32 bytes, a sector, or a multiple of them from the start of the buffer."""
    return (element + 7) // 8 * 8


@triton.jit
def generate_draft_decode_kv_indices(
    req_pool_indices,
    req_to_token,
    seq_lens,
    kv_indices,
    kv_indptr,
    topk,
    pool_stride,
    row_stride,
    indptr_stride,
    page_size: tl.constexpr,
    seqs_upper: tl.constexpr,
    topk_upper: tl.constexpr,
    ends_upper: tl.constexpr,
    tile: tl.constexpr,
):
    """Program (block, step, seq) writes every num_blocks-th tile of a prefix; block 0 what tiles leave out, and
    `kv_indptr`.

    `*_upper` are powers of two that cover the requests, the branches, and a step's new slots with both edges of a
    prefix. Nothing is checked against the row's width: the caller does.
    """
    block = tl.program_id(0)
    step = tl.program_id(1)
    seq = tl.program_id(2)
    num_blocks = tl.num_programs(0)
    num_steps = tl.num_programs(1)
    num_seqs = tl.num_programs(2)

    # The first of two reads from memory that wait for each other: all that the second one needs, at once.
    slots = req_to_token + tl.load(req_pool_indices + seq).to(tl.int64) * pool_stride
    seq_len = tl.load(seq_lens + seq)
    n = step + 1
    kv_indptr += step * indptr_stride
    step = step.to(tl.int64)  # rows are far apart: step * row_stride passes 2**31 in buffers whose rows do not
    row = step * row_stride

    if block * tile < tl.maximum(seq_len, 1):
        seq_ids = tl.arange(0, seqs_upper)
        before = tl.sum(tl.load(seq_lens + seq_ids, mask=seq_ids < seq, other=0))
        list_len = seq_len + n
        lists = before * topk + seq * n * topk

        offs = tl.arange(0, tile)
        for at in range(block * tile, seq_len, num_blocks * tile):
            left = tl.minimum(seq_len - at, 2 * tile).to(tl.int32)  # of the prefix; beyond a tile, how many is the same
            for branch in tl.range(0, topk, loop_unroll_factor=4):
                first = row + lists + branch * list_len
                aligned = _aligned(first)
                skipped = (aligned - first).to(tl.int32)
                mask = offs < (left - skipped) // 4 * 4
                tl.store(kv_indices + aligned + at + offs, tl.load(slots + at + skipped + offs, mask=mask), mask=mask)

        if block == 0:
            if page_size == 1 or topk == 1:
                pitch = num_steps.to(tl.int64)
            else:
                # Branches must not share a page: each starts on its own, at the prefix's offset in a page.
                pitch = (seq_len % page_size + num_steps + page_size - 1) // page_size * page_size
            branch = tl.arange(0, topk_upper)
            first = lists + branch * list_len
            tl.store(kv_indptr + seq * topk + branch, first, mask=branch < topk)
            if seq == num_seqs - 1:
                tl.store(kv_indptr + num_seqs * topk, lists + topk * list_len)

            first = (row + first)[:, None]
            skipped = tl.minimum(_aligned(first) - first, seq_len)
            behind = skipped + (seq_len - skipped) // 4 * 4
            end = tl.arange(0, ends_upper)[None, :]
            place = tl.where(end < skipped, end, behind + end - skipped)
            mask = (place < list_len) & (branch < topk)[:, None]
            position = tl.where(place < seq_len, place, place + (branch * pitch)[:, None])
            tl.store(kv_indices + first + place, tl.load(slots + position, mask=mask), mask=mask)


def fill_draft_kv_indices(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    *,
    topk: int,
    page_size: int,
) -> None:
    """Fill `kv_indices` and `kv_indptr` in place for `num_steps = kv_indices.shape[0]` draft steps.

    Shapes: req_pool_indices, seq_lens (num_seqs,) int64; req_to_token (pool, pool_len) int32; kv_indices (num_steps,
    width) int32 or int64; kv_indptr (num_steps, >= num_seqs*topk + 1) int32. Rows must be dense; row strides are free.
    No host synchronisation, so it can be captured in a CUDA graph. It does not check that a row is wide enough
    (`sizing.check_row_fits`).
    """
    num_seqs = seq_lens.shape[0]
    num_steps = kv_indices.shape[0]
    if num_seqs == 0:
        kv_indptr[:num_steps, 0] = 0
        return
    # The lengths are on the device: blocks are for a full row, and where that is too many, each takes several tiles.
    num_blocks = min(triton.cdiv(req_to_token.shape[1], TILE), triton.cdiv(PROGRAMS, num_steps * num_seqs))
    generate_draft_decode_kv_indices[(num_blocks, num_steps, num_seqs)](
        req_pool_indices,
        req_to_token,
        seq_lens,
        kv_indices,
        kv_indptr,
        topk,
        req_to_token.stride(0),
        kv_indices.stride(0),
        kv_indptr.stride(0),
        page_size=page_size,
        seqs_upper=triton.next_power_of_2(num_seqs),
        topk_upper=triton.next_power_of_2(topk),
        ends_upper=triton.next_power_of_2(num_steps + EDGE),
        tile=TILE,
    )
