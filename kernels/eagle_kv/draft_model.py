"""A small draft model with one paged-attention layer, and what it must compute without any paging."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from .batch import DraftConfig

KVBuffers = tuple[torch.Tensor, torch.Tensor]


def _linear(size_in: int, size_out: int, gain: float, generator: torch.Generator) -> nn.Linear:
    layer = nn.Linear(size_in, size_out, bias=False)
    layer.weight.data = torch.randn(size_out, size_in, generator=generator) * gain * size_in**-0.5
    return layer


class DraftModel(nn.Module):
    """Embedding, one attention layer, head. Weights follow from `seed` and do not depend on the device."""

    def __init__(self, config: DraftConfig, *, vocab_size: int = 128, hidden_size: int = 64, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        qo_size, kv_size = config.num_qo_heads * config.head_dim, config.num_kv_heads * config.head_dim
        generator = torch.Generator().manual_seed(seed)
        self.embedding = nn.Parameter(torch.randn(vocab_size, hidden_size, generator=generator))
        # Sharp queries and a loud output, so that wrong slots show in the tokens and not only in the last digits.
        self.q_proj = _linear(hidden_size, qo_size, 2.0, generator)
        self.k_proj = _linear(hidden_size, kv_size, 1.0, generator)
        self.v_proj = _linear(hidden_size, kv_size, 1.0, generator)
        self.o_proj = _linear(qo_size, hidden_size, 3.0, generator)
        self.head = _linear(hidden_size, vocab_size, 1.0, generator)
        frequencies = torch.exp(torch.arange(0, hidden_size, 2) * (-4.0 / hidden_size))
        self.register_buffer("frequencies", frequencies)
        self.requires_grad_(False).to(config.device, config.dtype)

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states (n, hidden_size) of tokens (n,) at positions (n,). The gather is what a stray id hits."""
        hidden = F.embedding(tokens, self.embedding)
        angles = positions[:, None].float() * self.get_buffer("frequencies").float()
        return hidden + torch.cat([angles.sin(), angles.cos()], -1).to(hidden.dtype)

    def query(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.q_proj(hidden).view(-1, self.config.num_qo_heads, self.config.head_dim)

    def key_value(self, hidden: torch.Tensor) -> KVBuffers:
        shape = (-1, self.config.num_kv_heads, self.config.head_dim)
        return self.k_proj(hidden).view(shape), self.v_proj(hidden).view(shape)

    def logits(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Logits (n, vocab_size) from hidden states and the attention's result (n, num_qo_heads, head_dim)."""
        return self.head(torch.tanh(hidden + self.o_proj(attended.flatten(1))))


def make_kv_buffers(config: DraftConfig) -> KVBuffers:
    """Zeroed k_buffer and v_buffer, each (config.num_slots, num_kv_heads, head_dim)."""
    shape = (config.num_slots, config.num_kv_heads, config.head_dim)
    return (
        torch.zeros(shape, dtype=config.dtype, device=config.device),
        torch.zeros(shape, dtype=config.dtype, device=config.device),
    )


def prefill(
    model: DraftModel,
    kv: KVBuffers,
    req_to_token: torch.Tensor,
    req_pool_indices: Sequence[int] | torch.Tensor,
    prompts: Sequence[torch.Tensor],
) -> None:
    """Write the keys and values of every request's prompt, (seq_len,) int64 each, to that request's slots."""
    for pool, prompt in zip(torch.as_tensor(req_pool_indices).tolist(), prompts, strict=True):
        slots = req_to_token[pool, : len(prompt)].long()
        k, v = model.key_value(model.embed(prompt, torch.arange(len(prompt), device=prompt.device)))
        kv[0][slots], kv[1][slots] = k, v


def reference_logits(model: DraftModel, prompts: Sequence[torch.Tensor], drafted: torch.Tensor) -> torch.Tensor:
    """Logits (num_seqs, topk, num_steps - 1, vocab_size) float32 that should have chosen `drafted[..., 1:]`.

    Teacher-forced: each branch is read as one plain sequence, prompt and drafted tokens, with dense attention in
    float32 and no slots. drafted (num_seqs, topk, num_steps) int64, all in the vocabulary.
    """
    cfg = model.config
    num_seqs, topk, num_steps = drafted.shape
    out = torch.zeros((num_seqs, topk, num_steps - 1, model.vocab_size), device=drafted.device)
    group = cfg.num_qo_heads // cfg.num_kv_heads
    for b, prompt in enumerate(prompts):
        for t in range(topk) if num_steps > 1 else ():
            tokens = torch.cat([prompt, drafted[b, t, :-1]])
            hidden = model.embed(tokens, torch.arange(len(tokens), device=tokens.device))
            k, v = (x.float().repeat_interleave(group, 1) for x in model.key_value(hidden))
            q = model.query(hidden[len(prompt) :]).float()
            scores = torch.einsum("ihd,jhd->hij", q, k) * cfg.head_dim**-0.5
            causal = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril(len(prompt))
            weights = scores.masked_fill(~causal, float("-inf")).softmax(-1)
            attended = torch.einsum("hij,jhd->ihd", weights, v).to(cfg.dtype)
            out[b, t] = model.logits(hidden[len(prompt) :], attended).float()
    return out


def check_drafted(
    model: DraftModel,
    prompts: Sequence[torch.Tensor],
    draft_tokens: torch.Tensor,
    drafted: torch.Tensor,
    tolerance: float = 0.05,
) -> None:
    """AssertionError unless `drafted` starts with `draft_tokens` and follows from the model, within `tolerance`.

    `tolerance` is how far below the best reference logit a chosen token may lie: rounding in float16 breaks ties.
    """
    stray = ((drafted < 0) | (drafted >= model.vocab_size)).nonzero()
    if len(stray):
        at = tuple(stray[0].tolist())
        raise AssertionError(
            f"drafted token {int(drafted[at])} at (seq, branch, step) {at} is not in the vocabulary of "
            f"{model.vocab_size}; {len(stray)} are not"
        )
    changed = (drafted[..., 0].flatten() != draft_tokens).nonzero()
    if len(changed):
        branch = int(changed[0])
        raise AssertionError(
            f"draft token of branch {branch} changed from {int(draft_tokens[branch])} to "
            f"{int(drafted[..., 0].flatten()[branch])}; {len(changed)} changed"
        )
    logits = reference_logits(model, prompts, drafted)
    chosen = logits.gather(-1, drafted[..., 1:, None]).squeeze(-1)
    gap = logits.amax(-1) - chosen
    wrong = (gap > tolerance).nonzero()
    if len(wrong):
        b, t, i = wrong[0].tolist()
        raise AssertionError(
            f"drafted token {int(drafted[b, t, i + 1])} at (seq, branch, step) {(b, t, i + 1)} lies "
            f"{float(gap[b, t, i]):.3f} below the best logit, tolerance {tolerance}; {len(wrong)} of {gap.numel()} do"
        )
