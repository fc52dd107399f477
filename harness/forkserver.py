"""The fork server: torch, triton (and flashinfer) imported once, CUDA untouched, one forked process a leg.

Started by :mod:`harness.sandbox` as ``python -m harness.forkserver FD PRELOAD…``. It speaks JSON lines over socket FD:

    server -> client   {"ready": true}, {"error": "…"} or {"spoilt": "…"}, once
    client -> server   {"directory": …, "path": [...], "env": {...}}
    server -> client   {"pid": N}, then {"pid": N, "status": wait status}

One leg runs at a time. When the client goes away, so do the running leg and the server.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any


def main(fd: int, preload: list[str]) -> None:
    connection = socket.socket(fileno=fd)
    lines = connection.makefile("r", encoding="utf-8")
    try:
        for name in preload:
            with _cuda_untouched():
                importlib.import_module(name)
        import harness.leg  # noqa: F401  every leg needs it: import it once

        if os.environ.get("TRITON_INTERPRET"):
            with contextlib.suppress(ImportError):  # older ones have none
                import triton.experimental.gluon  # noqa: F401  the interpreter imports it at a kernel's first launch
    except BaseException as error:
        _send(connection, {"error": f"{type(error).__name__}: {error}"})
        return
    if os.environ.get("CUDA_VISIBLE_DEVICES") != "" and not _forks_can_use_cuda():
        # the runtime can be initialised past torch's back, by one call in C that no import is refused for
        _send(connection, {"spoilt": f"importing {', '.join(preload[-1:])} leaves CUDA unusable in forked processes"})
        return
    _send(connection, {"ready": True})
    for line in lines:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            lines.close()  # holds the socket open, too: a leg that does would hide the server's death
            connection.close()
            _child(request)
        _send(connection, {"pid": pid})
        status = _wait(pid, connection)
        if status is None:
            return
        _send(connection, {"pid": pid, "status": status})


def _forks_can_use_cuda() -> bool:
    """True where there is no GPU either: that is for a leg to say."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return True
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.cuda.init()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@contextlib.contextmanager
def _cuda_untouched() -> Iterator[None]:
    """An import that would initialise CUDA, which no forked leg could use then, is refused at that very call."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    initialise = torch.cuda._lazy_init

    def refuse() -> None:
        raise RuntimeError("CUDA must stay untouched in a fork server: no leg forked from it could use it")

    torch.cuda._lazy_init = refuse
    try:
        yield
    finally:
        torch.cuda._lazy_init = initialise


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    # a client that has gone is noticed by the loop's next read
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def _wait(pid: int, connection: socket.socket) -> int | None:
    """The leg's wait status, or None when the client went away first. Kills what the leg left in its process group."""
    pidfd = os.pidfd_open(pid)
    try:
        watched: list[Any] = [pidfd, connection]
        readable, _, _ = select.select(watched, [], [])
    finally:
        os.close(pidfd)
    # The client sends nothing while a leg runs, so a readable socket means that it has gone.
    gone = pidfd not in readable
    _kill_group(pid)
    status = os.waitpid(pid, 0)[1]
    return None if gone else status


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _child(request: dict[str, Any]) -> None:
    """Become the leg: own process group, own stdio, the overlay in front of the import path. Never returns."""
    code = 70  # an exit that no leg reports by itself: the set-up below failed
    try:
        os.setsid()
        directory = request["directory"]
        for stream, name in ((1, "stdout"), (2, "stderr")):
            target = os.open(os.path.join(directory, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(target, stream)
            os.close(target)
        os.environ.update(request["env"])
        sys.path[:0] = request["path"]
        from harness import leg

        leg.run_directory(directory)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # no atexit, no CUDA tear-down: the process is thrown away


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
