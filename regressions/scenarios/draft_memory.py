"""In a leg: what of rows of gigabytes a batch touches, so that no memory has to stand behind the rest of them."""

from __future__ import annotations

from typing import Any

from harness import memory
from regressions.scenarios.draft import Shape


def expect(params: dict[str, Any]) -> None:
    """To be called with the detector open, before kv_indices is allocated."""
    shape = Shape(**params)
    if shape.is_huge and shape.is_folded:
        memory.folds(shape.rows_bytes)
    elif shape.is_huge:
        memory.touches(shape.rows_bytes, shape.touched)
