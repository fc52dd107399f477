"""Which device legs run on, found out without initialising CUDA: legs are forked from this process's servers."""

from __future__ import annotations

import ctypes

from harness.errors import InfraError


def gpu_count() -> int:
    """GPUs that the driver shows, asked of NVML, which creates no context."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    if nvml.nvmlInit_v2() != 0:
        return 0
    count = ctypes.c_uint()
    found = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
    nvml.nvmlShutdown()
    return count.value if found else 0


def resolve_device(asked: str) -> str:
    """``auto`` -> the GPU if there is one. Raises InfraError where a GPU was asked for by name and none is here."""
    if asked == "cpu" or (asked == "auto" and not gpu_count()):
        return "cpu"
    if not gpu_count():
        raise InfraError("--device cuda was asked for, but no NVIDIA driver or GPU is here; --device cpu runs the same kernels without one")
    return "cuda"
