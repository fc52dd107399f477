"""Decode attention in Triton: two stages, with intermediate outputs between them that are larger than 2**31 elements.

Stage one writes, for each request, head and KV split, a partial output; stage two reads and merges them. Both compute

    request * stride + head * head_stride + split * split_stride       elements, in mid_o

Dense, ``stride`` is heads * splits * head_dim, and it takes a large batch to reach 2**31. Here it is given: mid_o is a
strided tensor, of which the guard page backs only what is touched.
In 32 bits (#28788), an offset of 2**31 elements or more lands 2**31 elements before mid_o or closer: in the guard.
"""

from __future__ import annotations

from typing import Any

from harness.case import Case
from harness.errors import UsageError

OPTIONS = ("num_seqs",)
FIXES = {"28788:stage1-int64": "normal", "28788:grouped-stage1-int64": "grouped", "28788:stage2-int64": "reduce"}
SPLITS = 2  # of the KV cache of a request
INT32_LIMIT = 2**31
PAGE_BYTES = 1 << 21  # CUDA's, the larger one: a guard page may leave as much mapped ahead of a payload
LARGEST = 3 << 31  # elements: a guard page holds what is within 2**32 of them


def case(
    fix: str,
    *,
    num_seqs: int = 3,
    stride: int = 1 << 30,
    num_heads: int | None = None,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    seq_len: int = 40,
) -> Case:
    """The case of one batch; ``stride`` in elements from one request's part of mid_o to the next one's."""
    if fix not in FIXES:
        raise UsageError(f"{fix} is not about decode attention; this scenario shows {', '.join(FIXES)}")
    backend = FIXES[fix]
    heads = num_heads or num_kv_heads * (4 if backend == "grouped" else 1)
    _validate(backend, num_seqs, stride, heads, num_kv_heads, head_dim, seq_len)
    last = (num_seqs - 1) * stride + heads * SPLITS * head_dim - 1
    wraps = last >= INT32_LIMIT
    kept: dict[str, Any] = {
        "launcher": backend,
        "num_seqs": num_seqs,
        "stride": stride,
        "num_heads": heads,
        "num_kv_heads": num_kv_heads,
    }
    kept |= {"head_dim": head_dim, "seq_len": seq_len}
    return Case(
        id=f"{backend}-seqs{num_seqs}-stride{stride}-heads{heads}of{num_kv_heads}-dim{head_dim}-len{seq_len}",
        entry=f"{__name__}_{{target}}:run",
        params=kept,
        backend=backend,
        tells=wraps,
        why=f"the last element of mid_o is {last}, {'not ' if wraps else ''}below the int32 limit {INT32_LIMIT}",
        detector="guard-page",
        cuda_packages=("cuda.bindings",),
    )


def _validate(backend: str, num_seqs: int, stride: int, heads: int, kv_heads: int, head_dim: int, seq_len: int) -> None:
    for name, value in (("num_seqs", num_seqs), ("num_kv_heads", kv_heads), ("head_dim", head_dim)):
        if value < 1:
            raise UsageError(f"{name} {value}: must be at least 1")
    if seq_len < 1:
        raise UsageError(f"seq_len {seq_len}: must be at least 1")
    if heads % kv_heads or (heads == kv_heads) == (backend == "grouped"):
        few = "more heads than KV heads" if backend == "grouped" else "as many heads as KV heads"
        raise UsageError(f"num_heads {heads} for {kv_heads} KV heads: this fix's kernel runs for {few}")
    if stride % head_dim:
        raise UsageError(f"stride {stride}: must be a multiple of head_dim, {head_dim}")
    if not heads * SPLITS * head_dim <= stride < INT32_LIMIT:
        raise UsageError(f"stride {stride}: must hold a request's {heads * SPLITS * head_dim} elements, below 2**31")
    if num_seqs * stride > LARGEST:
        raise UsageError(f"{num_seqs} requests of {stride} elements: more than {LARGEST}, and offsets wrap twice")
    first = -(-INT32_LIMIT // stride)  # the first request that wraps
    if first < num_seqs and (first * stride - 2 * INT32_LIMIT) * 4 > -PAGE_BYTES:
        raise UsageError(f"stride {stride}: the first offset that wraps lands too near mid_o for a guard page")
