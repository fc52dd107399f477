"""The leg's side of the store scenario on SGLang's own JIT kernel. Needs a CUDA device and its compiler.

``path`` "store_cache" calls SGLang's function with its default ``size_limit`` (cache rows); "pool" stores through a
real ``MHATokenToKVPool``, which passes a limit of its own. Later releases write nothing to slot 0, the padding slot,
unless told otherwise: the direct call tells them, and what the pool leaves out is accepted at slot 0 alone.
"""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import torch

from harness.leg import WrongValues
from regressions.scenarios import sglang_world as world
from regressions.scenarios.compare import random_rows, stored
from regressions.scenarios.store import JOINT

KERNELS = ("sglang.kernels.ops.kvcache.kvcache", "sglang.jit_kernel.kvcache")  # newest place first
NONE = -(1 << 48)  # no case's slot; the documented -1 would skip slot -1, since the kernel compares and does no more
PRELOAD = ("sglang.srt.mem_cache.memory_pool",)


def run(params: dict[str, Any], device: str) -> dict[str, Any]:
    if device != "cuda":
        raise ValueError("SGLang's store kernel is CUDA only: run this case with --device cuda")
    # int16 where a row is no whole number of int32, so that the row itself can be made and the store must refuse it
    dtype = torch.int32 if params["row_bytes"] % 4 == 0 else torch.int16
    elements = params["row_bytes"] // dtype.itemsize
    index_dtype = torch.int64 if params["index_bytes"] == 8 else torch.int32
    indices = torch.tensor(params["slots"], dtype=index_dtype, device=device)
    k, v = (random_rows(len(params["slots"]), elements, dtype, device, params["strided"], seed) for seed in (1, 2))
    num_slots, page_size = params["num_slots"], params["page_size"]
    skipped: tuple[int, ...] = ()
    if params["path"] == "pool":
        caches, skipped = _through_pool(indices, k, v, num_slots, page_size)
    else:
        rows = num_slots + page_size
        k_cache = torch.zeros((rows, elements), dtype=dtype, device=device)
        v_cache = torch.zeros((rows, elements), dtype=dtype, device=device)
        caches = k_cache, v_cache
        kernels = _kernel_module()
        # as SGLang's pool asks first; the call below then finds the kernel built and loaded
        if not kernels.can_use_store_cache(params["row_bytes"]):
            raise ValueError(f"SGLang's can_use_store_cache refuses rows of {params['row_bytes']} bytes")
        kernels.store_cache(k, v, *caches, indices, **({"reserved_skip_index": NONE} if _can_skip() else {}))
    torch.cuda.synchronize()  # an assert of the device speaks here, and not in what is called next
    facts = {"size_limit": num_slots + page_size, "rows": len(params["slots"])}
    if caches[0].untyped_storage().data_ptr() == caches[1].untyped_storage().data_ptr():
        facts["layout"] = JOINT
    try:
        for name, cache, source in zip(("k_cache", "v_cache"), caches, (k, v), strict=True):
            stored(name, cache.cpu(), source.cpu(), params["slots"], skipped)
    except WrongValues as error:
        error.facts = facts
        raise
    return facts


def _kernel_module() -> Any:
    return importlib.import_module(next(name for name in KERNELS if world.has_module(name)))


def _can_skip() -> bool:
    return "reserved_skip_index" in inspect.getsource(_kernel_module())


def _through_pool(
    indices: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_slots: int, page_size: int
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[int, ...]]:
    """Store through a pool of one layer and one head. Returns its caches, (rows, row_elems), and slots it may skip."""
    world.publish({"device": "cuda", "page_size": page_size})
    pools = importlib.import_module("sglang.srt.mem_cache.memory_pool")
    layer = SimpleNamespace(layer_id=0, k_scale=None, v_scale=None)
    pool = pools.MHATokenToKVPool(
        size=num_slots, page_size=page_size, dtype=k.dtype, head_num=1, head_dim=k.shape[1], layer_num=1,
        device="cuda", enable_memory_saver=False,
    )  # fmt: skip
    k, v = k.unflatten(1, (1, -1)), v.unflatten(1, (1, -1))
    where: Any = indices
    if hasattr(pools, "KVWriteLoc"):
        where = pools.KVWriteLoc(indices)
    pool.set_kv_buffer(layer, where, k, v)
    buffers = pool.get_kv_buffer(0)
    return (buffers[0].flatten(1), buffers[1].flatten(1)), (0,) if _can_skip() else ()
