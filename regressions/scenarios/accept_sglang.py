"""The leg's side of the accept scenario on SGLang's own code, from 0.5.13 on.

``move``: ``move_accept_tokens_to_target_kvcache``, a method of the EAGLE worker at first and a function later, with its
kernels. The KV pool stands in: it keeps what it is told to move, and moves nothing.

``bonus``: the verify step, ``verify`` of the worker at first and ``run_eagle_verify`` later, with its kernel. Standing
in: the target model, which is never run; the sampler, which hands over the case's accepted paths; the batch, with the
fields that the step reads. The step is stopped where it makes the next round's draft input, and asked for its tokens.
From 0.5.22 on, tensors that say ``is_cuda`` take a fused kernel, which has no such stride. Here they say no, so a GPU
runs what SGLang runs on every other accelerator.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import torch

from harness.leg import WrongValues
from regressions.scenarios import sglang_world as world
from regressions.scenarios.accept import PADDING_SLOT, accept_index, slot, token
from regressions.scenarios.compare import same

_SPECULATIVE = "sglang.srt.speculative"
WORKER, COMMON = f"{_SPECULATIVE}.eagle_worker_v2", f"{_SPECULATIVE}.eagle_worker_common"
UTILS = f"{_SPECULATIVE}.spec_utils"
PRELOAD = (WORKER, COMMON, UTILS)
PREFIX = 4  # tokens of every request


def run(params: dict[str, Any], device: str) -> dict[str, Any]:
    with world.on(device):
        batch = _batch(params, device)
        index = torch.tensor(accept_index(params), dtype=torch.int32, device=device)
        accepted = torch.tensor(params["accepted"], dtype=torch.int32, device=device)
        if params["path"] == "move":
            pairs = _moved(batch, index, accepted, params, device)
            _check_moved(pairs, params)
            return {"moves": len(pairs)}
        bonus = _bonus(batch, index, accepted, params, device)
        last = [token(row[count - 1]) for row, count in zip(accept_index(params), params["accepted"], strict=True)]
        same("bonus_tokens", bonus, torch.tensor(last))
        return {"bonus_tokens": len(last)}


def _batch(params: dict[str, Any], device: str) -> SimpleNamespace:
    """The fields of a batch that these steps read; every request has its tree's slots behind its prefix."""
    num_seqs, step = len(params["accepted"]), params["num_draft_tokens"]
    slots = torch.tensor([slot(node) for node in range(num_seqs * step)], dtype=torch.int64, device=device)
    table = torch.zeros((num_seqs + 1, PREFIX + step), dtype=torch.int32, device=device)
    table[1:, PREFIX:] = slots.view(num_seqs, step)
    return SimpleNamespace(
        seq_lens=torch.full((num_seqs,), PREFIX, dtype=torch.int64, device=device), out_cache_loc=slots,
        req_pool_indices=torch.arange(1, num_seqs + 1, device=device), input_ids=None, has_grammar=False,
        req_to_token_pool=SimpleNamespace(req_to_token=table), return_logprob=False, mamba_track_indices=None,
        forward_mode=SimpleNamespace(is_idle=lambda: False), hisparse_coordinator=None, reqs=[],
        sampling_info=SimpleNamespace(has_watermark_candidates=False), spec_info=SimpleNamespace(),
    )  # fmt: skip


def _moved(batch: Any, index: torch.Tensor, accepted: torch.Tensor, params: dict[str, Any], device: str) -> Any:
    """(target, source) slots of every move that is not the padding slot's to itself."""
    moves: list[tuple[torch.Tensor, torch.Tensor]] = []
    pool = SimpleNamespace(move_kv_cache=lambda target, source: moves.append((target, source)))
    allocator = SimpleNamespace(get_kvcache=lambda: pool)
    utils: Any = importlib.import_module(UTILS)
    correct = accepted - 1
    if hasattr(utils, "move_accept_tokens_to_target_kvcache"):
        utils.move_accept_tokens_to_target_kvcache(batch, index, correct, allocator)
    else:
        worker = SimpleNamespace(
            device=device, speculative_num_draft_tokens=params["num_draft_tokens"],
            token_to_kv_pool_allocator=allocator, req_to_token_pool=batch.req_to_token_pool,
        )  # fmt: skip
        kind: Any = importlib.import_module(WORKER).EAGLEWorkerV2
        kind.move_accept_tokens_to_target_kvcache(worker, batch, index, correct)
    [(target, source)] = moves
    pairs = zip(target.tolist(), source.tolist(), strict=True)
    return [pair for pair in pairs if pair != (PADDING_SLOT, PADDING_SLOT)]


def _check_moved(pairs: list[tuple[int, int]], params: dict[str, Any]) -> None:
    step, paths = params["num_draft_tokens"], accept_index(params)
    want = [
        (slot(request * step + place), slot(path[place]))
        for request, (path, count) in enumerate(zip(paths, params["accepted"], strict=True))
        for place in range(count)
    ]
    stray = [source for target, source in pairs if target == PADDING_SLOT]
    if stray:
        raise WrongValues(f"{len(stray)} rows moved to the padding slot, from slots {set(stray)}")
    if pairs != want:
        at = next((i for i, pair in enumerate(zip(pairs, want, strict=False)) if pair[0] != pair[1]), len(want))
        raise WrongValues(f"move {at} of {len(want)}: {pairs[at : at + 1]}, reference {want[at : at + 1]}")


class _NotCuda(torch.Tensor):
    is_cuda = False


class _Made(Exception):
    """The step has its bonus tokens, and makes the next round's draft input of them."""


def _bonus(batch: Any, index: torch.Tensor, accepted: torch.Tensor, params: dict[str, Any], device: str) -> Any:
    num_seqs, step = len(params["accepted"]), params["num_draft_tokens"]
    predict = torch.tensor([token(node) for node in range(num_seqs * step)], dtype=torch.int32, device=device)
    sampled = (predict.as_subclass(_NotCuda), accepted, index)
    forwarded = SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=None, hidden_states=None))
    attention = SimpleNamespace(verify_mask=None)
    models = dict.fromkeys(("hybrid_gdn_config", "mamba2_config", "hybrid_lightning_config", "watermark_state"))
    target = SimpleNamespace(
        forward_batch_generation=lambda **_: forwarded, model_runner=SimpleNamespace(attn_backend=attention, **models)
    )
    shared = world.has_module(COMMON)
    module: Any = importlib.import_module(COMMON if shared else WORKER)
    for name, stand_in in {
        "eagle_sample": lambda *_, **__: sampled,
        "eagle_prepare_for_verify": lambda *_, **__: (SimpleNamespace(), False),
        "commit_mamba_states_after_verify": lambda *_, **__: None,
        "EagleDraftInput": _stop,
    }.items():
        if hasattr(module, name):
            setattr(module, name, stand_in)
    batch.spec_info = SimpleNamespace(
        prepare_for_v2_verify=lambda *_: (SimpleNamespace(), False), sample=lambda *_: sampled
    )
    try:
        if shared and hasattr(module, "run_eagle_verify"):
            _run_eagle_verify(module, batch, target, params, device)
        else:
            module.EAGLEWorkerV2.verify(_worker(target, batch, params, device), batch)
    except _Made as made:
        return made.args[0]
    raise RuntimeError("the verify step ended without a draft input: this scenario does not know this release")


def _run_eagle_verify(module: Any, batch: Any, target: Any, params: dict[str, Any], device: str) -> None:
    arguments = {
        "target_worker": target, "req_to_token_pool": batch.req_to_token_pool,
        "token_to_kv_pool_allocator": SimpleNamespace(get_kvcache=SimpleNamespace), "plan_stream": None,
        "plan_stream_ctx": contextlib.nullcontext(), "topk": 2, "num_steps": params["num_steps"],
        "num_draft_tokens": params["num_draft_tokens"], "device": device, "metadata_ready_pre_pad": False,
        "finalize_tree_path": False,
    }  # fmt: skip
    known = inspect.signature(module.run_eagle_verify).parameters
    module.run_eagle_verify(batch, **{name: value for name, value in arguments.items() if name in known})


def _worker(target: Any, batch: Any, params: dict[str, Any], device: str) -> SimpleNamespace:
    return SimpleNamespace(
        device=device, speculative_num_steps=params["num_steps"],
        speculative_num_draft_tokens=params["num_draft_tokens"],
        plan_stream_ctx=contextlib.nullcontext(), plan_stream=None, target_worker=target, _target_worker=target,
        req_to_token_pool=batch.req_to_token_pool, topk=2, server_args=SimpleNamespace(),
        _finalize_accept_tree_path=lambda batch, index, accepted, predict, *_: predict,
    )  # fmt: skip


def _stop(*, bonus_tokens: torch.Tensor, **_: Any) -> None:
    raise _Made(bonus_tokens)
