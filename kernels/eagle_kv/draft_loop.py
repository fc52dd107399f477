"""A whole draft round in one CUDA graph, laid out in memory as in SGLang issue #26340."""

from collections.abc import Sequence

import torch

from .backends.base import MultiStepDraftBackend
from .batch import DraftBatch
from .draft_model import DraftModel, KVBuffers


def draft_slots(
    req_to_token: torch.Tensor, batch: DraftBatch, *, topk: int, num_steps: int, page_size: int
) -> torch.Tensor:
    """KV slots (num_steps, num_seqs*topk) int64 that each step's new tokens are written to."""
    seq_lens = batch.seq_lens[:, None]
    if page_size == 1 or topk == 1:
        pitch: torch.Tensor | int = num_steps
    else:
        pitch = (seq_lens % page_size + num_steps + page_size - 1) // page_size * page_size
    first = seq_lens + torch.arange(topk, device=seq_lens.device) * pitch
    positions = first[None] + torch.arange(num_steps, device=seq_lens.device)[:, None, None]
    return req_to_token[batch.req_pool_indices[:, None], positions].long().flatten(1)


def draft_forward(
    model: DraftModel,
    backend: MultiStepDraftBackend,
    kv: KVBuffers,
    draft_tokens: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Draft every branch greedily, and return its tokens, (branches, num_steps) int64.

    draft_tokens, positions (branches,) int64: each branch's first token and where it stands; slots
    (num_steps, branches). The first thing that runs is the embedding gather of `draft_tokens`, so a stray id stops
    here: an IndexError on a CPU, a device assert on CUDA. The backend's metadata must be ready.
    """
    tokens = [draft_tokens]
    for i in range(backend.num_steps - 1):
        hidden = model.embed(tokens[-1], positions + i)
        kv[0][slots[i]], kv[1][slots[i]] = model.key_value(hidden)
        attended = backend.forward_decode(i, model.query(hidden), kv)
        tokens.append(model.logits(hidden, attended).argmax(-1))
    return torch.stack(tokens, -1)


class DraftGraphRunner:
    """Replays draft rounds, one graph a batch size; on a CPU the same calls without a graph.

    The int64 `draft_tokens` are the next allocation after the backend's `kv_indices`, and the last: a row that
    overflows writes slot numbers over token ids. A replay copies its inputs before it fills `kv_indices`, as SGLang
    does, so what the fill stomps is what the graph reads.
    """

    def __init__(
        self,
        model: DraftModel,
        backend: MultiStepDraftBackend,
        kv: KVBuffers,
        max_bs: int,
        capture_bs: Sequence[int] = (),
    ) -> None:
        """`capture_bs`: batch sizes to capture now; any other is captured at its first replay."""
        self.model = model
        self.backend = backend
        self.kv = kv
        self.max_bs = max_bs
        device, branches = backend.device, max_bs * backend.topk

        self.req_pool_indices = torch.zeros(max_bs, dtype=torch.int64, device=device)
        self.seq_lens = torch.ones(max_bs, dtype=torch.int64, device=device)
        self.positions = torch.ones(branches, dtype=torch.int64, device=device)
        self.slots = torch.zeros((backend.num_steps, branches), dtype=torch.int64, device=device)
        # The fill itself reads the inputs above: behind an overflow they would make it run wild, at random.
        backend.init_cuda_graph_state(max_bs)
        self.draft_tokens = torch.zeros(branches, dtype=torch.int64, device=device)

        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        for num_seqs in capture_bs:
            self.capture(num_seqs)

    def capture(self, num_seqs: int) -> None:
        """Capture the round for `num_seqs` requests, after a warm-up on requests of one token.

        The warm-up's keys and values go to slot 0, which the pool keeps as padding. Does nothing on a CPU.
        """
        if self.backend.device.type != "cuda" or num_seqs == 0:
            return
        self.draft_tokens.zero_()
        self.req_pool_indices.zero_()
        self.seq_lens.fill_(1)
        self.positions.fill_(1)
        self.slots.zero_()
        self.backend.init_forward_metadata_replay(self._static_batch(num_seqs, num_seqs))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._forward(num_seqs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            drafted = self._forward(num_seqs)
        self._graphs[num_seqs] = (graph, drafted)

    def replay(self, batch: DraftBatch, draft_tokens: torch.Tensor) -> torch.Tensor:
        """Tokens (num_seqs, topk, num_steps) int64; `[..., 0]` are `draft_tokens`, (num_seqs*topk,), as the graph saw.

        Raises ValueError when the batch exceeds `max_bs`, and what the backend's guards raise.
        """
        num_seqs, backend = batch.num_seqs, self.backend
        if num_seqs > self.max_bs:
            raise ValueError(f"batch of {num_seqs} requests: the graph runner is for at most {self.max_bs}")
        on_cuda = backend.device.type == "cuda" and num_seqs > 0
        if on_cuda and num_seqs not in self._graphs:
            self.capture(num_seqs)

        bs = num_seqs * backend.topk
        slots = draft_slots(
            backend.req_to_token, batch, topk=backend.topk, num_steps=backend.num_steps, page_size=backend.page_size
        )
        self.req_pool_indices[:num_seqs].copy_(batch.req_pool_indices)
        self.seq_lens[:num_seqs].copy_(batch.seq_lens)
        self.positions[:bs].copy_(batch.positions)
        self.slots[:, :bs].copy_(slots)
        self.draft_tokens[:bs].copy_(draft_tokens)
        backend.init_forward_metadata_replay(self._static_batch(num_seqs, batch.seq_lens_sum))
        if on_cuda:
            graph, drafted = self._graphs[num_seqs]
            graph.replay()
        else:
            drafted = self._forward(num_seqs)
        return drafted.clone().view(num_seqs, backend.topk, backend.num_steps)

    def _static_batch(self, num_seqs: int, seq_lens_sum: int) -> DraftBatch:
        bs = num_seqs * self.backend.topk
        return DraftBatch(self.req_pool_indices[:num_seqs], self.seq_lens[:num_seqs], self.positions[:bs], seq_lens_sum)

    def _forward(self, num_seqs: int) -> torch.Tensor:
        bs = num_seqs * self.backend.topk
        return draft_forward(
            self.model, self.backend, self.kv, self.draft_tokens[:bs], self.positions[:bs], self.slots[:, :bs]
        )
