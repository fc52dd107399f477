"""The fork server: torch, triton (and flashinfer) imported once, CUDA untouched, one forked process a leg.

Started by :mod:`harness.launch` as ``python -m harness.forkserver FD[,LISTENER] PRELOAD…``. It speaks over socket FD:

    server -> client   {"ready": true, "pid": N}, {"error": "…"} or {"spoilt": "…"}, once
    client -> server   {"directory": …, "path": [...], "env": {...}, "shared": true | false}
    server -> client   {"pid": N, "shared": …} as the leg begins, then as it ends
                       {"status": wait status, "left": [...], "report": digest or null}
    client -> server   {"settle": true}
    server -> client   {"late": [wait status, …]}
    client -> server   {"forsake": true}

One leg runs at a time. A shared one runs in the resident (`harness.resident`), if that can be had; any other in a
process of its own. Once a few of those came in a row, the process of the next one is forked as one begins: a spare,
which on a GPU has its CUDA context by the time that it is needed. A resident and a spare each hold a context, some
500 MB of device memory. A driver makes and takes down one context at a time, so many servers do well to have few.

A leg has ended, with status 0, once its report is written and its device synchronised. Its process still has to be torn
down, which takes a while with a CUDA context: the next leg does not wait for that. Whether one died of a signal then is
what ``settle`` says, once all are gone. What a leg leaves behind, a daemon, too, ends with its process: it is adopted.
When the client goes away, so do all of them, and the server.

With a listener it is a zygote: it runs no leg, and whoever connects to that gets a fork of it (`harness.zygote`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from harness import launch, orphans, wire
from harness.child import Child, run_one

if TYPE_CHECKING:
    from typing import TypeGuard

TEAR_DOWN = 60.0  # seconds that a process may take to go, once it has reported
IN_A_ROW = 3  # legs with processes of their own, before there is a spare for the next


def main(client: socket.socket, preload: list[str], listener: socket.socket | None = None) -> None:
    try:
        for name in preload:
            with _cuda_untouched():
                importlib.import_module(name)
            if name == "torch":
                _count_mig()
        _import_what_legs_import()
    except BaseException as error:
        _send(client, {"error": f"{type(error).__name__}: {error}"})
        return
    on_gpu = os.environ.get("CUDA_VISIBLE_DEVICES") != "" and _sees_a_gpu()
    if on_gpu and not _forks_can_use_cuda():
        # the runtime can be initialised past torch's back, by one call in C that no import is refused for
        _send(client, {"spoilt": f"importing {', '.join(preload[-1:])} leaves CUDA unusable in forked processes"})
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the client's: it ends this server by going away
    sys.stdout.flush()  # or every leg would print again what an import did
    gc.collect()
    gc.freeze()  # a collection in a leg would touch, and so copy, all that was imported here
    _send(client, {"ready": True, "pid": os.getpid()})
    if listener:
        client = _forked_for_a_client(client, listener, launch.kind(preload, os.environ))
    Server(client, _make_context if on_gpu else lambda: None).serve()
    os._exit(0)  # at an orderly exit, libraries complain of what is frozen


class Server:
    """Legs for one client, one after the other. ``prepare``: what a spare does before there is a leg for it."""

    def __init__(self, client: socket.socket, prepare: Callable[[], None]):
        self._client, self._prepare = client, prepare
        self._resident: Child | None = None
        self._spare: Child | None = None
        self._leg: Child | None = None
        self._alone = 0  # legs since the last shared one
        self._leaving: list[Child] = []  # they have reported
        self._late: list[int] = []  # statuses that no leg may end with, of those
        orphans.adopt()
        self._others = orphans.children()  # what an import may have started

    def serve(self) -> None:
        """Until the client goes away."""
        try:
            while True:
                self._wait(self._client)
                request = wire.receive(self._client)
                if "settle" in request:
                    self._settle()
                elif "forsake" in request:
                    self._forsake()
                else:
                    self._run(request)
        except ConnectionError:
            pass
        finally:
            children = self._children()
            for child in children:
                child.kill()
            for child in children:
                child.end()
            orphans.end(self._others)

    def _children(self) -> set[Child]:
        return {*filter(None, (self._leg, self._spare, self._resident)), *self._leaving}

    def _run(self, request: dict[str, Any]) -> None:
        self._leg = leg = self._begun(request)
        shared = leg is self._resident
        _send(self._client, {"pid": leg.pid, "shared": shared})
        self._alone = 0 if shared else self._alone + 1
        if self._alone >= IN_A_ROW:
            self._spare = self._spare or self._next()
        status, left, digest = 0, [], None
        if leg.wire in self._wait(leg.wire, leg.pidfd) and (report := leg.said("reported")):
            left, digest = report.get("left", []), report["reported"]
            if not shared or left:
                self._leave(leg)
        else:
            self._wait(leg.pidfd)
            status = self._seen_off(leg)
            self._resident = None if shared else self._resident
        self._leg = None
        _send(self._client, {"status": status, "left": left, "report": digest})

    def _leave(self, child: Child) -> None:
        """It has reported for the last time."""
        child.until = time.monotonic() + TEAR_DOWN
        self._leaving.append(child)
        if child is self._resident:
            self._resident = None

    def _forsake(self) -> None:
        """The next shared leg gets another resident."""
        if resident := self._resident:
            resident.kill()
            self._leave(resident)

    def _begun(self, request: dict[str, Any]) -> Child:
        """The process that this leg runs in: the resident for a shared one, or else the spare.

        Where that is dead or dies of what it prepares, a bare one. That may die, too, before it has begun: then that is
        how the leg ended.
        """
        if request["shared"]:
            for found in (lambda: self._resident, lambda: self._forked(self._live_on)):  # one, or else another
                self._resident = found()
                if self._begins(self._resident, request):
                    return self._resident
            self._resident = None
        spare, self._spare = self._spare, None
        if self._begins(spare, request):
            return spare
        bare = self._leg = self._fork(lambda server: run_one(server, lambda: None))
        self._hears(bare, request)
        return bare

    def _begins(self, child: Child | None, request: dict[str, Any]) -> TypeGuard[Child]:
        """False where there is none, or no longer."""
        self._leg = child  # to be ended with the server
        if child and not self._hears(child, request):
            self._leg = None
            self._seen_off(child)
        return self._leg is not None

    def _hears(self, child: Child, request: dict[str, Any]) -> bool:
        return bool(child.give(request) and child.wire in self._wait(child.wire, child.pidfd) and child.said("began"))

    def _settle(self) -> None:
        while self._leaving:
            self._look()
        late, self._late = self._late, []
        _send(self._client, {"late": late})

    def _wait(self, *sources: Any) -> list[Any]:
        """Those that are readable, once one is."""
        while not (ready := self._look(*sources)):
            pass
        return ready

    def _look(self, *sources: Any) -> list[Any]:
        """Those that are readable; none if something else happened. Raises ConnectionError if the client has gone.

        Something else is a process that left: it is seen off, and killed where it doesn't leave in time.
        """
        watched = {*sources, self._client, *(child.pidfd for child in self._leaving)}
        patience = min((max(0.0, child.until - time.monotonic()) for child in self._leaving), default=None)
        readable, _, _ = select.select(watched, [], [], patience)
        for child in list(self._leaving):
            if child.pidfd in readable or child.until <= time.monotonic():
                self._leaving.remove(child)
                if (status := self._seen_off(child)) not in (0, signal.SIGKILL):
                    self._late.append(status)
        if self._client in readable and self._client not in sources:  # it sends nothing while it waits for an answer
            raise ConnectionError("the client has gone")
        return [source for source in sources if source in readable]

    def _seen_off(self, child: Child) -> int:
        """Its wait status. It is gone then, with all that it left behind."""
        status = child.end()
        orphans.end(self._others | {child.pid for child in self._children()})
        return status

    def _next(self) -> Child | None:
        return self._forked(lambda server: run_one(server, self._prepare))

    def _live_on(self, server: socket.socket) -> None:
        from harness import resident  # imports torch, which `main` must be the first to do

        resident.live(server, self._prepare)

    def _forked(self, live: Callable[[socket.socket], None]) -> Child | None:
        with contextlib.suppress(OSError):  # no process or memory for it: the leg that needs one will say so
            return self._fork(live)
        return None

    def _fork(self, live: Callable[[socket.socket], None]) -> Child:
        return Child(live, [self._client, *(child.wire for child in self._children())])


def _forked_for_a_client(owner: socket.socket, listener: socket.socket, kind: dict[str, Any]) -> socket.socket:
    """Returns in each fork, with its client. The process itself ends when its owner goes away."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a fork is its client's to see off
    while owner not in select.select([owner, listener], [], [])[0]:
        client, _ = listener.accept()
        wanted, pid = None, 1
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # the client starts a server for itself
            client.settimeout(10)
            wanted = wire.receive(client)
            pid = os.fork() if wanted["kind"] == kind else pid
        if wanted and pid == 0:
            owner.close()
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            client.settimeout(None)
            os.environ.clear()
            os.environ.update(wanted["env"])
            _count_mig()
            _send(client, {"ready": True, "pid": os.getpid()})
            return client
        client.close()
    os._exit(0)


def _import_what_legs_import() -> None:
    """Whatever their overlay: nothing of this lies under one, or touches CUDA.

    tvm_ffi is not among it, though it takes its time: as it loads it installs a handler that names the C function which
    died, and a leg resets what it was forked with.
    """
    import torch

    import harness.resident  # noqa: F401

    torch.set_num_threads(1)
    with contextlib.suppress(ImportError):  # older ones have none
        import triton.experimental.gluon  # noqa: F401  imported at a kernel's first launch
    if not os.environ.get("TRITON_INTERPRET"):
        with contextlib.suppress(ImportError, AttributeError):  # of a compiled one, too: a digest of Triton's own files
            importlib.import_module("triton.compiler.code_generator")
            importlib.import_module("triton.runtime.cache").triton_key()


def _make_context() -> None:
    torch = sys.modules["torch"]
    torch.cuda.init()
    torch.cuda.synchronize()


def _count_mig() -> None:
    """NVML can't count MIG devices, so torch asks the CUDA runtime, which would spoil forks. CUDA shows just one.

    Once CUDA is initialised, as in a leg, torch asks the runtime: torch 2.11 does where NVML can't say, which is -1.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
        cuda = sys.modules["torch"].cuda
        cuda._device_count_nvml = lambda: -1 if cuda.is_initialized() else 1


def _sees_a_gpu() -> bool:
    """False where there is none: that is for a leg to say."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_available()


def _forks_can_use_cuda() -> bool:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            sys.modules["torch"].cuda.init()
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


def _send(client: socket.socket, message: dict[str, Any]) -> None:
    # a client that has gone is noticed by the next wait for it
    with contextlib.suppress(OSError):
        wire.send(client, message)


if __name__ == "__main__":
    client, *listener = (socket.socket(fileno=int(fd)) for fd in sys.argv[1].split(","))
    main(client, sys.argv[2:], *listener)
