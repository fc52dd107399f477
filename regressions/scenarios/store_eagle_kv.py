"""The leg's side of the store scenario."""

from __future__ import annotations

from typing import Any

import torch
from eagle_kv.kv_pool import KVPool
from eagle_kv.store import store_cache

from harness.leg import WrongValues


def run(params: dict[str, Any], device: str) -> dict[str, Any]:
    # int16 where a row is no whole number of int32, so that the row itself can be made and the store must refuse it
    dtype = torch.int32 if params["row_bytes"] % 4 == 0 else torch.int16
    elements = params["row_bytes"] // dtype.itemsize
    index_dtype = torch.int64 if params["index_bytes"] == 8 else torch.int32
    indices = torch.tensor(params["slots"], dtype=index_dtype, device=device)
    k, v = (_rows(len(params["slots"]), elements, dtype, device, params["strided"], seed) for seed in (1, 2))

    if params["path"] == "pool":
        pool = KVPool(params["num_slots"], params["page_size"], 1, elements, dtype, device)
        caches = pool.k_buffer.flatten(1), pool.v_buffer.flatten(1)
        pool.set_kv_buffer(indices, k.unflatten(1, (1, elements)), v.unflatten(1, (1, elements)))
    else:
        rows = params["num_slots"] + params["page_size"]
        k_cache = torch.zeros((rows, elements), dtype=dtype, device=device)
        v_cache = torch.zeros((rows, elements), dtype=dtype, device=device)
        caches = k_cache, v_cache
        store_cache(k, v, *caches, indices)
    for name, cache, source in zip(("k_cache", "v_cache"), caches, (k, v), strict=True):
        _check(name, cache.cpu(), source.cpu(), params["slots"])
    return {"size_limit": params["num_slots"] + params["page_size"], "rows": len(params["slots"])}


def _rows(count: int, elements: int, dtype: torch.dtype, device: str, strided: bool, seed: int) -> torch.Tensor:
    """Random rows; strided: a slice of wider ones, as K and V are slices of a fused QKV projection."""
    generator = torch.Generator().manual_seed(seed)
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    wide = torch.randint(
        low, high, (count, 3 * elements if strided else elements), generator=generator, dtype=dtype
    ).to(device)
    return wide[:, elements : 2 * elements] if strided else wide


def _check(name: str, cache: torch.Tensor, source: torch.Tensor, slots: list[int]) -> None:
    """Each stored slot holds one of the rows meant for it, every other row is still zero."""
    for slot, row in enumerate(cache):
        meant = [source[i] for i, to in enumerate(slots) if to == slot] or [torch.zeros_like(row)]
        if not any(torch.equal(row, want) for want in meant):
            raise WrongValues(f"{name}[{slot}] is none of the {len(meant)} rows that belong there")
