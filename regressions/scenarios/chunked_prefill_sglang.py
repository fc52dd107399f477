"""The leg's side of chunked prefill on SGLang: its draft worker rotates a prefill batch's tokens.

Real, unmodified: ``EagleDraftWorker._draft_extend_for_prefill`` to where it asks for a ``ForwardBatch``, and what finds
the prompt's next token. Stand-ins: the worker, the batch and its requests, namespaces of what those read, and
``ForwardBatch``, which ends the method there. No model runs.
"""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import torch

from regressions.scenarios import sglang_world as world
from regressions.scenarios.compare import same

WORKER = "sglang.srt.speculative.eagle_worker_v2"
PRELOAD = (WORKER, "sglang.srt.managers.schedule_batch")
VOCABULARY = 1000


class Handed(Exception):
    """The worker has made its tokens and asks for a batch to run them in."""


def run(params: dict[str, Any], device: str) -> dict[str, Any]:
    lens, end, start = params["seq_lens"], params["chunk_end"], params["prefix_len"]
    world.publish({"device": device, "speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1,
                   "speculative_num_steps": 3, "speculative_num_draft_tokens": 4})  # fmt: skip
    # all tokens differ: prompt b is 100 * b, 100 * b + 1, …, and its predicted token is 900 + b
    prompts = [[100 * b + pos for pos in range(length)] for b, length in enumerate(lens)]
    predicted = [900 + b for b in range(len(lens))]
    reqs = [_request(prompt, 0, len(prompt)) for prompt in prompts[:-1]] + [_request(prompts[-1], start, end)]
    taken = [prompt[req.start : req.extend_end] for prompt, req in zip(prompts, reqs, strict=True)]
    handed = _rotated(reqs, taken, predicted, reqs[-1] if end < lens[-1] else None, device)
    tails = [*predicted[:-1], prompts[-1][end] if end < lens[-1] else predicted[-1]]
    want = [token for tokens, tail in zip(taken, tails, strict=True) for token in [*tokens[1:], tail]]
    same("draft input_ids", handed, torch.tensor(want))
    return {"tokens": len(want)}


def _request(prompt: list[int], start: int, end: int) -> SimpleNamespace:
    # what was filled is called fill_len in earlier releases, extend_end in later ones
    return SimpleNamespace(origin_input_ids=prompt, start=start, fill_len=end, extend_end=end)


def _rotated(reqs: list[Any], taken: list[list[int]], predicted: list[int], chunked: Any, device: str) -> torch.Tensor:
    """The tokens, (sum of lengths,) int64, that the worker makes for its draft model."""
    module: Any = importlib.import_module(WORKER)
    module.ForwardBatch = SimpleNamespace(init_new=_hand_over)
    algorithm = importlib.import_module("sglang.srt.speculative.spec_info").SpeculativeAlgorithm
    modes = importlib.import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
    ends = torch.tensor([req.extend_end for req in reqs])
    batch = SimpleNamespace(
        forward_mode=modes.EXTEND, reqs=reqs, chunked_req=chunked, seq_lens=ends.to(device), seq_lens_cpu=ends,
        input_ids=torch.tensor([token for tokens in taken for token in tokens], device=device),
        extend_lens=[len(tokens) for tokens in taken], chunked_req_next_prompt_token=_next_token(chunked),
    )  # fmt: skip
    batch.extend_seq_lens = batch.extend_lens  # what earlier releases call them
    worker = SimpleNamespace(speculative_algorithm=algorithm.from_string("EAGLE"), draft_runner=None)
    hidden = torch.zeros((len(batch.input_ids), 4), device=device)
    method = module.EagleDraftWorker._draft_extend_for_prefill
    try:
        method(worker, batch, hidden, torch.tensor(predicted, device=device))
    except Handed:
        return batch.input_ids
    raise RuntimeError(f"{method.__qualname__} asked for no ForwardBatch: this scenario does not know this release")


def _next_token(chunked: Any) -> int | None:
    """By the release's own function; earlier ones have none, and don't look at it."""
    module = importlib.import_module("sglang.srt.managers.schedule_batch")
    compute = getattr(module, "_compute_chunked_req_next_prompt_token", None)
    if compute is None:
        return None
    return compute(*[chunked, VOCABULARY][: len(inspect.signature(compute).parameters)])


def _hand_over(*_: Any, **__: Any) -> None:
    raise Handed
