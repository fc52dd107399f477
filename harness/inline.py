"""A leg in this very process, for a debugger: a crash takes the debugger's process along."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from harness import leg, modules
from harness.ending import Ending


def run(wanted: dict[str, Any], path: Sequence[str]) -> Ending:
    """``wanted``: a request as `harness.leg` takes it. ``path``: in front of sys.path."""
    reached: list[str] = []
    started = time.monotonic()
    if wanted["device"] == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    with import_path(path):
        report = leg.run(wanted, reached.append)
    return Ending(report, tuple(reached), "", "", 0, None, False, round(time.monotonic() - started, 4))


@contextlib.contextmanager
def import_path(path: Sequence[str]) -> Iterator[None]:
    """The overlay in front of sys.path, and nothing of it left in sys.modules afterwards."""
    before = set(sys.modules)
    sys.path[:0] = path
    try:
        yield
    finally:
        del sys.path[: len(path)]
        modules.forget(path, before)
