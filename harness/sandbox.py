"""Throwaway processes: run a leg, whatever it does to itself, and say how it ended.

``UNFIX_SANDBOX=inline`` runs legs in this process, for a debugger: a crash then takes the debugger's process along.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.machinery
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.device import compute_capabilities
from harness.errors import InfraError
from harness.reach import Target

CAPTURE_BYTES = 1 << 16  # of each stream, its end: where a process says why it died


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


@dataclass(frozen=True)
class Ending:
    """How a leg's process ended, and what it left."""

    report: dict[str, Any] | None  # None: the process died before it could write one
    reached: tuple[str, ...]
    stdout: str
    stderr: str
    exit_code: int | None  # None: killed by `signal`
    signal: str | None  # "SIGSEGV", …
    timed_out: bool
    seconds: float
    read: tuple[str, ...] | None = None  # as `harness.reads` has it; None: not known


class Sandbox:
    """A fork server for one device. Started on first use, again after it dies. Not thread-safe: one leg at a time."""

    def __init__(self, device: str, preload: Sequence[str] = (), path: Sequence[str] = ()):
        self.device = device
        flashinfer = ["flashinfer"] if device == "cuda" and installed("flashinfer", path) else []
        self._preload = ["numpy", "torch", "triton", *flashinfer]
        self._slow = list(preload)  # imported, too, where that leaves CUDA usable; else each leg imports it for itself
        self._path = [*path, str(Path(__file__).parents[1])]
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

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

    def run(self, request: Request) -> Ending:
        """Run one leg to its end. Raises InfraError where the server, not the leg, is at fault."""
        if os.environ.get("UNFIX_SANDBOX") == "inline":
            return _run_inline(request)
        try:
            directory = tempfile.mkdtemp(prefix="unfix-leg-")
        except OSError as error:
            raise InfraError(f"no folder for a leg could be made in {tempfile.gettempdir()}: {error}") from error
        try:
            # what the fork server needs is not the leg's request
            wanted = {k: v for k, v in dataclasses.asdict(request).items() if k not in ("path", "timeout")}
            Path(directory, "request.json").write_text(json.dumps(wanted))
            connection = self._start()  # not the leg's time
            started = time.monotonic()
            status, timed_out = self._fork(connection, directory, request)
            return _read(directory, status, timed_out, time.monotonic() - started)
        except OSError as error:
            raise InfraError(f"a leg's directory under {tempfile.gettempdir()} could not be used: {error}") from error
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _fork(self, connection: socket.socket, directory: str, request: Request) -> tuple[int, bool]:
        path = list(request.path)
        env = {"PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
        pid = 0
        try:
            connection.settimeout(30)
            connection.sendall(json.dumps({"directory": directory, "path": path, "env": env}).encode() + b"\n")
            pid = self._receive(connection)["pid"]
            connection.settimeout(request.timeout)
            try:
                return self._receive(connection)["status"], False
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                connection.settimeout(30)
                return self._receive(connection)["status"], True
        except (OSError, ValueError, KeyError) as error:
            if pid:  # a leg outlives a server that was killed
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
            self.close()
            raise InfraError(f"the fork server was lost while a leg ran ({type(error).__name__}: {error})") from error

    def _start(self) -> socket.socket:
        if self._process and self._process.poll() is None and self._socket:
            return self._socket
        self.close()
        ours, theirs = socket.socketpair()
        env = {k: v for k, v in os.environ.items() if k not in ("SGLANG_DEBUG_REVERT_PR", "TRITON_INTERPRET")}
        env["PYTHONPATH"] = os.pathsep.join([*self._path, env.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        if self.device == "cpu":
            env["TRITON_INTERPRET"] = "1"  # read when triton is imported: it belongs to the server, not to a leg
            env["CUDA_VISIBLE_DEVICES"] = ""
        else:
            # told the architecture, flashinfer does not ask the GPU for it on import, which would initialise CUDA
            env.setdefault("FLASHINFER_CUDA_ARCH_LIST", " ".join(sorted(set(compute_capabilities()))))
            env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # torch.cuda.is_available() by the runtime spoils later forks
        command = [sys.executable, "-m", "harness.forkserver", str(theirs.fileno()), *self._preload, *self._slow]
        try:  # what an import prints is a note, and not a result
            self._process = subprocess.Popen(
                command, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=2
            )
        except OSError as error:
            ours.close()
            raise InfraError(f"no fork server could be started: {error}") from error
        finally:
            theirs.close()
        self._socket = ours
        ours.settimeout(300)
        try:
            hello = self._receive(ours)
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
        return ours

    @staticmethod
    def _receive(connection: socket.socket) -> dict[str, Any]:
        line = bytearray()
        while not line.endswith(b"\n"):
            chunk = connection.recv(1)  # replies are a few bytes; a larger read could take the next one along
            if not chunk:
                raise ConnectionError("connection closed")
            line += chunk
        message: dict[str, Any] = json.loads(line)
        return message


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
        server = self._open.pop(key, None) or Sandbox(self._device, self._preload, path)
        self._open[key] = server  # the last used is the last to go
        while len(self._open) > self.KEPT:
            self._open.pop(next(iter(self._open))).close()
        return server.run(request)

    def close(self) -> None:
        """End all servers."""
        while self._open:
            self._open.popitem()[1].close()


def installed(package: str, path: Sequence[str] = ()) -> bool:
    """Whether a leg with this path in front of its import path can import the package."""
    try:
        here = importlib.machinery.PathFinder.find_spec(package, list(path)) if path else None
        return (here or importlib.util.find_spec(package)) is not None
    except ModuleNotFoundError:  # the parent of a dotted name
        return False


def _tail(path: Path) -> str:
    with contextlib.suppress(OSError), open(path, "rb") as stream:
        stream.seek(max(0, path.stat().st_size - CAPTURE_BYTES))
        return stream.read().decode("utf-8", "replace")
    return ""


def _read(directory: str, status: int, timed_out: bool, seconds: float) -> Ending:
    folder = Path(directory)
    report, read = folder / "report.json", folder / "read"
    killed_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    return Ending(
        report=json.loads(report.read_text()) if report.exists() else None,
        reached=tuple(_tail(folder / "reached").split("\n")[:-1]),
        stdout=_tail(folder / "stdout"),
        stderr=_tail(folder / "stderr"),
        exit_code=None if killed_by else os.waitstatus_to_exitcode(status),
        signal=signal.Signals(killed_by).name if killed_by else None,
        timed_out=timed_out,
        seconds=round(seconds, 4),
        read=tuple(read.read_text(errors="surrogateescape").split("\n")[:-1]) if read.exists() else None,
    )


@contextlib.contextmanager
def _import_path(path: Sequence[str]) -> Iterator[None]:
    """The overlay in front of sys.path, and nothing of it left in sys.modules afterwards."""
    before = set(sys.modules)
    sys.path[:0] = path
    try:
        yield
    finally:
        del sys.path[: len(path)]
        # a checkout holds its .venv: what is installed there stays, torch can't be imported twice
        installed = tuple(sysconfig.get_paths()[name] for name in ("purelib", "platlib"))
        for name in set(sys.modules) - before:
            file = str(getattr(sys.modules[name], "__file__", None) or "")
            if file.startswith(tuple(path)) and not file.startswith(installed):
                del sys.modules[name]


def _run_inline(request: Request) -> Ending:
    from harness import leg

    reached: list[str] = []
    started = time.monotonic()
    wanted = {k: v for k, v in dataclasses.asdict(request).items() if k not in ("path", "timeout")}
    if request.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    with _import_path(request.path):
        report = leg.run(wanted, reached.append)
    return Ending(report, tuple(reached), "", "", 0, None, False, round(time.monotonic() - started, 4))
