"""The log of a run: JSON lines, written as cases end: a killed run keeps what it had, and another goes on from it.

    {"schema_version": 1, "run": {…}}          first: what was run, on what; all of it must be the same to go on
    {"collected": {"cases": N, "shard": …}}    how many cases the whole run has, those of an interrupted one counted;
                                               "left_out", if any: what others than unfix took out of it, a sentence
    {"environment": {…}}                       once a leg has told it
    {"result": {…}}                            one a case, as in the matrix; of two with one ``test`` the later counts
    {"ended": N}                               pytest's exit status; absent where the run was killed

What follows the last newline was being written when the run was killed, and is no line.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from harness import report
from harness.errors import InfraError, UsageError

Record = dict[str, Any]
MOST_BYTES = 1 << 28  # of a log or a matrix; 483 cases have half a megabyte


@dataclass
class Log:
    """What a log says so far."""

    run: dict[str, Any]
    collected: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Record] = field(default_factory=dict)  # by pytest's node id
    ended: int | None = None
    size: int = 0  # bytes that are whole lines

    def done(self) -> dict[str, Record]:
        """The cases that need not run again: those that something was learnt about."""
        return {test: record for test, record in self.results.items() if record["verdict"] != "infra"}

    def incomplete(self) -> list[str]:
        wanted, left_out = self.collected.get("cases"), self.collected.get("left_out")
        said = [left_out] if left_out else []
        if wanted is None:
            return [CUT_SHORT]
        if missing := self.missing():
            return [f"the run was cut short: {missing} of {wanted} cases did not run, or are not in its log", *said]
        if self.ended is None:
            return ["the run was cut short: its cases ran, but it did not come to its end", *said]
        return [*said, *([odd_end(self.ended)] if self.ended not in self._fitting() else [])]

    def _fitting(self) -> tuple[int, ...]:
        """How pytest ends where nothing but these verdicts happened."""
        kinds = {record["verdict"] for record in self.results.values()}
        if kinds - {"proved", "skipped"}:
            return (1,)
        return (0,) if "proved" in kinds else (0, InfraError.exit_code, 5)  # 5: it had nothing to run

    def missing(self) -> int:
        return max(0, self.collected.get("cases", 0) - len(self.results))


IDENTITY = ("target", "target_version", "target_commit", "commit", "sources")  # of a run's facts: what was tried
_CHANGED = {"sources": "the project or the code under test has changed since"}
CUT_SHORT = "the run was cut short before it knew its cases"


def odd_end(status: int) -> str:
    return f"pytest ended with {status}, for a reason that no verdict holds"


def read(path: Path) -> Log:
    """Raises UsageError for what is no log, with the line that is wrong."""
    try:
        whole, newline, _ = bytes_of(path).rpartition(b"\n")
    except OSError as error:
        raise UsageError(f"{path} could not be read: {error.strerror}") from None
    log: Log | None = None
    for number, line in enumerate(whole.split(b"\n") if newline else [], 1):
        try:
            entry = json.loads(line)
            if log is None:
                if entry["schema_version"] != report.SCHEMA_VERSION:
                    raise ValueError(f"schema_version {entry['schema_version']}")
                log = Log(dict(entry["run"]))
                _ = log.run["session_reverted"], log.run["shard"], [log.run[name] for name in IDENTITY]
            else:
                _add(log, entry)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            said = f"{type(error).__name__}: {str(error)[:200]}"
            raise UsageError(f"{path}:{number}: is no line of a run's log (unfix run --jsonl): {said}") from None
    if log is None:
        raise UsageError(f"{path}:1: is no run's log (unfix run --jsonl): its first line is not whole")
    log.size = len(whole) + 1
    return log


def empty(path: Path) -> None:
    """For a log that is begun anew. Raises UsageError where another run writes it."""
    with _opened(path) as stream:
        stream.truncate(0)


def bytes_of(path: Path) -> bytes:
    """A whole file, of a bounded size: a device or a pipe that is named by mistake would never end. Raises OSError."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it isn't a regular file")
        if status.st_size > MOST_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {MOST_BYTES >> 20} MiB")
        return stream.read()


def _add(log: Log, entry: dict[str, Any]) -> None:
    [(kind, value)] = entry.items()
    log.ended = None  # an earlier run's, which this one went on from
    if kind == "result":
        if fault := report.record_fault(value):
            raise ValueError(f"the result {fault}")
        log.results[value["test"]] = value
    elif kind == "collected":
        log.collected = {**value, "cases": int(value["cases"])}
    elif kind == "environment":
        log.environment = dict(value)
    elif kind == "ended":
        log.ended = int(value)
    else:
        raise ValueError(f"{kind} is none of result, collected, environment, ended")


def document(path: Path) -> dict[str, Any]:
    """The matrix that a log amounts to, whole or not. Raises UsageError as ``read`` does."""
    return matrix(read(path))


def matrix(log: Log) -> dict[str, Any]:
    run = log.run
    return report.matrix(
        log.environment or {name: run[name] for name in IDENTITY},
        list(log.results.values()),
        run["session_reverted"],
        shard=log.collected.get("shard") or run["shard"],
        incomplete=log.incomplete(),
    )


def check(path: Path, run: dict[str, Any], *, resume: bool) -> Log:
    """What a ``Writer`` would go on from. Raises as it does."""
    with _opened(path) as stream:
        return _before(path, run, stream, resume=resume)


def _opened(path: Path) -> IO[bytes]:
    """For one writer at a time."""
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is no file that a log can be kept in and gone on from")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream: IO[bytes] = open(path, "a+b", buffering=0)  # noqa: SIM115  open as long as the run is
    except OSError as error:
        raise InfraError(f"{path} could not be written: {error.strerror}") from None
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        stream.close()
        raise InfraError(f"{path} is being written by another run: wait for it, or name another file") from None
    return stream


def _before(path: Path, run: dict[str, Any], stream: IO[bytes], *, resume: bool) -> Log:
    """What there is to go on from: of the very same run, or nothing."""
    stream.seek(0)
    if not resume or b"\n" not in stream.read():
        return Log(dict(run))
    before = read(path)
    for name, wanted in run.items():
        if before.run.get(name) != wanted:
            what = f"{name} {before.run.get(name)!r} there, {wanted!r} here"
            raise UsageError(f"{path} is of another run: {_CHANGED.get(name, what)}; without --resume it starts anew")
    return before


class Writer:
    """Writes one log, and nobody else does at that time. ``before``: what was there to go on from.

    Raises InfraError where the file can't be written or is being written, UsageError where what is there to go on from
    is no log, or of another run.
    """

    def __init__(self, path: Path, run: dict[str, Any], *, resume: bool) -> None:
        self.lost = ""  # why lines are no longer kept
        self._path, self._stream = path, _opened(path)
        try:
            self.before = _before(path, run, self._stream, resume=resume)
            self._stream.truncate(self.before.size)
        except BaseException:
            self._stream.close()
            raise
        if not self.before.size:
            self.write("run", run, schema_version=report.SCHEMA_VERSION)

    def write(self, kind: str, value: Any, **more: Any) -> None:
        """A line, which is on its way to the disk when this returns. Where the disk won't, the log ends there."""
        if self.lost:
            return
        try:
            line = json.dumps({**more, kind: value}).encode() + b"\n"
            if self._stream.write(line) < len(line):
                raise OSError(28, "No space left on device")
        except OSError as error:
            self.lost = f"{self._path} could not be written: {error.strerror}; the cases after that are not in it"

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.close()
