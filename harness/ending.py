"""How a leg's process ended, and what it left in its folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CAPTURE_BYTES = 1 << 16  # of each stream, its end: where a process says why it died


@dataclass(frozen=True)
class Ending:
    report: dict[str, Any] | None  # None: the process died before it could write one, or it is no longer what it wrote
    reached: tuple[str, ...]
    stdout: str
    stderr: str
    exit_code: int | None  # None: killed by `signal`
    signal: str | None  # "SIGSEGV", …
    timed_out: bool
    seconds: float
    read: tuple[str, ...] | None = None  # as `harness.reads` has it; None: not known
    shared: bool = False  # it ran in a process in which others did
    left: tuple[str, ...] = ()  # what it left behind there, so that no other will


def read(directory: str, status: int, digest: str | None, timed_out: bool, seconds: float) -> Ending:
    """The ending of the leg that was given this folder. ``status``: its process's wait status.

    ``digest``: its report's, as that process told it. What else lies where a report would is none.
    """
    folder = Path(directory)
    reads = folder / "read"
    killed_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    return Ending(
        report=_report(folder / "report.json", digest),
        reached=tuple(_tail(folder / "reached").split("\n")[:-1]),
        stdout=_tail(folder / "stdout"),
        stderr=_tail(folder / "stderr"),
        exit_code=None if killed_by else os.waitstatus_to_exitcode(status),
        signal=signal.Signals(killed_by).name if killed_by else None,
        timed_out=timed_out,
        seconds=round(seconds, 4),
        read=tuple(reads.read_text(errors="surrogateescape").split("\n")[:-1]) if reads.is_file() else None,
    )


def _report(path: Path, digest: str | None) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    written = path.read_bytes()
    return json.loads(written) if hashlib.sha256(written).hexdigest() == digest else None


def _tail(path: Path) -> str:
    if not path.is_file():  # a pipe that a leg put there would be waited for
        return ""
    with contextlib.suppress(OSError), open(path, "rb") as stream:
        stream.seek(max(0, path.stat().st_size - CAPTURE_BYTES))
        return stream.read().decode("utf-8", "replace")
    return ""
