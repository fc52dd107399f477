"""Trials: the command of a search, run with some fixes out.

A run is `pass` (exit code 0), `skip` (125), `timeout`, or else `fail`, a signal's end among them. With `fail_on`, a
regular expression, it fails exactly where a line of its output matches, and passes otherwise. A command that can't be
run (126, 127) ends the search.

Each run is a session of its own with nothing on stdin. When it ends, by itself, by its timeout or by Ctrl-C, all that
is left of that session is killed, grandchildren in process groups of their own among it; where this process is killed
itself, too. Only what starts a session of its own, as a daemon does, gets away.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from types import FrameType
from typing import IO

from harness.bisect import Answer, Selection
from harness.candidates import Candidates
from harness.errors import InfraError, UsageError
from harness.journal import Journal
from harness.warden import Warden, members

_SKIP, _CANNOT_RUN = 125, (126, 127)
_SHORTEST, _LONGEST = 0.005, 0.05  # seconds between two looks at a command that runs
_DYING = 30.0  # seconds that killed processes get: one that frees a GPU's memory takes its time
_LAST = 200  # characters of a line that are kept
_END = 4096  # bytes at the end of the output in which its last line is looked for


@dataclass(frozen=True)
class Run:
    """One run of the command."""

    out: tuple[str, ...]  # the fixes that were out
    kind: str  # pass, fail, timeout or skip
    seconds: float  # how long it took
    exit: int | None  # its exit code, a signal's number below zero, None after a timeout
    last: str  # the last line of its output that isn't blank


class Interrupted(Exception):
    """The run was killed because the search ends."""


class Trials:
    """Runs what a search asks for, several at once, and keeps every run. A context manager: it ends its processes.

    `began` and `ended` are told of each run; they are called by the threads that run them.
    """

    def __init__(
        self,
        candidates: Candidates,
        journal: Journal,
        *,
        jobs: int = 1,
        timeout: float | None = None,
        fail_on: re.Pattern[str] | None = None,
        began: Callable[[tuple[str, ...]], None] = lambda out: None,
        ended: Callable[[Run], None] = lambda run: None,
    ) -> None:
        self.runs: list[Run] = []
        self._candidates, self._journal = candidates, journal
        self._timeout, self._fail_on, self._began, self._ended = timeout, fail_on, began, ended
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._pool = ThreadPoolExecutor(jobs, thread_name_prefix="trial")
        self._warden = Warden()

    def __enter__(self) -> Trials:
        self._warden.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)
        self._warden.__exit__()

    def ask(self, selections: Sequence[Selection], runs: int) -> list[Answer]:
        """Run each of these selections so many times, or take runs from the journal; an answer each, in order."""
        futures: list[list[Future[Run]]] = [
            [self._pool.submit(self._one, out) for _ in range(runs)] for out in selections
        ]
        waiting = [future for several in futures for future in several]
        try:
            for future in wait(waiting, return_when=FIRST_EXCEPTION).done:
                future.result()
        except BaseException:
            self._stop.set()  # whoever raised: the others end at once, and nothing of them outlives the search
            for future in waiting:
                future.cancel()
            wait(waiting)
            raise
        return [Answer.of(Counter(future.result().kind for future in several)) for several in futures]

    def _one(self, selection: Selection) -> Run:
        out = self._candidates.ordered(selection)
        with self._lock:
            taken = self._journal.take(out)
        if taken is not None:
            ended = Run(**{**taken, "out": out})
        else:
            self._began(out)
            words, environment = self._candidates.under(out)
            ended = run(
                words, environment, out,
                timeout=self._timeout, fail_on=self._fail_on, stop=self._stop, warden=self._warden,
            )  # fmt: skip
            self._ended(ended)
            with self._lock:
                self._journal.add(asdict(ended))
        with self._lock:
            self.runs.append(ended)
        return ended


def run(
    words: Sequence[str],
    environment: Mapping[str, str],
    out: tuple[str, ...] = (),
    *,
    timeout: float | None = None,
    fail_on: re.Pattern[str] | None = None,
    stop: threading.Event | None = None,
    warden: Warden | None = None,
) -> Run:
    """Run a command to its end and say what that was; `out` is only noted.

    Raises UsageError where it can't be run, and Interrupted, when it is dead, once `stop` is set.
    """
    stop = stop or threading.Event()
    if stop.is_set():
        raise Interrupted
    with tempfile.TemporaryFile("w+b") as output:
        began = time.monotonic()
        try:
            process = subprocess.Popen(
                words, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        except OSError as error:
            raise UsageError(f"can't run {words[0]!a}: {error.strerror or error}") from None
        if warden:
            warden.begun(process.pid)
        try:
            in_time = _await(process.pid, None if timeout is None else began + timeout, stop)
        finally:
            seconds = time.monotonic() - began
            kill_session(process.pid)
            if warden:
                warden.ended(process.pid)
            process.wait()  # only now: as long as it isn't reaped, no other session can have its number
        if stop.is_set() and not in_time:
            raise Interrupted
        last = _last_line(output)
        if in_time and process.returncode in _CANNOT_RUN:
            raise UsageError(f"the command can't be run (exit code {process.returncode}): {last or words[0]}")
        kind = _kind(process.returncode, output, fail_on) if in_time else "timeout"
        return Run(out, kind, round(seconds, 3), process.returncode if in_time else None, last)


def _await(pid: int, deadline: float | None, stop: threading.Event) -> bool:
    """Whether the process ended, by itself and before the deadline. It isn't reaped."""
    pause = _SHORTEST
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if deadline is not None and time.monotonic() >= deadline:
            return False
        if stop.wait(pause if deadline is None else max(0.0, min(pause, deadline - time.monotonic()))):
            return False
        pause = min(2 * pause, _LONGEST)
    return True


def _kind(code: int, output: IO[bytes], fail_on: re.Pattern[str] | None) -> str:
    if code == _SKIP:
        return "skip"
    if fail_on is None:
        return "fail" if code else "pass"
    output.seek(0)
    lines = (line.decode("utf-8", "replace").rstrip("\r\n") for line in output)
    return "fail" if any(map(fail_on.search, lines)) else "pass"


def _last_line(output: IO[bytes]) -> str:
    output.seek(max(0, output.seek(0, os.SEEK_END) - _END))
    lines = [line.strip() for line in output.read().decode("utf-8", "replace").splitlines()]
    return next((line[:_LAST] for line in reversed(lines) if line), "")


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """What ends this process on request is a Ctrl-C, so that nothing that it started outlives it; once is enough."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    heeded = [number for number, handler in before.items() if handler != signal.SIG_IGN]  # nohup ignores one

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in heeded:  # a second one would interrupt the end of what the first one ends
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in heeded:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, before[number])


def kill_session(leader: int) -> None:
    """Kill every process of a session, and wait until they are gone. Its leader must not have been reaped.

    Raises InfraError where one of them doesn't die.
    """
    until, pause = time.monotonic() + _DYING, 0.0
    while left := members(leader):
        if time.monotonic() > until:
            raise InfraError(f"process {left[0]} of a trial doesn't die: end it, and begin again")
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(pause)
        pause = min(pause + _SHORTEST, _LONGEST)
