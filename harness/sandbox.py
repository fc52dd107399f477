"""Throwaway processes: run a leg, whatever it does to itself, and say how it ended.

``UNFIX_SANDBOX=inline`` runs legs in this process, for a debugger: a crash then takes the debugger's process along.
``UNFIX_SANDBOX=isolated`` gives every leg a process of its own, those, too, that may share one (`harness.resident`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import ending, inline, launch, orphans, wire, zygote
from harness.ending import Ending
from harness.errors import InfraError
from harness.reach import Target

START = 120.0  # seconds for a leg to begin: the CUDA context of a spare may take a while on a busy machine


@dataclass(frozen=True)
class Request:
    """One leg to run."""

    entry: str  # "module:function", called with (params, device)
    params: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    path: Sequence[str] = ()  # in front of sys.path: the overlay first, then the source roots
    targets: Sequence[Target] = ()
    detector: str = "none"
    zone_bytes: int = 4096
    timeout: float = 120.0  # seconds
    roots: Sequence[str] = ()  # which of the files under these it reads is in its ending; () for nobody asks
    shared: bool = False  # declared to leave its process as it was: it may run where others did, and will


class Sandbox:
    """A fork server for one device. Started on first use, again after it dies. Not thread-safe: one leg at a time."""

    def __init__(self, device: str, preload: Sequence[str] = (), path: Sequence[str] = ()):
        self.device = device
        self._preload = launch.preload(device, path)
        self._slow = list(preload)  # imported, too, where that leaves CUDA usable; else each leg imports it for itself
        self._path = path
        self._process: subprocess.Popen[bytes] | zygote.Forked | None = None
        self._socket: socket.socket | None = None
        self._unsettled = False  # a leg's process may still be on its way out

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server, and with it a leg that still runs."""
        if self._socket:
            self._socket.close()
        if self._process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
            self._process.kill()
            self._process.wait()
        self._process = self._socket = None
        self._unsettled = False

    def run(self, request: Request, *, shared: bool = False) -> Ending:
        """Run one leg to its end, in a process of its own unless ``shared``.

        Raises InfraError where the server, not the leg, is at fault.
        """
        if os.environ.get("UNFIX_SANDBOX") == "inline":
            return inline.run(_of_a_leg(request), request.path)
        try:
            directory = tempfile.mkdtemp(prefix="unfix-leg-")
        except OSError as error:
            raise InfraError(f"no folder for a leg could be made in {tempfile.gettempdir()}: {error}") from error
        try:
            Path(directory, "request.json").write_text(json.dumps(_of_a_leg(request)))
            connection = self._start()  # not the leg's time
            started = time.monotonic()
            said, timed_out = self._fork(connection, directory, request, shared)
            self._unsettled |= said["status"] == 0 and bool(not said["shared"] or said["left"])
            found = ending.read(directory, said["status"], said["report"], timed_out, time.monotonic() - started)
            if found.report is None and os.path.isdir(directory):  # on a full disk it could not even say why
                Path(directory, "room").write_bytes(bytes(1 << 16))
            return dataclasses.replace(found, shared=said["shared"], left=tuple(said["left"]))
        except OSError as error:
            raise InfraError(f"a leg's directory under {tempfile.gettempdir()} could not be used: {error}") from error
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def settle(self) -> None:
        """Wait until the processes of all legs are gone: one's ending is known as soon as its report is written.

        Raises InfraError where one was killed by a signal after that, and where the server is at fault.
        """
        if not (self._socket and self._unsettled):
            return
        self._unsettled = False
        try:
            self._socket.settimeout(START)
            wire.send(self._socket, {"settle": True})
            late = wire.receive(self._socket)["late"]
        except (OSError, ValueError, KeyError) as error:
            self.close()
            raise InfraError(f"the fork server was lost after a leg ({type(error).__name__}: {error})") from error
        if late:
            code = os.waitstatus_to_exitcode(late[0])
            how = signal.Signals(-code).name if code < 0 else f"exit {code}"
            raise InfraError(f"a leg's process died after its report ({how}): what it reported is not to be believed")

    def forsake(self) -> None:
        """Have no leg run where others did before this call: what one of them did there was not as declared."""
        if self._socket:
            with contextlib.suppress(OSError):  # lost: the next leg will say so
                wire.send(self._socket, {"forsake": True})

    def _fork(
        self, connection: socket.socket, directory: str, request: Request, shared: bool
    ) -> tuple[dict[str, Any], bool]:
        """What the server said of the leg, in all, and whether the leg had to be stopped."""
        path = list(request.path)
        env = {"PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
        pid = 0
        try:
            connection.settimeout(START)
            wire.send(connection, {"directory": directory, "path": path, "env": env, "shared": shared})
            begun = wire.receive(connection)
            pid = begun["pid"]
            connection.settimeout(request.timeout)
            try:
                return begun | wire.receive(connection), False
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                connection.settimeout(30)
                return begun | wire.receive(connection), True
        except (OSError, ValueError, KeyError) as error:
            if pid:  # a leg outlives a server that was killed
                _end_tree(pid)
            self.close()
            raise InfraError(f"the fork server was lost while a leg ran ({type(error).__name__}: {error})") from error

    def _start(self) -> socket.socket:
        if self._process and self._process.poll() is None and self._socket:
            return self._socket
        self.close()
        preload = [*self._preload, *self._slow]
        env = launch.environment(self.device, self._path)
        if forked := zygote.fork(preload, env):
            self._process, self._socket = forked
            return self._socket
        self._process, self._socket = launch.start(preload, env)
        self._socket.settimeout(zygote.START)
        try:
            hello = wire.receive(self._socket)
        except (OSError, ValueError) as error:
            self.close()
            raise InfraError(f"the fork server did not start ({type(error).__name__}: {error})") from error
        if "spoilt" in hello and self._slow:
            print(f"unfix: {hello['spoilt']}; each leg imports it for itself, slowly", file=sys.stderr)
            self.close()
            self._slow = []
            return self._start()
        if "spoilt" in hello:
            hello["error"] = hello["spoilt"]
        if "error" in hello:
            self.close()
            raise InfraError(
                f"a package that every leg needs does not import: {hello['error']} (python {sys.executable}; "
                "install it there, or run from the project's .venv)"
            )
        return self._socket


class Servers:
    """The fork servers of one run: one for all legs, or, where the code under test is slow to import, one an overlay.

    Such a server has imported the overlaid code, so that a leg costs a fork. Only the last few are kept: each is as
    large as what it imported.
    """

    KEPT = 4

    def __init__(self, device: str, preload: Sequence[str] = ()):
        self._device, self._preload = device, preload
        self._open: dict[Path | None, Sandbox] = {}

    @classmethod
    def around(cls, sandbox: Sandbox) -> Servers:
        """One that is open already serves all legs."""
        servers = cls(sandbox.device)
        servers._open[None] = sandbox
        return servers

    def run(self, tree: Path | None, request: Request) -> Ending:
        """Run a leg of an overlay (None: of the sources as they are). Raises InfraError as ``Sandbox.run`` does."""
        key = tree if self._preload else None
        path = request.path if self._preload else ()
        apart = self._preload or request.roots or os.environ.get("UNFIX_SANDBOX") == "isolated"
        server = self._open.pop(key, None) or Sandbox(self._device, self._preload, path)
        self._open[key] = server  # the last used is the last to go
        while len(self._open) > self.KEPT:
            with self._open.pop(next(iter(self._open))) as oldest:
                oldest.settle()
        return server.run(request, shared=request.shared and not apart)

    def forsake(self) -> None:
        """As ``Sandbox.forsake``, of all servers."""
        for server in self._open.values():
            server.forsake()

    def settle(self) -> None:
        """As ``Sandbox.settle``, of all servers: a case's legs are judged after this."""
        for server in self._open.values():
            server.settle()

    def close(self) -> None:
        """End all servers."""
        while self._open:
            self._open.popitem()[1].close()


def _end_tree(pid: int) -> None:
    below = orphans.descendants(pid)  # known before their parents are gone
    for kill, each in ((os.killpg, pid), *((os.kill, each) for each in below)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(each, signal.SIGKILL)


def _of_a_leg(request: Request) -> dict[str, Any]:
    """What the leg's process is told; the rest is for the fork server."""
    return {k: v for k, v in dataclasses.asdict(request).items() if k not in ("path", "timeout", "shared")}
