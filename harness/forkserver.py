"""The fork server: torch, triton (and flashinfer) imported once, CUDA untouched, one forked process a leg.

Started by :mod:`harness.sandbox` as ``python -m harness.forkserver FD PRELOAD…``. It speaks over socket FD:

    server -> client   {"ready": true}, {"error": "…"} or {"spoilt": "…"}, once
    client -> server   {"directory": …, "path": [...], "env": {...}}
    server -> client   {"pid": N} as the leg begins, then {"status": wait status} as it ends
    client -> server   {"settle": true}
    server -> client   {"late": [wait status, …]}

One leg runs at a time. The process of the next one is forked as that begins: a spare, which on a GPU has its CUDA
context by the time that it is needed (about 500 MB of device memory, one a server).

A leg has ended, with status 0, once its report is written and its device synchronised. Its process still has to be torn
down, which takes a while with a CUDA context: the next leg does not wait for that. Whether one died of a signal then is
what ``settle`` says, once all are gone. When the client goes away, so do all of them, and the server.
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
from typing import Any

from harness import wire
from harness.child import Child

TEAR_DOWN = 60.0  # seconds that a process may take to go, once it has reported


def main(fd: int, preload: list[str]) -> None:
    client = socket.socket(fileno=fd)
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
    _send(client, {"ready": True})
    Server(client, _make_context if on_gpu else lambda: None).serve()
    os._exit(0)  # at an orderly exit, libraries complain of what is frozen


class Server:
    """Legs for one client, one after the other. ``prepare``: what a spare does before there is a leg for it."""

    def __init__(self, client: socket.socket, prepare: Callable[[], None]):
        self._client, self._prepare = client, prepare
        self._spare: Child | None = None
        self._leg: Child | None = None
        self._leaving: list[Child] = []  # they have reported
        self._late: list[int] = []  # statuses that no leg may end with, of those

    def serve(self) -> None:
        """Until the client goes away."""
        try:
            self._spare = self._next()
            while True:
                self._wait(self._client)
                request = wire.receive(self._client)
                if "settle" in request:
                    self._settle()
                else:
                    self._run(request)
        except ConnectionError:
            pass
        finally:
            for child in filter(None, (self._leg, self._spare, *self._leaving)):
                child.end()

    def _run(self, request: dict[str, Any]) -> None:
        self._leg = leg = self._begun(request)
        _send(self._client, {"pid": leg.pid})
        self._spare = self._next()
        if leg.wire in self._wait(leg.wire, leg.pidfd) and leg.said("reported"):
            leg.until = time.monotonic() + TEAR_DOWN
            self._leaving.append(leg)
            status = 0
        else:
            self._wait(leg.pidfd)
            status = leg.end()
        self._leg = None
        _send(self._client, {"status": status})

    def _begun(self, request: dict[str, Any]) -> Child:
        """The process that this leg runs in: the spare or, where that is dead or dies of what it prepares, a bare one.

        A bare one may die, too, before it has begun. That is then how the leg ended.
        """
        spare, self._spare = self._spare, None
        if spare and self._begins(spare, request):
            return spare
        if spare:
            self._leg = None
            spare.end()
        bare = self._fork(lambda: None)
        self._begins(bare, request)
        return bare

    def _begins(self, child: Child, request: dict[str, Any]) -> bool:
        self._leg = child  # to be ended with the server
        return child.give(request) and child.wire in self._wait(child.wire, child.pidfd) and child.said("began")

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
                if (status := child.end()) not in (0, signal.SIGKILL):
                    self._late.append(status)
        if self._client in readable and self._client not in sources:  # it sends nothing while it waits for an answer
            raise ConnectionError("the client has gone")
        return [source for source in sources if source in readable]

    def _next(self) -> Child | None:
        with contextlib.suppress(OSError):  # no process or memory to spare: the leg that needs one will say so
            return self._fork(self._prepare)
        return None

    def _fork(self, prepare: Callable[[], None]) -> Child:
        others = filter(None, (self._leg, self._spare, *self._leaving))
        return Child(prepare, [self._client, *(child.wire for child in others)])


def _import_what_legs_import() -> None:
    """Whatever their overlay: nothing of this lies under one, or touches CUDA.

    tvm_ffi is not among it, though it takes its time: as it loads it installs a handler that names the C function which
    died, and a leg resets what it was forked with.
    """
    import torch

    import harness.memory
    import harness.reach  # noqa: F401

    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET"):
        with contextlib.suppress(ImportError):  # older ones have none
            import triton.experimental.gluon  # noqa: F401  the interpreter imports it at a kernel's first launch


def _make_context() -> None:
    torch = sys.modules["torch"]
    torch.cuda.init()
    torch.cuda.synchronize()


def _count_mig() -> None:
    """NVML can't count MIG devices, so torch asks the CUDA runtime, which would spoil forks. CUDA shows just one.

    Once CUDA is initialised, as in a leg, torch asks the runtime and this no more.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
        sys.modules["torch"].cuda._device_count_nvml = lambda: 1


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
    main(int(sys.argv[1]), sys.argv[2:])
