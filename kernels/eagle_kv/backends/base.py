"""The flow that all multi-step draft backends share: size, fill, hand every step its part."""

from typing import Any

import torch

from ..batch import DraftBatch, DraftConfig
from ..kernel import fill_draft_kv_indices
from ..sizing import check_row_fits, draft_kv_indices_buffer_width, draft_kv_indices_used_len


class MultiStepDraftBackend:
    """Attention metadata for all steps of a draft round, for one attention library.

    After `init_forward_metadata` or `init_forward_metadata_replay`, `kv_indices` is the buffer that was filled,
    (num_steps, width), and `step_metadata[i]` is `(kv_indptr, kv_indices)` of step i, i = 0 … num_steps - 2: the
    last step's tokens are drafted and never attended from, so one step has no attention at all.

    `kv_indptr` (num_steps, max_bs*topk + 1) int32 is shared by eager runs and replays; `cuda_graph_kv_indices` is
    None until `init_cuda_graph_state`.
    """

    index_dtype = torch.int32

    def __init__(self, config: DraftConfig, req_to_token: torch.Tensor) -> None:
        """`req_to_token` (pool, pool_len) int32, on `config.device`; it is read at each round, not copied."""
        self.config = config
        self.req_to_token = req_to_token
        self.topk = config.topk
        self.num_steps = config.num_steps
        self.page_size = config.page_size
        self.max_context_len = config.max_context_len
        self.device = torch.device(config.device)
        self.kv_indptr = torch.zeros(
            (self.num_steps, config.max_bs * self.topk + 1), dtype=torch.int32, device=self.device
        )
        self.kv_indices: torch.Tensor | None = None
        self.cuda_graph_kv_indices: torch.Tensor | None = None
        self.cuda_graph_max_bs = 0
        self.step_metadata: list[tuple[torch.Tensor, torch.Tensor]] = []

    def init_forward_metadata(self, batch: DraftBatch) -> None:
        """Prepare an eager round in a fresh buffer sized for this batch. Raises AssertionError if it cannot fit."""
        width = draft_kv_indices_buffer_width(batch.num_seqs, self.topk, self.max_context_len)
        kv_indices = torch.empty((self.num_steps, width), dtype=self.index_dtype, device=self.device)
        self._prepare(batch, kv_indices, in_graph=False)

    def init_cuda_graph_state(self, max_bs: int) -> None:
        """Allocate the buffer that all graphs share, for up to `max_bs` requests. Allocates nothing else."""
        raise NotImplementedError

    def init_forward_metadata_replay(self, batch: DraftBatch) -> None:
        """Prepare a round in the graphs' buffer, outside the graph: before a capture and before every replay."""
        if self.cuda_graph_kv_indices is None:
            raise RuntimeError("init_forward_metadata_replay before init_cuda_graph_state: there is no graph buffer")
        if batch.num_seqs > self.cuda_graph_max_bs:
            raise ValueError(f"batch of {batch.num_seqs} requests: the graph state is for {self.cuda_graph_max_bs}")
        self._prepare(batch, self.cuda_graph_kv_indices, in_graph=True)

    def forward_decode(self, step: int, q: Any, kv: Any) -> torch.Tensor:
        """Attention of step `step` (0 … num_steps - 2), one query token a branch.

        MHA and GQA: q (num_seqs*topk, num_qo_heads, head_dim), kv the pair (k_buffer, v_buffer), each (slots,
        num_kv_heads, head_dim); the result has q's shape. MLA: q the pair (q_nope, q_pe), kv the pair (ckv, kpe).
        """
        raise NotImplementedError

    def allocate_graph_kv_indices(self, max_bs: int, width: int) -> None:
        self.cuda_graph_kv_indices = torch.zeros((self.num_steps, width), dtype=self.index_dtype, device=self.device)
        self.cuda_graph_max_bs = max_bs

    def check_row_fits(self, batch: DraftBatch, kv_indices: torch.Tensor) -> None:
        """AssertionError if the last step of this batch needs more than a row of `kv_indices` holds."""
        bs = batch.num_seqs * self.topk
        check_row_fits(
            draft_kv_indices_used_len(batch.seq_lens_sum, self.topk, bs, self.num_steps),
            kv_indices.shape[1],
            topk=self.topk,
            num_seqs=batch.num_seqs,
            seq_lens_sum=batch.seq_lens_sum,
            num_steps=self.num_steps,
        )

    def fill(self, batch: DraftBatch, kv_indices: torch.Tensor) -> None:
        """Write all rows. Backends check the row first: the kernel itself writes as far as the batch takes it."""
        fill_draft_kv_indices(
            batch.req_pool_indices,
            self.req_to_token,
            batch.seq_lens,
            kv_indices,
            self.kv_indptr,
            topk=self.topk,
            page_size=self.page_size,
        )

    def plan(self, num_branches: int, in_graph: bool) -> None:
        """What an attention library wants to know before its first step. Called with `step_metadata` set."""

    def _prepare(self, batch: DraftBatch, kv_indices: torch.Tensor, in_graph: bool) -> None:
        if batch.num_seqs > self.config.max_bs:
            raise ValueError(f"batch of {batch.num_seqs} requests: the request pool holds {self.config.max_bs}")
        bs = batch.num_seqs * self.topk
        self.fill(batch, kv_indices)
        self.kv_indices = kv_indices
        self.step_metadata = [
            (
                self.kv_indptr[i, : bs + 1],
                kv_indices[i][: draft_kv_indices_used_len(batch.seq_lens_sum, self.topk, bs, i + 1)],
            )
            for i in range(self.num_steps - 1)
        ]
        if bs:
            self.plan(bs, in_graph)
