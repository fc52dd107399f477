"""In a leg: rows of gigabytes, of which a batch touches little, so that no memory has to stand behind the rest."""

from __future__ import annotations

from typing import Any

from harness import memory
from regressions.scenarios.draft import Shape

# What FlashInfer 0.6.12 needs for its parts of results, in place of the 128 MiB that it recommends
# (include/flashinfer/attention/scheduler.cuh). Decode: of each query head head_dim + 1 floats for each block that the
# GPU holds at once, shared among KV heads: 4 / 2 * 16 * 132 blocks * 65 * 4 bytes, 1.1 MB. MLA: 2 tiles of 64 rows of
# 512 halves and a float for each multiprocessor, 17 MB.
_WORKSPACE = {"flashinfer": 1 << 21, "flashinfer_mla": 1 << 25}


def config(params: dict[str, Any]) -> dict[str, int]:
    """What a case with rows of gigabytes says of its DraftConfig, so that they are all that takes memory."""
    shape = Shape(**params)
    return {"workspace_bytes": _WORKSPACE[shape.backend]} if shape.is_huge and shape.backend in _WORKSPACE else {}


def expect(params: dict[str, Any]) -> None:
    """To be called with the detector open, before kv_indices is allocated."""
    shape = Shape(**params)
    if shape.is_huge and shape.is_folded:
        memory.folds(shape.rows_bytes)
    elif shape.is_huge:
        memory.touches(shape.rows_bytes, shape.touched)
