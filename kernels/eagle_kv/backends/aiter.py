"""aiter: the same sizing and the same metadata. Its attention runs on ROCm only."""

import torch

from ..batch import DraftBatch
from ..sizing import draft_kv_indices_buffer_width
from .base import MultiStepDraftBackend


class AiterMultiStepDraftBackend(MultiStepDraftBackend):
    """Sizing and indices as in SGLang's `AiterMultiStepDraftBackend` (srt/layers/attention/aiter_backend.py).

    It has the topk factor upstream, and no capacity check: the check here is ours.
    """

    def init_cuda_graph_state(self, max_bs: int) -> None:
        width = draft_kv_indices_buffer_width(max_bs, self.topk, self.max_context_len)
        self.allocate_graph_kv_indices(max_bs, width)

    def fill(self, batch: DraftBatch, kv_indices: torch.Tensor) -> None:
        self.check_row_fits(batch, kv_indices)
        super().fill(batch, kv_indices)

    def forward_decode(self, step: int, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        raise NotImplementedError("aiter's attention needs ROCm; here this backend sizes and fills kv_indices only")
