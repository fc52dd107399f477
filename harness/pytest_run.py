"""The pytest that runs the regressions, for every command that does: its command line, and its process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from harness import interrupts, orphans
from harness.code_base import CodeBase
from harness.device import visible
from harness.errors import UsageError
from harness.trial import kill_session

_ENDING = 20.0  # seconds that an interrupted pytest has to write down what it knows


def command(
    root: Path,
    device: str,
    code_base: CodeBase,
    workers: str,
    *,
    release: str | None = None,
    source: str | None = None,
    more: Sequence[str] = (),
) -> list[str]:
    """``release`` and ``source`` as the user named them; ``more`` comes last."""
    return [
        sys.executable, "-m", "harness.pytest_main", str(root / "regressions"),
        "--rootdir", str(root), "-c", str(root / "pyproject.toml"),
        "-q", "-n", workers, "--maxschedchunk", "1",  # no case waits for a long one of its worker's
        "--unfix-device", device, "--unfix-target", code_base.name,
        *(["--unfix-release", release] if release else []), *(["--unfix-source", source] if source else []),
        *more,
    ]  # fmt: skip


def workers(jobs: str, device: str) -> str:
    """How many run side by side: what ``--jobs`` says."""
    if jobs != "auto":
        if not jobs.isdecimal():  # what int() reads, which isn't every digit
            raise UsageError(f"--jobs {jobs!r}: must be a number or auto")
        return jobs
    # each worker holds a fork server (about 0.5 GB), and on a GPU its legs' contexts
    most = 12 * max(1, len(visible())) if device == "cuda" else 8
    return str(min(os.cpu_count() or 1, most))


def bound() -> None:
    """Between fork and exec of `pytest_main`, interrupts held: it ends with who starts it, or as that is asked to."""
    orphans.end_with_parent()
    interrupts.let_through(to_run=True)


@contextlib.contextmanager
def started(command: Sequence[str], words: IO[Any]) -> Iterator[subprocess.Popen[bytes]]:
    """Its process, in a session of its own: a Ctrl-C reaches it once, and nothing of it outlives this process.

    What it prints goes to ``words``.
    """
    with contextlib.ExitStack() as waiting:
        waiting.enter_context(interrupts.held())
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=words, stderr=words, start_new_session=True, preexec_fn=bound
        )
        kept = waiting.pop_all()
    try:
        kept.close()  # from here on, an interrupt ends it, too
        yield process
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_ENDING)
        raise
    finally:
        if process.poll() is None:
            kill_session(process.pid)
            process.wait()
