"""What the legs of isolation.py run, in a leg's process."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def nothing(params: dict[str, Any], device: str) -> None:
    """What remains is the process, on a GPU its context, and the report."""


def twice(params: dict[str, Any], device: str) -> dict[str, Any]:
    """Runs ``params["entry"]`` two times: seconds of each, and what of the installed was first imported by it.

    The difference is what a process pays for the first time: kernels loaded, workspaces made, modules imported.
    """
    import time

    import torch

    module, _, name = params["entry"].partition(":")
    run = getattr(importlib.import_module(module), name)
    before, seconds = set(sys.modules), []
    for _ in range(2):
        started = time.monotonic()
        run(params["params"], device)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - started)
    new = [name for name in sys.modules if name not in before]
    installed = [name for name in new if "site-packages" in (getattr(sys.modules[name], "__file__", None) or "")]
    return {"seconds": seconds, "installed": sorted(installed)}
