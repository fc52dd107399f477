"""The leg's side of the multi-layer scenario."""

from __future__ import annotations

from typing import Any

import torch
from eagle_kv.multi_layer_eagle import MultiLayerEagleDraftWorker

from harness.leg import WrongValues


def run(params: dict[str, Any], device: str) -> dict[str, Any]:
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
