"""Which GPUs a run may use, and which of them a worker gets. Pure: what is installed is handed in.

A worker gets a GPU by setting its own CUDA_VISIBLE_DEVICES to one entry of the caller's list, before CUDA starts. The
entry is passed on and never counted anew: an index is one within CUDA's order, which is not NVML's everywhere.

How the list reads, after the CUDA programming guide (5.2.1.1) and, where that says nothing, what torch does:

- Unset: every installed GPU, by UUID, so that CUDA_DEVICE_ORDER does not matter. Empty: none.
- An index is the number that an entry starts with: ``" 3"``, ``"+3"`` and ``"3gpu"`` are 3.
- ``GPU-<uuid>`` may be cut short as long as one GPU alone starts so. Nothing is stripped from it.
- ``MIG-<uuid>`` and the older ``MIG-GPU-<uuid>/<instance>/<instance>`` are taken on trust: NVML lists GPUs. CUDA shows
  a process the first one only, but every worker can have one of its own, so all of them count.
- The list ends at the first entry that is no device: an index too high or below 0, an unknown UUID, anything else.
- The first entry says what kind the list is of, and the first one of another kind ends it. The guide leaves mixed lists
  open; torch, made to match driver 525, reads them so.
- A device that is there twice leaves none at all.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

from harness.errors import InfraError

_INDEX = re.compile(r"\s*([+-]?[0-9]+)")
_KINDS = ("GPU-", "MIG-")


def visible(listed: str | None, installed: Sequence[str]) -> list[str]:
    """What a worker's CUDA_VISIBLE_DEVICES can be set to: one entry a GPU that the caller's shows, in its order.

    ``listed``: the caller's value, None where it is unset. ``installed``: UUIDs of the machine's GPUs.
    """
    if listed is None or not installed:
        return list(installed)
    kind = next((kind for kind in _KINDS if listed.startswith(kind)), None)
    entries = listed.split(",")
    if kind:
        entries = list(takewhile(lambda entry: entry.startswith(kind), entries))
    else:
        entries = [str(index) for index in takewhile(lambda index: index >= 0, map(_index, entries))]
    devices = list(takewhile(bool, (_device(entry, installed) for entry in entries)))
    if len(set(entries)) < len(entries) or len(set(devices)) < len(devices):
        return []
    return entries[: len(devices)]


def uuid(entry: str, installed: Sequence[str]) -> str | None:
    """The UUID of the GPU that one entry names, None where that is unknown (MIG) or none.

    ``installed``: in the order that an index counts in.
    """
    if entry.startswith("GPU-"):
        found = [known for known in installed if known.startswith(entry)]
        return found[0] if len(found) == 1 else None
    index = _index(entry)
    return installed[index] if 0 <= index < len(installed) else None


def _device(entry: str, installed: Sequence[str]) -> str | None:
    return entry if entry.startswith("MIG-") else uuid(entry, installed)


def _index(entry: str) -> int:
    number = _INDEX.match(entry)
    return int(number[1]) if number else -1


class Assignment:
    """Which worker has which GPU. Workers are told apart by any name; a GPU is an entry of ``visible``."""

    def __init__(self, gpus: Sequence[str]):
        if not gpus:
            raise InfraError("no GPU is visible that a worker could have")
        self._gpus = list(gpus)
        self._of: dict[str, str] = {}

    def take(self, worker: str) -> str:
        """The GPU with the fewest living workers, the first of them where several have as few."""
        workers = Counter(self._of.values())
        self._of[worker] = min(self._gpus, key=lambda gpu: workers[gpu])
        return self._of[worker]

    def give_back(self, worker: str) -> None:
        """After it ended or died: the next worker gets what it had, so that a replacement takes its place."""
        self._of.pop(worker, None)
