"""Processes that outlive what started them, as a daemon does: who adopts them can end them.

A process that adopts becomes the parent of all that its descendants leave behind, whatever session or group that is in:
a child subreaper, as Linux calls it. The nearest one above gets it, so that one process's orphans are not another's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

_LIBC = ctypes.CDLL(None)  # loaded here: between fork and exec is no time for it
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def adopt() -> None:
    """From here on. What is forked from this process adopts nothing by that."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """From here on, this process is killed where the thread that started it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def children(pid: int | str = "self") -> set[int]:
    """Of all threads of a process, dead ones that nobody has waited for among them. () where it has gone."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that ended meanwhile
                found.update(map(int, (task / "children").read_text().split()))
    return found


def descendants(pid: int) -> set[int]:
    """All that a process has started and that still runs below it."""
    found: set[int] = set()
    below = children(pid)
    while below:
        found |= below
        below = {child for parent in below for child in children(parent)} - found
    return found


def end(but: set[int]) -> None:
    """Kill and wait for all children of this process that are not among these, and what those leave behind in turn."""
    kept = set(but)
    while strays := children() - kept:
        for pid in strays:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass  # gone already
            except PermissionError:  # it has become another user's
                kept.add(pid)
