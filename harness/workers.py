"""The workers of a run: pytest-xdist's processes, which GPU each has, which cases come first, and which stay together.

What a worker has to know is handed to it as it starts: it may start late, in place of one that died, and must collect
what the others did.
"""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import MutableMapping, Sequence
from typing import Any

import pluggy
import pytest

from harness import device
from harness.case import Case
from harness.gpus import Assignment

LONG = 100 << 20  # device bytes of a case that takes seconds


def settle(config: pytest.Config) -> None:
    """In a worker, before anything can ask CUDA: from here on, and for all that it starts, its GPU is the only one."""
    if is_worker(config):  # one whose pytest was killed: xdist can't send its last word, and pluggy would tell of that
        warnings.filterwarnings("ignore", category=pluggy.PluggyTeardownRaisedWarning)
    if gpu := _given(config).get("unfix_gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu


def done(config: pytest.Config) -> frozenset[str]:
    """In a worker: the tests that the log of an interrupted run has."""
    return frozenset(_given(config).get("unfix_done", ()))


def is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def _given(config: pytest.Config) -> MutableMapping[str, Any]:
    return getattr(config, "workerinput", {})


def together(nodeid: str, shares: int = 1) -> str:
    """Cases of one test need the same fork servers, which are slow to start where the code base is slow to import."""
    return f"{nodeid.partition('[')[0]}/{zlib.crc32(nodeid.encode()) % shares}"


def spread(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The order for workers: long cases begin at once, and the others are mixed.

    What needs much memory takes long. Each long one is followed by a short one, since a worker is handed two at first.
    Legs that need a CUDA context of their own are neighbours in their file, and a driver makes one after the other.
    """
    needed = {item.nodeid: _device_bytes(item) for item in items}
    long = sorted(
        (item for item in items if needed[item.nodeid] >= LONG), key=lambda item: (-needed[item.nodeid], item.nodeid)
    )
    short = sorted(
        (item for item in items if needed[item.nodeid] < LONG), key=lambda item: zlib.crc32(item.nodeid.encode())
    )
    begun = [item for pair in zip(long, short, strict=False) for item in pair]
    return [*begun, *long[len(short) :], *short[len(long) :]]


def _device_bytes(item: pytest.Item) -> int:
    case = getattr(item, "callspec", None) and item.callspec.params.get("case")  # type: ignore[attr-defined]
    return case.device_bytes if isinstance(case, Case) else 0


class Workers:
    """A plugin of the process that starts them."""

    def __init__(self, on: str, done: Sequence[str], *, slow: bool):
        """``slow``: a fork server has to import the code base for each selection."""
        self._done, self._slow, self._on = list(done), slow, on
        seen = device.visible() if on == "cuda" else []
        self._gpus = Assignment(seen) if seen else None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["unfix_done"] = self._done
        if self._gpus:
            node.workerinput["unfix_gpu"] = self._gpus.take(node.gateway.id)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if self._gpus:
            self._gpus.give_back(node.gateway.id)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        if not self._slow:
            return None
        from xdist.scheduler import LoadScopeScheduling

        shares = 2 if self._on == "cuda" else 1  # on a GPU there are many cases, and cores for the servers of two

        class ByTest(LoadScopeScheduling):
            def _split_scope(self, nodeid: str) -> str:
                return together(nodeid, shares)

        return ByTest(config, log)
