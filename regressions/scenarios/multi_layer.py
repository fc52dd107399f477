"""Multi-layer EAGLE: a draft worker is made and drafts one round."""

from __future__ import annotations

from typing import Any

from harness.case import Case
from harness.errors import UsageError
from harness.leg import WrongValues

OPTIONS = ("num_steps", "num_draft_tokens", "num_seqs")


def case(fix: str, *, num_steps: int = 3, num_draft_tokens: int = 8, num_seqs: int = 2) -> Case:
    """The case of one configuration."""
    for name, value in {"num_steps": num_steps, "num_draft_tokens": num_draft_tokens, "num_seqs": num_seqs}.items():
        if value < 1:
            raise UsageError(f"{name} {value}: must be at least 1")
    fits = num_draft_tokens == num_steps + 1
    return Case(
        id=f"multi_layer-steps{num_steps}-draft{num_draft_tokens}-seqs{num_seqs}",
        entry=f"{__name__}:run",
        params={"num_steps": num_steps, "num_draft_tokens": num_draft_tokens, "num_seqs": num_seqs},
        backend="multi_layer",
        on="clean" if fits else "guarded",
        reason={} if fits else {frozenset(): rf"={num_draft_tokens} .* = {num_steps + 1}\b"},
        tells=not fits,
        why=f"{num_draft_tokens} draft tokens are num_steps + 1, and a guard must let that through",
    )


def run(params: dict[str, Any], device: str) -> dict[str, Any]:
    import torch
    from eagle_kv.multi_layer_eagle import MultiLayerEagleDraftWorker

    worker = MultiLayerEagleDraftWorker(params["num_steps"], params["num_draft_tokens"], hidden_size=32, device=device)
    generator = torch.Generator().manual_seed(3)
    bonus = torch.randint(64, (params["num_seqs"],), generator=generator).to(device)
    hidden = torch.randn(params["num_seqs"], 32, generator=generator).to(device)
    drafted = worker.draft(bonus, hidden)
    for seq in range(params["num_seqs"]):  # one request alone must draft what it drafts in a batch
        alone = worker.draft(bonus[seq : seq + 1], hidden[seq : seq + 1])
        if not torch.equal(drafted[seq], alone[0]):
            raise WrongValues(f"request {seq} drafts {drafted[seq].tolist()} in a batch, {alone[0].tolist()} alone")
    return {"shape": str(list(drafted.shape))}
