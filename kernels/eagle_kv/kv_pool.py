"""The KV pool of one layer, as far as the store kernel sees it."""

from __future__ import annotations

import torch

from .store import store_cache


class KVPool:
    """K and V buffers of (num_slots + page_size, num_kv_heads, head_dim), zeroed.

    The first page is padding, as in SGLang: slot 0 takes the writes of padded tokens, and the allocator hands out
    slots from ``page_size`` on. So the highest slot is ``num_slots + page_size - 1``.
    """

    def __init__(
        self,
        num_slots: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.size_limit = num_slots + page_size
        shape = (self.size_limit, num_kv_heads, head_dim)
        self.k_buffer = torch.zeros(shape, dtype=dtype, device=device)
        self.v_buffer = torch.zeros(shape, dtype=dtype, device=device)

    def set_kv_buffer(self, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v, (rows, num_kv_heads, head_dim), at the slots ``loc``, (rows,) int32 or int64.

        A slot outside ``0 <= slot < num_slots + page_size`` fails the store kernel's assert (SGLang PR 27486).
        """
        store_cache(
            k.flatten(1),
            v.flatten(1),
            self.k_buffer.flatten(1),
            self.v_buffer.flatten(1),
            loc,
            size_limit=self.size_limit,
        )
