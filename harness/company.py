"""Legs in company: many run in one process each, so that thousands cost less than a fork and a CUDA context apiece.

A prover runs its legs by this as by `harness.sandbox.Servers`, and need not know. It is asked twice about each case:
first its legs are only noted; then they are run, in chunks, side by side; then it gets their endings, and judges.

    with company.noting() as noted: …    what is run in here is written down instead
    company.ahead(…)                     the noted legs run
    company.run(…)                       such a leg's ending; a leg that was not run ahead is, alone

A leg that dies, hangs or spoils its process costs that process: it runs alone then, isolated as any case is, and those
behind it in its chunk go on in another. What may not be believed of a leg in company, see `harness.sweep_leg`.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.ending import Ending
from harness.sandbox import Request, Sandbox, Servers

CHUNK = range(
    16, 500
)  # legs in one process: not so few that it spends its time starting, nor so many that one dies late
NOT_RUN = Ending(None, (), "", "it was only noted", None, "SIGKILL", False, 0.0)  # to a prover, infra


@dataclass
class Ran:
    """Legs that were run ahead, by their keys, and what that took."""

    ended: dict[str, Ending] = field(default_factory=dict)
    broke: set[str] = field(default_factory=set)  # they ended a process that they shared, and ran again alone
    together: int = 0  # legs that shared a process
    processes: int = 0  # that were shared
    alone: int = 0  # legs that had one of their own


class Company(Servers):
    """Up to ``jobs`` processes side by side. For a code base that each leg imports for itself."""

    def __init__(self, device: str, jobs: int):
        super().__init__(device)
        self._jobs, self._device, self._started = jobs, device, False
        self._noted: list[Request] | None = None
        self._ran = Ran()
        self._idle: queue.LifoQueue[Sandbox] = queue.LifoQueue()
        for _ in range(jobs):
            self._idle.put(Sandbox(device))

    def start(self, path: Sequence[str]) -> None:
        """Start all servers, which otherwise start as they are first used. ``path``: a leg's, see `Request`."""
        if not self._started:
            self._side_by_side([[Request("harness.leg:environment", device=self._device, path=path)]] * self._jobs)
        self._started = True

    @contextlib.contextmanager
    def noting(self) -> Iterator[list[Request]]:
        self._noted = []
        try:
            yield self._noted
        finally:
            self._noted = None

    def ahead(self, together: Sequence[Request], alone: Sequence[Request]) -> Ran:
        """Run legs, those of ``together`` in company. Raises InfraError where a server, not a leg, is at fault."""
        self._ran = Ran()
        self._side_by_side([[leg] for leg in alone] + _chunks(together, self._jobs))
        return self._ran

    def forget(self) -> None:
        """What was run ahead runs again, alone, if it is asked for."""
        self._ran = Ran()

    def run(self, tree: Path | None, request: Request) -> Ending:
        if self._noted is not None:
            if request not in self._noted:  # a prover may ask again where it learnt nothing
                self._noted.append(request)
            return NOT_RUN
        if self._ran.ended and (ending := self._ran.ended.get(key(request))):
            return ending
        self._ran.alone += 1
        with self._sandbox() as sandbox:
            return _alone(sandbox, request)

    def settle(self) -> None:
        """Each leg is settled as it ends."""

    def close(self) -> None:
        while not self._idle.empty():  # one that is busy was interrupted, and goes with this process
            self._idle.get().close()

    @contextlib.contextmanager
    def _sandbox(self) -> Iterator[Sandbox]:
        sandbox = self._idle.get()
        try:
            yield sandbox
        finally:
            self._idle.put(sandbox)

    def _side_by_side(self, chunks: Sequence[list[Request]]) -> None:
        if os.environ.get("UNFIX_SANDBOX") == "inline":
            return  # a debugger's: each leg runs as it is asked for
        waiting: queue.SimpleQueue[list[Request]] = queue.SimpleQueue()
        for chunk in chunks:
            waiting.put(chunk)
        failures: list[BaseException] = []

        def work() -> None:
            try:
                with self._sandbox() as sandbox:
                    while not failures:
                        self._chunk(sandbox, waiting.get_nowait())
            except queue.Empty:
                pass
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(self._jobs, len(chunks)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def _chunk(self, sandbox: Sandbox, legs: list[Request]) -> None:
        ran = self._ran
        while legs:
            ended = []
            if len(legs) > 1:
                ended = _in_one_process(sandbox, legs)
                ran.processes += 1
                ran.together += len(ended)
                ran.broke.update(map(key, legs[len(ended) :][:1]))
            if len(ended) < len(legs):
                ended.append(_alone(sandbox, legs[len(ended)]))
                ran.alone += 1
            ran.ended.update(zip(map(key, legs), ended, strict=False))
            legs = legs[len(ended) :]


def key(request: Request) -> str:
    """What tells a leg of a sweep from its others."""
    named = (request.entry, request.params, request.detector, request.zone_bytes, request.path[0])
    return json.dumps(named, default=dict)


def _alone(sandbox: Sandbox, asked: Request) -> Ending:
    """However the prover asked for it."""
    leg = Request(
        asked.entry,
        asked.params,
        asked.device,
        asked.path,
        asked.targets,
        asked.detector,
        asked.zone_bytes,
        asked.timeout,
    )
    ending = sandbox.run(leg)
    sandbox.settle()
    return ending


def _in_one_process(sandbox: Sandbox, legs: Sequence[Request]) -> list[Ending]:
    """How the first of them ended: all, or those before the one that ended the process."""
    with tempfile.TemporaryDirectory(prefix="unfix-chunk-") as folder:
        log = Path(folder, "log")
        wanted = {"legs": [{**vars(leg), "targets": list(map(vars, leg.targets))} for leg in legs], "log": str(log)}
        limit = sum(leg.timeout for leg in legs)
        chunk = _alone(sandbox, Request("harness.sweep_leg:run", wanted, legs[0].device, legs[0].path, timeout=limit))
        lines = log.read_text(encoding="utf-8").split("\n")[:-1] if log.exists() else []
    if chunk.report is None:  # it died; if all had ended, of what the last one did
        lines = lines[: len(legs) - 1]
    return [_ending(**json.loads(line)) for line in lines]


def _ending(report: dict[str, Any], reached: list[str]) -> Ending:
    return Ending(report, tuple(reached), "", "", 0, None, False, round(sum(report["seconds"].values()), 4))


def _chunks(legs: Sequence[Request], jobs: int) -> list[list[Request]]:
    """Of one overlay each. Legs that are alike become neighbours: they use the same compiled kernels."""
    by_path: dict[tuple[str, ...], list[Request]] = {}
    for leg in sorted(legs, key=key):
        by_path.setdefault(tuple(leg.path), []).append(leg)
    # three chunks a job, so that a slow one is not waited for by all others
    size = min(max(-(-len(legs) // (3 * jobs)), CHUNK.start), CHUNK.stop)
    return [group[at : at + size] for group in by_path.values() for at in range(0, len(group), size)]
