"""What a draft backend is built for, and what it is given each round."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DraftConfig:
    """Fixed facts of one draft worker. Lengths are in tokens.

    `max_bs` is the request pool's size, the most requests that a batch may hold. MLA reads `num_qo_heads`,
    `head_dim` (a head's size before absorption), `head_dim_ckv` and `head_dim_kpe`. `workspace_bytes` are FlashInfer's
    on CUDA, for parts of results: 128 MiB is what it recommends, and it refuses a plan for which they are too few.
    """

    topk: int
    num_steps: int
    max_bs: int
    max_context_len: int
    page_size: int = 1
    num_qo_heads: int = 2
    num_kv_heads: int = 2
    head_dim: int = 64
    head_dim_ckv: int = 512
    head_dim_kpe: int = 64
    workspace_bytes: int = 128 << 20
    dtype: torch.dtype = torch.float16
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in (
            "topk",
            "num_steps",
            "max_bs",
            "max_context_len",
            "page_size",
            "num_qo_heads",
            "num_kv_heads",
            "workspace_bytes",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"DraftConfig.{name} must be at least 1, got {getattr(self, name)}")
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(
                f"DraftConfig.num_qo_heads={self.num_qo_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )

    @property
    def pool_len(self) -> int:
        """Length of a `req_to_token` row: a full context, and every branch's draft pages behind it."""
        pages = -(-(self.page_size - 1 + self.num_steps) // self.page_size)
        return self.max_context_len + self.topk * pages * self.page_size

    @property
    def num_slots(self) -> int:
        """Rows of a KV buffer that `make_req_to_token` fills. The first page is padding: slot 0 takes stray writes."""
        return (self.max_bs * -(-self.pool_len // self.page_size) + 1) * self.page_size


@dataclass(frozen=True)
class DraftBatch:
    """One round's requests. `seq_lens_sum` is a host integer, so that sizing needs no synchronisation.

    req_pool_indices, seq_lens (num_seqs,) int64; positions (num_seqs*topk,) int64, seq_lens repeated topk times.
    """

    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    positions: torch.Tensor
    seq_lens_sum: int

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]

    @classmethod
    def of(
        cls,
        seq_lens: Sequence[int],
        topk: int,
        *,
        req_pool_indices: Sequence[int] | None = None,
        device: str = "cpu",
    ) -> "DraftBatch":
        """A batch of requests with these prefix lengths; by default request b sits in pool row b."""
        rows = range(len(seq_lens)) if req_pool_indices is None else req_pool_indices
        lens = torch.tensor(list(seq_lens), dtype=torch.int64)
        pool = torch.tensor(list(rows), dtype=torch.int64)
        if len(lens) != len(pool):
            raise ValueError(f"{len(lens)} seq_lens but {len(pool)} req_pool_indices: there must be one each a request")
        positions = lens.repeat_interleave(topk)
        return cls(pool.to(device), lens.to(device), positions.to(device), int(lens.sum()))


def make_req_to_token(config: DraftConfig, seed: int | None = None) -> torch.Tensor:
    """A (max_bs, pool_len) int32 table in which no two positions share a slot and page 0 is left as padding.

    Slots run in whole pages; with `seed` the pages are shuffled, as in a pool that has been used for a while.
    """
    pages_per_row = -(-config.pool_len // config.page_size)
    num_pages = config.max_bs * pages_per_row
    if seed is None:
        pages = torch.arange(num_pages)
    else:
        pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))
    slots = (pages[:, None] + 1) * config.page_size + torch.arange(config.page_size)
    table = slots.view(config.max_bs, -1)[:, : config.pool_len]
    return table.to(config.device, torch.int32).contiguous()
