"""What a leg leaves behind in a process that the next leg is to run in.

`Baseline()` is taken before the first leg; ``left()`` says after a leg what is not as it was then, or not known to be
harmless, in a few words each. Random number generators are put back. What libraries load and keep for themselves is not
looked at: modules, caches of compiled kernels, mapped libraries.
"""

from __future__ import annotations

import builtins
import gc
import os
import random
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from harness.memory import DETECTORS, Watch
from harness.memory.scrub import scrub

try:  # if at all, then before anything is forked: it is seeded as it is imported
    import numpy.random as _numpy_random
except ImportError:
    _numpy_random = None  # type: ignore[assignment]

# whose functions and methods no leg may replace
_NAMESPACES: dict[str, Any] = {
    "builtins": builtins,
    "os": os,
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.nn.functional": torch.nn.functional,
    "torch.cuda": torch.cuda,
    "any detector": Watch,
    **{f"{name} detector": kind for name, kind in DETECTORS.items()},
}
_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_STACK, resource.RLIMIT_NOFILE)
_LOOKS: dict[str, Callable[[], Any]] = {
    "environment variables": lambda: dict(os.environ),
    "the working directory": os.getcwd,
    "the import path": lambda: (list(sys.path), list(sys.meta_path), list(sys.path_hooks)),
    "standard streams": lambda: [(id(at), at.closed) for at in (sys.stdin, sys.stdout, sys.stderr)],
    "threads": lambda: set(sys._current_frames()),
    "child processes": lambda: [Path(f"{task}/children").read_text() for task in Path("/proc/self/task").iterdir()],
    "signal handlers": lambda: {number: signal.getsignal(number) for number in signal.valid_signals()},
    "the signal mask": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
    "timers": lambda: [signal.getitimer(timer)[1] > 0 or signal.getitimer(timer)[0] > 0 for timer in range(3)],
    "trace functions": lambda: (sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()),
    "hooks": lambda: (sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook),
    "limits": lambda: (sys.getrecursionlimit(), os.umask(os.umask(0o077)), *map(resource.getrlimit, _LIMITS)),
    "warnings that are errors": lambda: [each for each in warnings.filters if each[0] == "error"],
    "torch's defaults": lambda: (torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()),
    "torch's modes": lambda: (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(),
        torch.is_anomaly_enabled(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
    ),
    # where they are off, no detector sees any
    "torch's functions": lambda: torch._C._get_torch_function_state(),  # type: ignore[attr-defined]
    "torch's precision": lambda: (
        bool(torch.full((), 1e-39) * 1),  # or such a number is flushed to zero
        torch.get_deterministic_debug_mode(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    ),
    "the current GPU or stream": lambda: (
        (torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream) if torch.cuda.is_initialized() else None
    ),
}


class Baseline:
    """How this process is now. On a GPU its context must be there already."""

    def __init__(self) -> None:
        self._seen = {name: _look(name) for name in _LOOKS}
        self._functions = {name: _functions(of) for name, of in _NAMESPACES.items()}
        self._random = random.getstate(), torch.get_rng_state()
        self._random_on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._random_of_numpy = _numpy_random.get_state() if _numpy_random else None

    def left(self, byte: int) -> list[str]:
        """What a leg left. Memory that it freed on a GPU holds ``byte`` afterwards. Raises as ``scrub`` does."""
        gc.collect()  # what was imported before this process was forked is frozen
        left = [name for name in _LOOKS if _look(name) != self._seen[name]]
        for name, before in self._functions.items():
            now = _functions(_NAMESPACES[name])
            known = before.keys() | (now.keys() if name == "torch.Tensor" else ())  # others grow as torch is used
            left += [f"another {name}.{key}" for key in known if now.get(key) is not before.get(key)]
        self._reset_random()
        _clear_known_caches()
        if allocated := scrub(byte):
            left.append(f"{allocated} bytes of device memory")
        return left

    def _reset_random(self) -> None:
        python, on_cpu = self._random
        random.setstate(python)
        torch.set_rng_state(on_cpu)
        if self._random_on_gpus:
            torch.cuda.set_rng_state_all(self._random_on_gpus)
        if self._random_of_numpy:
            _numpy_random.set_state(self._random_of_numpy)


def _look(name: str) -> Any:
    try:
        return _LOOKS[name]()
    except (OSError, AttributeError, RuntimeError) as error:  # a folder that is gone, a stream that is no file
        return repr(error)


def _functions(of: Any) -> dict[str, Any]:
    """The public ones and the operators."""
    public = ((key, value) for key, value in vars(of).items() if not key.startswith("_") or key.endswith("__"))
    return {key: value for key, value in public if callable(value)}


def _clear_known_caches() -> None:
    """Memory that a library keeps for all of its callers, and makes again where it is gone."""
    if utils := sys.modules.get("flashinfer.utils"):
        getattr(utils, "_cache_buf", {}).clear()
