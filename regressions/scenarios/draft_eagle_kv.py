"""The leg's side of the draft scenario. Imported in the leg's process only, from the overlay that it runs in."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from eagle_kv import reference
from eagle_kv.backends import BACKENDS
from eagle_kv.batch import DraftBatch, DraftConfig, make_req_to_token

from harness import memory
from regressions.scenarios import draft_memory
from regressions.scenarios.compare import close, same

FEW = 1 << 20  # elements of K that a reference gathers: so few are a matter of milliseconds on a CPU
SHUFFLE_LIMIT = 1 << 24  # table entries: a larger table keeps its slots in order, a shuffle would take seconds


def run(params: dict[str, Any], device: str) -> dict[str, Any]:
    draft_memory.expect(params)
    config = DraftConfig(
        topk=params["topk"],
        num_steps=params["num_steps"],
        page_size=params["page_size"],
        max_bs=params["max_bs"],
        max_context_len=params["max_context_len"],
        num_qo_heads=16 if params["backend"] == "flashinfer_mla" else 4,
        num_kv_heads=1 if params["backend"] == "flashinfer_mla" else 2,
        dtype=torch.float16 if device == "cuda" else torch.float32,
        device=device,
        **draft_memory.config(params),
    )
    # Only positions that the batch reaches need slots: a context of 150 million tokens would fill a table of gigabytes.
    table = dataclasses.replace(config, max_context_len=max([1, *params["seq_lens"]]))
    shuffled = table.max_bs * table.pool_len <= SHUFFLE_LIMIT
    req_to_token = make_req_to_token(table, seed=7 if shuffled else None)
    # requests sit in pool rows from the last one down, so that an index by batch position would show
    rows = list(range(config.max_bs))[::-1][: len(params["seq_lens"])]
    batch = DraftBatch.of(params["seq_lens"], config.topk, req_pool_indices=rows, device=device)
    backend = BACKENDS[params["backend"]](config, req_to_token)
    attention = _Attention(params["backend"], config, table.num_slots, batch.num_seqs * config.topk)

    if params["path"] == "eager":
        backend.init_forward_metadata(batch)
        indices = _checked_indices(backend, batch, req_to_token, config)
        outputs = attention.run(backend)
    else:
        backend.init_cuda_graph_state(config.max_bs)
        replay = _capture(backend, attention, batch, rows, device)
        backend.init_forward_metadata_replay(batch)
        indices = _checked_indices(backend, batch, req_to_token, config)
        outputs = replay()
    attention.check(outputs, indices, batch)
    assert backend.kv_indices is not None
    return {"row": backend.kv_indices.shape[1], "rows": config.num_steps, "attended_steps": len(outputs)}


def _capture(backend: Any, attention: _Attention, batch: DraftBatch, rows: list[int], device: str) -> Any:
    """A function that replays attention of all steps: from a CUDA graph on a GPU, a plain call on a CPU."""
    if device != "cuda" or not attention.steps:
        return lambda: attention.run(backend)
    # captured with empty prefixes: a graph whose lengths were baked in would show as wrong values
    backend.init_forward_metadata_replay(
        DraftBatch.of([0] * batch.num_seqs, backend.topk, req_pool_indices=rows, device=device)
    )
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        attention.run(backend)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):  # `torch.cuda.graph` would give all cached memory back to the driver, for each leg
        graph.capture_begin()
        outputs = attention.run(backend)
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)

    def replay() -> list[torch.Tensor]:
        graph.replay()
        return outputs

    return replay


@memory.unwatched()
def _checked_indices(
    backend: Any, batch: DraftBatch, req_to_token: torch.Tensor, config: DraftConfig
) -> list[torch.Tensor]:
    """What all rows of both outputs hold, the last step's too, which no attention reads."""
    indptr = reference.kv_indptr(batch.seq_lens, topk=config.topk, num_steps=config.num_steps)
    for i in range(config.num_steps):
        same(f"kv_indptr[{i}]", backend.kv_indptr[i, : indptr.shape[1]], indptr[i])
    indices = reference.kv_indices(
        batch.req_pool_indices, req_to_token, batch.seq_lens,
        topk=config.topk, num_steps=config.num_steps, page_size=config.page_size,
    )  # fmt: skip
    for i, want in enumerate(indices):
        same(f"kv_indices[{i}]", backend.kv_indices[i, : len(want)], want)
    return indices


class _Attention:
    """Random queries and a random KV cache for every attended step of one batch."""

    def __init__(self, backend: str, config: DraftConfig, num_slots: int, num_branches: int):
        self.mla = backend == "flashinfer_mla"
        # aiter's attention needs ROCm: its sizing and metadata are what is tried here
        self.steps = 0 if backend == "aiter" or not num_branches else config.num_steps - 1
        self.config = config
        self.q: list[Any] = []
        self.kv: Any = ()
        if not self.steps:
            return
        generator = torch.Generator(config.device).manual_seed(11)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=config.dtype, device=config.device)

        heads = config.num_qo_heads
        if self.mla:
            self.kv = (draw(num_slots, config.head_dim_ckv), draw(num_slots, config.head_dim_kpe))
            self.q = [
                (draw(num_branches, heads, config.head_dim_ckv), draw(num_branches, heads, config.head_dim_kpe))
                for _ in range(self.steps)
            ]
        else:
            shape = (num_slots, config.num_kv_heads, config.head_dim)
            self.kv = (draw(*shape), draw(*shape))
            self.q = [draw(num_branches, heads, config.head_dim) for _ in range(self.steps)]

    def run(self, backend: Any) -> list[torch.Tensor]:
        return [backend.forward_decode(step, self.q[step], self.kv) for step in range(self.steps)]

    @memory.unwatched()
    def check(self, outputs: list[torch.Tensor], indices: list[torch.Tensor], batch: DraftBatch) -> None:
        indptr = reference.kv_indptr(batch.seq_lens, topk=self.config.topk, num_steps=self.config.num_steps)
        device = self._where_cheap(indices)
        kv = [each.to(device) for each in self.kv]
        for step, got in enumerate(outputs):
            where, got = (indptr[step], indices[step].to(device)), got.to(device)
            if self.mla:
                scale = (self.config.head_dim + self.config.head_dim_kpe) ** -0.5
                q_nope, q_pe = (each.to(device) for each in self.q[step])
                want = reference.paged_decode_mla(q_nope, q_pe, kv[0], kv[1], *where, scale)
            else:
                scale = self.config.head_dim**-0.5
                want = reference.paged_decode_attention(self.q[step].to(device), kv[0], kv[1], *where, scale)
            close(f"attention of step {step}", got, want, self.config.dtype)

    def _where_cheap(self, indices: list[torch.Tensor]) -> str:
        """Where to compute the reference: of little on a CPU, since its first makes a GPU load cuBLAS, with 32 MiB."""
        most = max((len(listed) * self.kv[0][0].numel() for listed in indices[: self.steps]), default=0)
        return "cpu" if most <= FEW else self.config.device
