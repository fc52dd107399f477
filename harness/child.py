"""A process forked from the fork server: a spare, until it is given a leg; then that leg's own, to its end.

    server -> child   {"directory": …, "path": [...], "env": {...}}, once
    child -> server   {"began": true}, then {"reported": true} with its report written and nothing left to run

Until it has begun, nothing of a leg has run in it: a child that dies before that costs nothing. What it prints until
then goes nowhere. A spare ends by itself when its server does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from harness import leg, wire


class Child:
    """The server's end of it. ``pidfd`` is readable once it has ended, ``wire`` where it has said something."""

    def __init__(self, prepare: Callable[[], None], inherited: Iterable[socket.socket]):
        """``prepare``: called first in the child. ``inherited``: the server's own ends, which it must not hold open."""
        self.wire, theirs = wire.pair()
        self.pid = os.fork()
        if self.pid == 0:
            for end in (self.wire, *inherited):
                end.close()
            _live(theirs, prepare)
        theirs.close()
        self.pidfd = os.pidfd_open(self.pid)
        self.until = 0.0  # when it must have ended, once it has reported

    def give(self, request: dict[str, Any]) -> bool:
        """Hand it a leg. False where it has died already."""
        with contextlib.suppress(OSError):
            wire.send(self.wire, request)
            return True
        return False

    def said(self, word: str) -> bool:
        """What it said is this, and not its last breath. To be asked where ``wire`` is readable."""
        with contextlib.suppress(OSError):
            return word in wire.receive(self.wire)
        return False

    def end(self) -> int:
        """Its wait status; killed if it still runs, as is all that it left in its process group."""
        for kill in (os.killpg, os.kill):  # it may not have got as far as a group of its own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)
        status = os.waitpid(self.pid, 0)[1]
        os.close(self.pidfd)
        self.wire.close()
        return status


def _live(server: socket.socket, prepare: Callable[[], None]) -> NoReturn:
    code = 70  # an exit that no leg reports by itself: the set-up below failed
    try:
        os.setsid()
        _print_to(os.devnull, os.devnull)
        prepare()
        request = wire.receive(server)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the server, and so a spare, ignores it
        directory = request["directory"]
        _print_to(os.path.join(directory, "stdout"), os.path.join(directory, "stderr"))
        os.environ.update(request["env"])
        sys.path[:0] = request["path"]
        wire.send(server, {"began": True})
        leg.run_directory(directory)
        _flush()
        wire.send(server, {"reported": True})
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        _flush()
    finally:
        os._exit(code)  # no atexit, no CUDA tear-down: the process is thrown away


def _print_to(stdout: str, stderr: str) -> None:
    _flush()
    for stream, name in ((1, stdout), (2, stderr)):
        target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(target, stream)
        os.close(target)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the leg may have closed it
            stream.flush()
