"""Ends what a search started, where the search is killed before it could: a process that has nothing else to do.

On its stdin it is told of sessions: the number of a leader as it starts, and that number below zero once all of that
session has been ended. As its stdin ends, so does all that is left. It runs as a script, and imports no more than that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

PATIENCE = 10.0  # seconds that processes may take to die of SIGKILL


class Warden:
    """Of this process's sessions. A context manager. Raises OSError where no process can be started."""

    def __enter__(self) -> Warden:
        command = [sys.executable, "-I", "-S", __file__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )
        assert self._process.stdin
        self._stdin = self._process.stdin
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._stdin.close()
        try:
            self._process.wait(2 * PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def begun(self, leader: int) -> None:
        self._tell(leader)

    def ended(self, leader: int) -> None:
        self._tell(-leader)

    def _tell(self, number: int) -> None:
        with contextlib.suppress(OSError):  # it was killed: then there is none
            os.write(self._stdin.fileno(), b"%d\n" % number)


def members(session: int) -> list[int]:
    """The processes of a session that aren't dead yet."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, _, its_session = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:4]
                if int(its_session) == session and state not in (b"Z", b"X"):
                    found.append(int(entry.name))
    return found


def main(told: Iterable[bytes]) -> None:
    sessions: set[int] = set()
    for line in told:
        number = int(line)
        sessions.add(number) if number > 0 else sessions.discard(-number)
    until = time.monotonic() + PATIENCE
    for session in sessions:
        while (left := members(session)) and time.monotonic() < until:
            for pid in left:
                with contextlib.suppress(OSError):  # another user's, by now
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


if __name__ == "__main__":
    main(sys.stdin.buffer)
