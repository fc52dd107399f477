"""Which device legs run on, found out without initialising CUDA: legs are forked from this process's servers."""

from __future__ import annotations

import ctypes
import os

from harness.errors import InfraError, UsageError


def compute_capabilities() -> list[str]:
    """``["9.0", …]``, one a GPU that the driver shows (none: empty). NVML is asked, which creates no context.

    Empty, too, where CUDA_VISIBLE_DEVICES hides all of them. A GPU that does not answer is left out.
    """
    if _hidden():
        return []
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2() != 0:
        return []
    count = ctypes.c_uint()
    found = []
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0:
        for index in range(count.value):
            handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
                continue
            if nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)) == 0:
                found.append(f"{major.value}.{minor.value}")
    nvml.nvmlShutdown()
    return found


def _hidden() -> bool:
    """CUDA takes the list up to the first entry that is no device."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible is not None and visible.partition(",")[0].strip() in ("", "-1")


def resolve_device(asked: str) -> str:
    """``auto`` -> the GPU if there is one. Raises InfraError where a GPU was asked for by name and none is here."""
    if asked not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device {asked!r}: must be auto, cpu or cuda")
    if asked == "cpu":
        return "cpu"
    if compute_capabilities():
        return "cuda"
    if asked == "auto":
        return "cpu"
    why = "CUDA_VISIBLE_DEVICES hides every GPU" if _hidden() else "no NVIDIA GPU is here"
    raise InfraError(f"--device cuda was asked for, but {why}; --device cpu runs the same kernels without")
