"""A process forked from the fork server: a spare, until it is given a leg; then that leg's own, to its end.

    server -> child   {"directory": …, "path": [...], "env": {...}}
    child -> server   {"began": true}, then {"reported": digest} with its report written and nothing left to run

Until it has begun, nothing of a leg has run in it: a child that dies before that costs nothing. What it prints until
then goes nowhere. A spare ends by itself when its server does. A resident (`harness.resident`) is a child, too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from harness import leg, orphans, wire


class Child:
    """The server's end of it. ``pidfd`` is readable once it has ended, ``wire`` where it has said something."""

    def __init__(self, live: Callable[[socket.socket], None], inherited: Iterable[socket.socket]):
        """``live``: all that it does. ``inherited``: the server's own ends, which it must not hold open."""
        self.wire, theirs = wire.pair()
        self.pid = os.fork()
        if self.pid == 0:
            for end in (self.wire, *inherited):
                end.close()
            _live(theirs, live)
        theirs.close()
        self.pidfd = os.pidfd_open(self.pid)
        self.until = 0.0  # when it must have ended, once it has reported

    def give(self, request: dict[str, Any]) -> bool:
        """Hand it a leg. False where it has died already."""
        with contextlib.suppress(OSError):
            wire.send(self.wire, request)
            return True
        return False

    def said(self, word: str) -> dict[str, Any] | None:
        """What it said, if that has this word and is not its last breath. To be asked where ``wire`` is readable."""
        with contextlib.suppress(OSError):
            message = wire.receive(self.wire)
            return message if word in message else None
        return None

    def kill(self) -> None:
        """It, and all that it left in its process group. Its end is still to be waited for."""
        for kill in (os.killpg, os.kill):  # it may not have got as far as a group of its own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)

    def end(self) -> int:
        """Its wait status; killed if it still runs."""
        self.kill()
        status = os.waitpid(self.pid, 0)[1]
        os.close(self.pidfd)
        self.wire.close()
        return status


def run_one(server: socket.socket, prepare: Callable[[], None]) -> None:
    """What a spare does: ``prepare`` itself, run one leg, and end."""
    prepare()
    request = wire.receive(server)
    begin(server, request)
    digest = leg.run_directory(request["directory"])
    flush()
    wire.send(server, {"reported": digest})


def begin(server: socket.socket, request: dict[str, Any]) -> None:
    """From here on, this process is the leg's."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server, and so its children, ignores it
    print_to(*(os.path.join(request["directory"], name) for name in ("stdout", "stderr")))
    os.environ.update(request["env"])
    sys.path[:0] = request["path"]
    wire.send(server, {"began": True})


def _live(server: socket.socket, live: Callable[[socket.socket], None]) -> NoReturn:
    code = 70  # an exit that no leg reports by itself: the set-up failed
    try:
        os.setsid()
        orphans.adopt()  # a leg's are its own, as long as it lives; then they are the server's
        print_to(os.devnull, os.devnull)
        live(server)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        flush()
    finally:
        os._exit(code)  # no atexit, no CUDA tear-down: the process is thrown away


def print_to(stdout: str, stderr: str) -> None:
    """Both streams go there, those of C and of other programs, too."""
    flush()
    for stream, name in ((1, stdout), (2, stderr)):
        target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(target, stream)
        os.close(target)


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the leg may have closed it
            stream.flush()
