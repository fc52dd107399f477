"""Triton: int64 indices and an attention kernel of our own, which needs no plan."""

import torch

from ..attention_kernel import paged_decode_attention
from ..batch import DraftBatch, DraftConfig
from ..sizing import draft_kv_indices_buffer_width
from .base import MultiStepDraftBackend


class TritonMultiStepDraftBackend(MultiStepDraftBackend):
    """MHA and GQA, on CUDA and in Triton's interpreter.

    Source: `TritonMultiStepDraftBackend` in SGLang's srt/layers/attention/triton_backend.py. It had the topk factor
    all along and has no capacity check to this day (0.5.23): the check here is ours.
    """

    index_dtype = torch.int64

    def __init__(self, config: DraftConfig, req_to_token: torch.Tensor) -> None:
        super().__init__(config, req_to_token)
        self.sm_scale = config.head_dim**-0.5

    def init_cuda_graph_state(self, max_bs: int) -> None:
        width = draft_kv_indices_buffer_width(max_bs, self.topk, self.max_context_len)
        self.allocate_graph_kv_indices(max_bs, width)

    def fill(self, batch: DraftBatch, kv_indices: torch.Tensor) -> None:
        self.check_row_fits(batch, kv_indices)
        super().fill(batch, kv_indices)

    def forward_decode(self, step: int, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return paged_decode_attention(q, *kv, *self.step_metadata[step], self.sm_scale)
