"""Store new K and V rows into the paged KV cache, with the slot checked at the write (SGLang PR 27486)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from . import jit

# Not resolved: next to this file may be a different source than next to the file that a symlink points at.
SOURCE = Path(__file__).parent / "csrc" / "store_kvcache.cuh"


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
    indices: (rows,) int32 or int64, may be strided. Of rows that share a slot, each element is one of theirs, and it is
    unspecified whose: on CUDA they are written side by side.
    size_limit: slots that may be written, ``0 <= slot < size_limit``; 0 means all rows of the cache.

    A slot out of bounds fails an assert in the kernel, whose text names ``size_limit``: on a CPU it aborts the process,
    on CUDA it ends the context (``device-side assert triggered`` at the next synchronisation). It runs on the current
    stream and can be captured into a CUDA graph. Raises ValueError for shapes, dtypes, devices or strides other than
    these, ToolchainError (a RuntimeError) if a build tool is missing.
    """
    _launch(_kernel(k.device), k, v, k_cache, v_cache, indices, size_limit)


@cache
def _kernel(device: torch.device) -> Any:
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"store_cache: tensors are on {device}: must be on cpu or cuda")
    return jit.load(SOURCE, device, "store_cache")["store_cache"]


def _launch(
    kernel: Any,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    indices: torch.Tensor,
    size_limit: int,
) -> None:
    """Run the loaded kernel: it checks its arguments itself, in a fraction of the time that it would take here."""
    kernel(k, v, k_cache, v_cache, indices, size_limit)
