"""FlashInfer: one decode wrapper a step, over slots as pages of one token. On a CPU, the reference attention."""

from typing import Any

import torch

from ..batch import DraftBatch, DraftConfig
from ..reference import paged_decode_attention
from ..sizing import draft_kv_indices_buffer_width
from .base import MultiStepDraftBackend
from .wrappers import StepWrappers

INT_WORKSPACE_BYTES = 8 << 20  # what a wrapper takes for its plan, whatever that needs


class FlashInferMultiStepDraftBackend(MultiStepDraftBackend):
    """MHA and GQA. On CUDA the dtype is float16 or bfloat16, and `head_dim` 64, 128 or 256.

    Source: SGLang #27338, `FlashInferMultiStepDraftBackend` in srt/layers/attention/flashinfer_backend.py.
    """

    def __init__(self, config: DraftConfig, req_to_token: torch.Tensor) -> None:
        super().__init__(config, req_to_token)
        self.sm_scale = config.head_dim**-0.5
        self.wrappers: list[Any] = []
        self._step_wrappers = StepWrappers(self.num_steps - 1, self._wrapper, self._graph_buffers)
        if self.device.type == "cuda":
            self.workspace = torch.zeros(config.workspace_bytes, dtype=torch.uint8, device=self.device)
            self.last_page_len = torch.ones(config.max_bs * self.topk, dtype=torch.int32, device=self.device)

    def init_cuda_graph_state(self, max_bs: int) -> None:
        width = draft_kv_indices_buffer_width(max_bs, self.topk, self.max_context_len)
        self.allocate_graph_kv_indices(max_bs, width)

    def fill(self, batch: DraftBatch, kv_indices: torch.Tensor) -> None:
        self.check_row_fits(batch, kv_indices)
        super().fill(batch, kv_indices)

    def plan(self, num_branches: int, in_graph: bool) -> None:
        if self.device.type != "cuda":
            return
        pool = self._step_wrappers
        self.wrappers = pool.in_graph(num_branches, self.cuda_graph_kv_indices) if in_graph else pool.eager()
        # One copy to the host for all steps: given host tensors, FlashInfer's plan makes none of its own.
        indptr = self.kv_indptr[:, : num_branches + 1].cpu()
        last_page_len = torch.ones(num_branches, dtype=torch.int32)
        for i, wrapper in enumerate(self.wrappers):
            wrapper.plan(
                indptr[i],
                self.step_metadata[i][1],
                last_page_len,
                self.config.num_qo_heads,
                self.config.num_kv_heads,
                self.config.head_dim,
                1,
                q_data_type=self.config.dtype,
                kv_data_type=self.config.dtype,
                sm_scale=self.sm_scale,
            )

    def forward_decode(self, step: int, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        k_buffer, v_buffer = kv
        if q.shape[0] == 0:
            return torch.empty_like(q)
        if self.device.type != "cuda":
            return paged_decode_attention(q, k_buffer, v_buffer, *self.step_metadata[step], self.sm_scale)
        return self.wrappers[step].run(q, (k_buffer.unsqueeze(1), v_buffer.unsqueeze(1)))

    def _wrapper(self, **buffers: Any) -> Any:
        import flashinfer

        # FlashInfer's CUDA-core kernel is built for few group sizes; above 4 its tensor-core kernel is faster too.
        tensor_cores = self.config.num_qo_heads // self.config.num_kv_heads >= 4
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace, "NHD", use_tensor_cores=tensor_cores, **buffers
        )
        if (nbytes := self.config.workspace_bytes) < INT_WORKSPACE_BYTES:
            plan = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            wrapper.reset_workspace_buffer(self.workspace, plan)
        return wrapper

    def _graph_buffers(self, step: int, num_branches: int) -> dict[str, torch.Tensor]:
        assert self.cuda_graph_kv_indices is not None
        return {
            "paged_kv_indptr_buffer": self.kv_indptr[step, : num_branches + 1],
            "paged_kv_indices_buffer": self.cuda_graph_kv_indices[step],
            "paged_kv_last_page_len_buffer": self.last_page_len[:num_branches],
        }
