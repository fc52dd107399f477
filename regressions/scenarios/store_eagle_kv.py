"""The leg's side of the store scenario."""

from __future__ import annotations

from typing import Any

import torch
from eagle_kv.kv_pool import KVPool
from eagle_kv.store import store_cache

from regressions.scenarios.compare import random_rows, stored


def run(params: dict[str, Any], device: str) -> dict[str, Any]:
    # int16 where a row is no whole number of int32, so that the row itself can be made and the store must refuse it
    dtype = torch.int32 if params["row_bytes"] % 4 == 0 else torch.int16
    elements = params["row_bytes"] // dtype.itemsize
    index_dtype = torch.int64 if params["index_bytes"] == 8 else torch.int32
    indices = torch.tensor(params["slots"], dtype=index_dtype, device=device)
    k, v = (random_rows(len(params["slots"]), elements, dtype, device, params["strided"], seed) for seed in (1, 2))

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
        stored(name, cache.cpu(), source.cpu(), params["slots"])
    return {"size_limit": params["num_slots"] + params["page_size"], "rows": len(params["slots"])}
