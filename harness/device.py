"""Which device legs run on, found out without initialising CUDA: legs are forked from this process's servers."""

from __future__ import annotations

import ctypes
import os
from importlib import metadata

from harness import gpus
from harness.errors import InfraError, UsageError

_UUID_BYTES = 96  # NVML's own size for it


def uuids() -> list[str]:
    """``["GPU-8932f937-…", …]``, one a GPU that the driver shows, in NVML's order (by bus), whatever is visible.

    NVML is asked, which creates no context. A GPU that does not answer is left out; no driver, no GPU.
    """
    return [uuid for uuid, _ in _installed()]


def visible() -> list[str]:
    """The entries of this process's CUDA_VISIBLE_DEVICES, one a GPU that it shows: see :mod:`harness.gpus`."""
    return gpus.visible(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids())


def compute_capabilities() -> list[str]:
    """``["9.0", …]``, one a GPU that CUDA_VISIBLE_DEVICES shows, in its order (none: empty).

    Where it can't be told which ones those are, that of every installed GPU: MIG devices, and an index on a machine of
    different GPUs, which CUDA counts fastest first unless CUDA_DEVICE_ORDER is PCI_BUS_ID.
    """
    capability = dict(_installed())
    installed = list(capability)
    in_order = len(set(capability.values())) <= 1 or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    shown = []
    for entry in gpus.visible(os.environ.get("CUDA_VISIBLE_DEVICES"), installed):
        uuid = gpus.uuid(entry, installed) if in_order or entry.startswith("GPU-") else None
        if uuid is None:
            return list(capability.values())
        shown.append(capability[uuid])
    return shown


def _installed() -> list[tuple[str, str]]:
    """(UUID, compute capability) of every GPU."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2() != 0:
        return []
    count = ctypes.c_uint()
    found = []
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0:
        found = [gpu for index in range(count.value) if (gpu := _gpu(nvml, index))]
    nvml.nvmlShutdown()
    return found


def _gpu(nvml: ctypes.CDLL, index: int) -> tuple[str, str] | None:
    handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    uuid = ctypes.create_string_buffer(_UUID_BYTES)
    failed = (
        nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
        or nvml.nvmlDeviceGetUUID(handle, uuid, _UUID_BYTES)
        or nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    )
    return None if failed else (uuid.value.decode(), f"{major.value}.{minor.value}")


def resolve_device(asked: str) -> str:
    """``auto`` -> the GPU if there is one. Raises InfraError where a GPU was asked for by name and none is here, and
    where a CPU could not run the kernels rightly."""
    if asked not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device {asked!r}: must be auto, cpu or cuda")
    if asked != "cpu" and visible():
        return "cuda"
    if asked != "cuda":
        _check_interpreter()
        return "cpu"
    why, listed = "no NVIDIA GPU is here", os.environ.get("CUDA_VISIBLE_DEVICES")
    if installed := len(uuids()):
        why = f"CUDA_VISIBLE_DEVICES={listed!r} shows none of the {installed} here"
    raise InfraError(f"--device cuda was asked for, but {why}; --device cpu runs the same kernels without")


def _check_interpreter() -> None:
    """Its fault would read as the kernels' own: no case is right, so each would be a finding."""
    try:
        triton, numpy = metadata.version("triton"), metadata.version("numpy")
    except metadata.PackageNotFoundError:  # said where it is needed
        return
    if _release(triton) < (3, 7) and _release(numpy) >= (2, 4):
        raise InfraError(
            f"no GPU, and Triton {triton}'s interpreter needs NumPy below 2.4, this is {numpy}: pip install 'numpy<2.4'"
        )


def _release(version: str) -> tuple[int, ...]:
    """``(3, 6)`` of ``3.6.0``."""
    return tuple(int(part) for part in version.split(".")[:2])
