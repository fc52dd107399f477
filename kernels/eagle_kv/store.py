"""Store new K and V rows into the paged KV cache, with the slot checked at the write (SGLang PR 27486)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from . import jit

# Not resolved: next to this file may be a different source than next to the file that a symlink points at.
SOURCE = Path(__file__).parent / "csrc" / "store_kvcache.cuh"
_UNITS = (16, 8, 4, 2, 1)


def store_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    size_limit: int = 0,
) -> None:
    """``k_cache[indices[i]] = k[i]`` and ``v_cache[indices[i]] = v[i]`` for every row i, in place.

    k, v: (rows, row_elems), any dtype whose row is a multiple of 4 bytes; rows may be strided, a row's elements not.
    k_cache, v_cache: (slots, row_elems) of the same dtype and device, rows may be strided.
    indices: (rows,) int32 or int64, may be strided. Of rows that share a slot one wins, unspecified which.
    size_limit: slots that may be written, ``0 <= slot < size_limit``; 0 means all rows of the cache.

    A slot out of bounds fails an assert in the kernel, whose text names ``size_limit``: on a CPU it aborts the process,
    on CUDA it ends the context (``device-side assert triggered`` at the next synchronisation). It runs on the current
    stream and can be captured into a CUDA graph. Raises ValueError for shapes, dtypes, devices or strides other than
    these, ToolchainError (a RuntimeError) if a build tool is missing.
    """
    limit = _checked_limit(k, v, k_cache, v_cache, indices, size_limit)
    if k.shape[0] == 0:
        return
    _launch(_kernel(str(k.device)), k, v, k_cache, v_cache, indices, limit)


@cache
def _kernel(device: str) -> Any:
    return jit.load(SOURCE, torch.device(device), "store_cache")["store_cache"]


def _launch(
    kernel: Any,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    indices: torch.Tensor,
    size_limit: int,
) -> None:
    """Run the loaded kernel on checked arguments."""
    rows = (k, v, k_cache, v_cache)
    addresses = [t.data_ptr() for t in rows]
    strides = [t.stride(0) * t.element_size() for t in rows]
    row_bytes = k.shape[1] * k.element_size()
    unit = next(u for u in _UNITS if all(n % u == 0 for n in (row_bytes, *addresses, *strides)))
    shape = (indices.stride(0), k.shape[0], row_bytes, size_limit, indices.element_size())
    if k.device.type == "cpu":
        kernel(*addresses, indices.data_ptr(), *strides, *shape, unit, 0)
        return
    with torch.cuda.device(k.device):
        stream = torch.cuda.current_stream().cuda_stream
        kernel(*addresses, indices.data_ptr(), *strides, *shape, unit, stream)


def _checked_limit(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, indices: torch.Tensor, limit: int
) -> int:
    named = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache}
    for name, tensor in named.items():
        if tensor.dim() != 2:
            raise ValueError(f"store_cache: {name} has shape {tuple(tensor.shape)}: must be 2-D, (rows, row_elems)")
        if (tensor.dtype, tensor.device, tensor.shape[1]) != (k.dtype, k.device, k.shape[1]):
            ours, other = (f"{t.dtype} x {t.shape[1]} on {t.device}" for t in (k, tensor))
            raise ValueError(f"store_cache: {name} holds rows of {other}: must match k's, {ours}")
        if tensor.shape[1] > 1 and tensor.stride(1) != 1:
            raise ValueError(f"store_cache: {name} has stride {tensor.stride()}: elements of a row must be adjacent")
    if k.device.type not in ("cpu", "cuda"):
        raise ValueError(f"store_cache: tensors are on {k.device}: must be on cpu or cuda")
    row_bytes = k.shape[1] * k.element_size()
    if row_bytes == 0 or row_bytes % 4:
        raise ValueError(f"store_cache: row of {row_bytes} bytes: must be a multiple of 4")
    if indices.dtype not in (torch.int32, torch.int64) or indices.device != k.device:
        got = f"{indices.dtype} on {indices.device}"
        raise ValueError(f"store_cache: indices are {got}: must be int32 or int64 on {k.device}")
    if indices.dim() != 1 or not indices.shape[0] == k.shape[0] == v.shape[0]:
        shapes = f"{tuple(indices.shape)} for {k.shape[0]} rows of k and {v.shape[0]} of v"
        raise ValueError(f"store_cache: indices have shape {shapes}: must be one slot a row")
    slots = min(k_cache.shape[0], v_cache.shape[0])
    if not 0 <= limit <= slots:
        raise ValueError(f"store_cache: size_limit is {limit}: must be 0 to {slots}, the rows of the cache")
    return limit or slots
