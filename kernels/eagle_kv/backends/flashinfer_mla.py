"""FlashInfer MLA: one latent-attention wrapper a step. On a CPU, the reference attention."""

from typing import Any

import torch

from ..batch import DraftBatch, DraftConfig
from ..reference import paged_decode_mla
from ..sizing import draft_kv_indices_buffer_width
from .base import MultiStepDraftBackend
from .wrappers import StepWrappers


class FlashInferMLAMultiStepDraftBackend(MultiStepDraftBackend):
    """Absorbed MLA. Upstream's constructor refuses topk > 1; this one takes it, so that its sizing can be tried.

    `mla_backend` is FlashInfer's own choice of kernel: "auto", "fa2" or "fa3". On CUDA the dtype is float16 or
    bfloat16. Source: SGLang #27460, `FlashInferMLAMultiStepDraftBackend` in srt/layers/attention.
    """

    def __init__(self, config: DraftConfig, req_to_token: torch.Tensor, mla_backend: str = "auto") -> None:
        super().__init__(config, req_to_token)
        self.mla_backend = mla_backend
        self.sm_scale = (config.head_dim + config.head_dim_kpe) ** -0.5
        self.wrappers: list[Any] = []
        self._step_wrappers = StepWrappers(self.num_steps - 1, self._wrapper, self._graph_buffers)
        if self.device.type == "cuda":
            self.workspace = torch.zeros(config.workspace_bytes, dtype=torch.uint8, device=self.device)

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
        qo_indptr = torch.arange(num_branches + 1, dtype=torch.int32)
        for i, wrapper in enumerate(self.wrappers):
            wrapper.plan(
                qo_indptr,
                indptr[i],
                self.step_metadata[i][1],
                indptr[i].diff(),
                self.config.num_qo_heads,
                self.config.head_dim_ckv,
                self.config.head_dim_kpe,
                1,
                False,
                self.sm_scale,
                self.config.dtype,
                self.config.dtype,
            )

    def forward_decode(
        self, step: int, q: tuple[torch.Tensor, torch.Tensor], kv: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """q_nope (num_seqs*topk, heads, head_dim_ckv), q_pe (…, head_dim_kpe); ckv (slots, head_dim_ckv), kpe."""
        (q_nope, q_pe), (ckv, kpe) = q, kv
        if q_nope.shape[0] == 0:
            return torch.empty_like(q_nope)
        if self.device.type != "cuda":
            return paged_decode_mla(q_nope, q_pe, ckv, kpe, *self.step_metadata[step], self.sm_scale)
        return self.wrappers[step].run(q_nope, q_pe, ckv.unsqueeze(1), kpe.unsqueeze(1))

    def _wrapper(self, **buffers: Any) -> Any:
        import flashinfer.mla

        return flashinfer.mla.BatchMLAPagedAttentionWrapper(self.workspace, backend=self.mla_backend, **buffers)

    def _graph_buffers(self, step: int, num_branches: int) -> dict[str, torch.Tensor]:
        assert self.cuda_graph_kv_indices is not None
        return {
            "qo_indptr": torch.empty(num_branches + 1, dtype=torch.int32, device=self.device),
            "kv_indptr": self.kv_indptr[step, : num_branches + 1],
            "kv_indices": self.cuda_graph_kv_indices[step],
            "kv_len_arr": torch.empty(num_branches, dtype=torch.int32, device=self.device),
        }
