"""Imported first in a fork server that imports SGLang for a GPU: its modules ask torch about the device as they load.

torch answers by making a CUDA context, and no process forked after that can use CUDA. From here on, as long as this
process has no context, NVML answers for it, which makes none; once it has one, torch does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from harness.device import compute_capabilities


def _capability(index: int) -> tuple[int, int]:
    major, _, minor = compute_capabilities()[index].partition(".")
    return int(major), int(minor)


def _name(index: int) -> str:
    """What device it is, by its architecture: kernels' tuning tables are looked up by name, and no leg uses one."""
    return "GPU of compute capability {}.{}".format(*_capability(index))


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    return (torch.device(device).index or 0) if device is not None else 0


def _told(name: str, answer: Callable[[int], Any]) -> None:
    asked = getattr(torch.cuda, name)

    @functools.wraps(asked)
    def ask(*device: Any) -> Any:
        if torch.cuda.is_initialized() or not compute_capabilities():
            return asked(*device)
        return answer(_index(device[0] if device else None))

    setattr(torch.cuda, name, ask)


_told("get_device_capability", _capability)
_told("get_device_name", _name)
_told("current_device", lambda _: 0)


_asked = torch.get_device_module


@functools.wraps(_asked.__wrapped__)  # torch.compile looks for what torch's own cache wraps
def _device_module(device: Any = None) -> Any:
    """Without a device, torch asks the CUDA runtime whether there is one."""
    return _asked(device) if device is not None or torch.cuda.is_initialized() else torch.cuda


class _Driver:
    """Stands where Triton's driver is, whose making alone calls the CUDA driver, until this process has a context."""

    def __getattr__(self, name: str) -> Any:
        if torch.cuda.is_initialized():
            triton.runtime.driver.reset_active()
            return getattr(triton.runtime.driver.active, name)
        if name == "get_current_target":
            major, minor = _capability(0)
            return lambda: GPUTarget("cuda", 10 * major + minor, 32)
        raise RuntimeError(f"Triton's driver is asked for {name} before there is a CUDA context")


if compute_capabilities():
    triton.runtime.driver.set_active(_Driver())
    torch.get_device_module = _device_module  # type: ignore[assignment]
