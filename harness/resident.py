"""A resident: one process, and on a GPU one CUDA context, in which legs run one after the other.

For legs that are declared to leave their process as good as it was. Each imports the code under test anew, from its own
overlay, so that module globals, kernels and with them the reach-proof are its own; it has its own folder and streams.

    server -> resident   as `harness.child` has it, once for each leg
    resident -> server   {"began": true}, then {"reported": digest, "left": ["environment variables", …]}

Where a leg left something, or after `LEGS` of them, the resident ends: the next leg gets another. One thing would make
a leg look right that isn't: memory that an earlier leg freed may hold the very values that it must compute. So what a
detector hands out is filled first, in a graph that is being captured, too, what torch's allocator keeps on a GPU is
overwritten between legs, and without a GPU glibc fills what it hands out, but for small blocks that NumPy and Python
keep. What a native library has in variables of its own outlives a leg: none here has any.

What it says of a leg is believed where it is what was declared. The prover asks anew, in a process of its own, wherever
a verdict would be anything but proved.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from harness import child, leg, memory, modules, reach, wire
from harness.leftovers import Baseline
from harness.memory.watch import STALE

LEGS = 200
_M_PERTURB = -6  # of glibc's mallopt: what is freed is filled with a byte, what is handed out with its complement


def live(server: socket.socket, prepare: Callable[[], None]) -> None:
    """Run legs until one leaves something behind, or until the server is gone. ``prepare``: called first."""
    prepare()
    memory.Watch.fresh = STALE
    if not torch.cuda.is_initialized():  # nobody has tried whether a driver bears it
        with contextlib.suppress(AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(_M_PERTURB, STALE ^ 0xFF)
    leg.brace()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as each leg has it
    _flush_c()
    baseline, kept, own = Baseline(), set(sys.modules), reach.libraries()
    for at in range(1, LEGS + 1):
        request = wire.receive(server)
        digest, left = _run(server, request, baseline, kept, own)
        if at == LEGS:
            left.append(f"{LEGS} legs")
        wire.send(server, {"reported": digest, "left": left})
        if left:
            return


def _run(
    server: socket.socket, request: dict[str, Any], baseline: Baseline, kept: set[str], own: set[Path]
) -> tuple[str, list[str]]:
    path, before = request["path"], {name: os.environ.get(name) for name in request["env"]}
    child.begin(server, request)
    digest = leg.run_directory(request["directory"], own)
    if sys.path[: len(path)] == path:  # else the leg changed it, which is found
        del sys.path[: len(path)]
    for name, value in before.items():
        if os.environ.get(name) == request["env"][name]:
            os.environ.pop(name)
            os.environ.update({name: value} if value is not None else {})
    modules.forget(path, kept)
    try:
        left = baseline.left(STALE)
    except Exception as error:  # a device error stays with its context, and the leg has told of it
        left = [f"a device that can't be used ({type(error).__name__})"]
    _flush_c()
    child.print_to(os.devnull, os.devnull)
    return digest, left


def _flush_c() -> None:
    """What C has buffered belongs to what ran last."""
    ctypes.CDLL(None).fflush(None)
