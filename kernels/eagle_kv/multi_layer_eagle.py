"""Multi-layer EAGLE: every draft step has a layer of its own, and the draft is a chain behind the bonus token."""

import torch
from torch import nn


def check_num_draft_tokens(num_steps: int, num_draft_tokens: int) -> None:
    """A chain of one token a step behind the bonus token has exactly one length (SGLang #27486).

    Raises AssertionError that names both numbers. It raises rather than asserts, so that `python -O` keeps it.
    """
    if num_draft_tokens != num_steps + 1:
        raise AssertionError(
            f"speculative_num_draft_tokens={num_draft_tokens} must equal speculative_num_steps + 1 = {num_steps + 1}"
        )


class MultiLayerEagleDraftWorker:
    """Drafts `num_steps` tokens a request, with one small layer a step; weights follow from `seed`.

    Source: SGLang #27486, which put the same check into both multi-layer EAGLE workers.
    """

    def __init__(
        self,
        num_steps: int,
        num_draft_tokens: int,
        *,
        vocab_size: int = 64,
        hidden_size: int = 32,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        """Raises AssertionError when `num_draft_tokens` is not `num_steps + 1`."""
        check_num_draft_tokens(num_steps, num_draft_tokens)
        self.num_draft_tokens = num_draft_tokens
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(vocab_size, hidden_size).to(device)
            self.layers = nn.ModuleList(nn.Linear(2 * hidden_size, hidden_size) for _ in range(num_steps)).to(device)
            self.head = nn.Linear(hidden_size, vocab_size, bias=False).to(device)

    @torch.no_grad()
    def draft(self, bonus_tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Draft tokens (num_seqs, num_draft_tokens) int64: the bonus token, then one token a step.

        bonus_tokens (num_seqs,) int64; hidden (num_seqs, hidden_size), the target model's last hidden states.
        """
        tokens = [bonus_tokens]
        for layer in self.layers:
            hidden = torch.tanh(layer(torch.cat([self.embedding(tokens[-1]), hidden], -1)))
            tokens.append(self.head(hidden).argmax(-1))
        return torch.cat(tokens).view(self.num_draft_tokens, len(bonus_tokens)).t().contiguous()
