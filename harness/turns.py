"""Legs that need much device memory take turns on a GPU: across workers, and across all runs of this user.

A turn is an flock on a file in the user's cache, one a GPU, so it ends with its holder, however that ends. It is waited
for without a limit: whoever holds it runs legs, which have limits of their own. The file is named after the GPU's UUID
where that is known, so that runs which name it differently (by index, by UUID) still meet. An index is taken for
NVML's, as CUDA counts with CUDA_DEVICE_ORDER=PCI_BUS_ID, and where all GPUs are alike.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from urllib.parse import quote

from harness import device, gpus, overlay
from harness.errors import InfraError

# The largest legs hold 17 GB. One of those beside seven just below this, and all their contexts, fit a GPU of 80 GB.
MUCH = 4 << 30


@contextlib.contextmanager
def turn(gpu: str, device_bytes: int) -> Iterator[None]:
    """Hold the GPU's turn around a leg that needs this much of its memory; nothing is held for less than ``MUCH``.

    ``gpu``: an entry of CUDA_VISIBLE_DEVICES. Raises InfraError where the cache can't be written.
    """
    if device_bytes < MUCH:
        yield
        return
    lock = _taken(gpu)
    try:
        yield
    finally:
        os.close(lock)


def _taken(gpu: str) -> int:
    folder = overlay.cache_dir() / "turns"
    name = quote(gpus.uuid(gpu, device.uuids()) or gpu, safe="") + ".lock"
    with contextlib.ExitStack() as undo:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            lock = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o600)
            undo.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            said = f"no turn on GPU {gpu} can be taken in {folder}: {error.strerror}; set UNFIX_CACHE"
            raise InfraError(said) from None
        undo.pop_all()
    return lock
