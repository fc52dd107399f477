"""One process that has imported what every leg needs, and of which a run's fork servers are forks.

The imports take seconds and are the same in every worker: `unfix run` pays them once. A sandbox finds the zygote by
$UNFIX_ZYGOTE, the path of a socket in a folder of this user's own. Nothing depends on it: where it is gone, or has
imported something else, a sandbox starts a server for itself.

    sandbox -> zygote    {"kind": `launch.kind`, "env": {...}}
    server -> sandbox    {"ready": true, "pid": N}, and goes on as a fork server does (`harness.forkserver`)

Such a server belongs to its sandbox, and ends when that goes away, not when the zygote does.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from harness import launch, wire

START = 300.0  # seconds for its imports


@contextlib.contextmanager
def opened(device: str) -> Iterator[None]:
    """Sandboxes of this process, and of those that it starts meanwhile, get forks of one for this device.

    Raises InfraError where no process can be started. What it can't import is told by the server that needs it.
    """
    with contextlib.ExitStack() as undo:
        folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="unfix-zygote-", ignore_cleanup_errors=True))
        listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        address = os.path.join(folder, "socket")
        try:
            listener.bind(address)
        except OSError:  # a path too long for a socket
            undo.close()
            yield
            return
        listener.listen(256)
        process, owner = launch.start(launch.preload(device), launch.environment(device), listener)
        listener.close()  # or a connection would wait for one that has died
        undo.callback(_end, process, owner)
        os.environ[launch.ZYGOTE] = address
        undo.callback(os.environ.pop, launch.ZYGOTE, None)
        yield


def fork(preload: Sequence[str], env: Mapping[str, str]) -> tuple[Forked, socket.socket] | None:
    """A server of this kind with this environment, ready for legs; None where there is no zygote for it."""
    if not (address := os.environ.get(launch.ZYGOTE)):
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(START)
        connection.connect(address)
        wire.send(connection, {"kind": launch.kind(preload, env), "env": dict(env)})
        return Forked(wire.receive(connection)["pid"]), connection
    except (OSError, ValueError, KeyError):
        connection.close()
        return None


class Forked:
    """A server that is no child of ours, as `subprocess.Popen` would show it."""

    def __init__(self, pid: int):
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """None as long as it runs."""
        return 0 if select.select([self._pidfd], [], [], 0)[0] else None

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if not select.select([self._pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"fork server {self.pid}", timeout or 0.0)
        return 0

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it was gone before it could be watched
            os.close(self._pidfd)


def _end(process: subprocess.Popen[bytes], owner: socket.socket) -> None:
    process.kill()  # it may still import, and has nothing to lose
    process.wait()
    owner.close()
