"""What torch's allocator on a GPU keeps for later is overwritten: no earlier leg's values are in what it hands out."""

from __future__ import annotations

import torch

from .guard_page import _CudaBytes, unmap_retired

KEPT = 1 << 30  # bytes that may stay with the allocator, so that the next leg need not ask the driver


def scrub(byte: int) -> int:
    """Bytes that are still allocated on all GPUs, guarded payloads, too. Where none are, what is kept holds ``byte``.

    Raises what the device's last error was.
    """
    if not torch.cuda.is_initialized():
        return 0
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    guarded = unmap_retired()
    if allocated := guarded + sum(torch.cuda.memory_allocated(at) for at in range(torch.cuda.device_count())):
        return allocated
    segments = torch.cuda.memory_snapshot()
    for segment in segments:
        whole = _CudaBytes(segment["address"], segment["total_size"])
        torch.as_tensor(whole, device=torch.device("cuda", segment["device"])).fill_(byte)
    torch.cuda.synchronize()
    if sum(segment["total_size"] for segment in segments) > KEPT:
        torch.cuda.empty_cache()
    return 0
