"""The leg's side of the multi-layer scenario on SGLang: its worker's own constructor, as far as it goes alone.

The constructor checks its arguments, enters the process groups of the draft, and makes a ``TpModelWorker``, which loads
a model. The last two stand in: to have been asked for a worker means that the configuration was accepted. So without
the check the worst that can be seen here is a configuration accepted which no chain of one token a step can draft; what
fails later needs a server. This scenario raises that RuntimeError itself: SGLang says nothing.

topk is 2: with 1, later releases compare the same two numbers again in a base class a few lines on, and the check under
test could not be told from that one.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from types import SimpleNamespace
from typing import Any

from regressions.scenarios import sglang_world as world

WORKER = "sglang.srt.speculative.multi_layer_eagle_worker_v2"
PRELOAD = (WORKER,)


class Accepted(Exception):
    """The constructor has checked its arguments and asks for a model."""


def run(params: dict[str, Any], device: str) -> dict[str, Any]:
    server_args = world.publish(
        {
            "device": device, "speculative_algorithm": "EAGLE", "speculative_eagle_topk": 2,
            "speculative_num_steps": params["num_steps"], "speculative_num_draft_tokens": params["num_draft_tokens"],
        }
    )  # fmt: skip
    module: Any = importlib.import_module(WORKER)
    module.TpModelWorker = _accept
    for name in ("draft_tp_context", "draft_pp_context"):
        setattr(module, name, lambda *_: contextlib.nullcontext())
    make = module.MultiLayerEagleDraftWorker
    ranks = {name: 0 for name in inspect.signature(make).parameters}
    try:
        with world.on(device):
            make(**ranks | {"server_args": server_args, "target_worker": _target_worker()})
    except Accepted as accepted:
        if params["num_draft_tokens"] != params["num_steps"] + 1:
            raise RuntimeError(
                "accepted a configuration that no chain of one token a step can draft: "
                f"{params['num_draft_tokens']} draft tokens in {params['num_steps']} steps"
            ) from None
        return {"accepted": True, "is_draft_worker": accepted.args[0]["is_draft_worker"]}
    raise RuntimeError(f"{make.__qualname__} was made without a model: this scenario does not know this release")


def _accept(**arguments: Any) -> None:
    raise Accepted(arguments)


def _target_worker() -> SimpleNamespace:
    runner = SimpleNamespace(model_config=SimpleNamespace(context_len=64), memory_pool_config=None)
    return SimpleNamespace(model_config=runner.model_config, model_runner=runner, get_memory_pool=lambda: (None, None))
