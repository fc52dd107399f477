"""Starting a fork server: its command, its environment, and what makes two of them alike."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import interrupts, wire
from harness.device import compute_capabilities
from harness.errors import InfraError

ZYGOTE = "UNFIX_ZYGOTE"  # the socket of `harness.zygote`, for the processes of a run
_NOT_PASSED_ON = ("SGLANG_DEBUG_REVERT_PR", "TRITON_INTERPRET", ZYGOTE)


def preload(device: str, path: Sequence[str] = ()) -> list[str]:
    """What every leg imports that is no code under test; of what is to be had with this in front of the import path."""
    flashinfer = ["flashinfer"] if device == "cuda" and installed("flashinfer", path) else []
    return ["numpy", "torch", "triton", *flashinfer]


def environment(device: str, path: Sequence[str] = ()) -> dict[str, str]:
    """What a server has, and every leg that is forked from it. ``path``: in front of the import path."""
    env = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
    first = [*path, str(Path(__file__).parents[1])]
    env["PYTHONPATH"] = os.pathsep.join([*first, env.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    if device == "cpu":
        env["TRITON_INTERPRET"] = "1"  # read when triton is imported: it belongs to the server, not to a leg
        env["CUDA_VISIBLE_DEVICES"] = ""
    else:
        # told the architecture, flashinfer does not ask the GPU for it on import, which would initialise CUDA
        env.setdefault("FLASHINFER_CUDA_ARCH_LIST", " ".join(sorted(set(compute_capabilities()))))
        env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # torch.cuda.is_available() by the runtime spoils later forks
    return env


def kind(names: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    """Two servers of a kind have imported the same: one may stand in for the other."""
    read_on_import = ("PYTHONPATH", "TRITON_INTERPRET", "FLASHINFER_CUDA_ARCH_LIST")
    return {"python": sys.executable, "preload": list(names), **{name: env.get(name) for name in read_on_import}}


def start(
    names: Sequence[str], env: Mapping[str, str], listener: socket.socket | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A new process, which says hello once it has imported all that. With a ``listener``, it is a zygote.

    Raises InfraError where none can be started.
    """
    ours, theirs = wire.pair()
    given = [theirs.fileno(), *([listener.fileno()] if listener else [])]
    command = [sys.executable, "-m", "harness.forkserver", ",".join(map(str, given)), *names]
    try:  # what an import prints is a note, and not a result
        with interrupts.held():
            process = subprocess.Popen(
                command, env=dict(env), pass_fds=given, stdin=subprocess.DEVNULL, stdout=2,
                start_new_session=listener is not None,  # what stops or ends a terminal's job is for its owner
                preexec_fn=functools.partial(interrupts.let_through, but_ctrl_c=True),
            )  # fmt: skip
    except OSError as error:
        ours.close()
        raise InfraError(f"no fork server could be started: {error}") from error
    finally:
        theirs.close()
    return process, ours


def installed(package: str, path: Sequence[str] = ()) -> bool:
    """Whether a leg with this path in front of its import path can import the package."""
    try:
        here = importlib.machinery.PathFinder.find_spec(package, list(path)) if path else None
        return (here or importlib.util.find_spec(package)) is not None
    except ModuleNotFoundError:  # the parent of a dotted name
        return False
