"""The runs of a search that was interrupted, kept for the same line, typed again.

A journal is a file of JSON lines in the per-user cache: a header, and then a line a run, written as it ends. Its name
is a digest of all that the answers depend on, so that nothing but the very same search can find it. It is removed
when the search ends, by an answer or by an error, and so only an interruption leaves one; after a day it is stale.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from harness import __version__
from harness.errors import InfraError
from harness.overlay import cache_dir

STALE_SECONDS = 24 * 3600.0
_RUN = {"out", "kind", "seconds", "exit", "last"}  # as `harness.trial` has it: other versions may have had it otherwise
# What shells and terminals write about themselves: none of it changes an answer, and all of it changes by itself.
_NOT_OURS = {"_", "COLUMNS", "LINES", "OLDPWD", "SHLVL"}


class Journal:
    """The runs of one search: those of an interrupted one to `take`, and its own to `add`.

    `kept`: how many runs there were to take, `since`: when the interrupted search began ("" where there was none),
    `busy`: the same search runs elsewhere at this moment, so that this one has no journal; `lost`: why the runs so far
    could not be kept ("" where they are).
    """

    def __init__(self, key: str) -> None:
        folder = cache_dir() / "searches"
        self._runs: list[dict[str, Any]] = []
        self.kept, self.since, self.busy, self.lost = 0, "", False, ""
        self._path = folder / f"{key}.jsonl"
        self._stream: IO[bytes] | None = None
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            _sweep(folder)
            self._stream = _locked(self._path, create=True)
            self.busy = self._stream is None
            if self._stream:
                self._read(self._stream)
        except OSError as error:
            raise InfraError(f"can't keep a journal in {folder}: {error.strerror or error}") from None

    def take(self, out: Sequence[str]) -> dict[str, Any] | None:
        """A run with these fixes out from the interrupted search, each once; None where there is no other."""
        for index, run in enumerate(self._runs):
            if run["out"] == list(out):
                return self._runs.pop(index)
        return None

    def add(self, run: Mapping[str, Any]) -> None:
        """Keep a run that has just ended; `out` says what was out. Where the disk won't, the search does without."""
        if self._stream:
            try:
                self._stream.write(json.dumps(run).encode() + b"\n")
                self._stream.flush()
                self.kept += 1
            except OSError as error:
                self.lost = f"can't keep a journal in {self._path.parent}: {error.strerror or error}"
                self.remove()

    def remove(self) -> None:
        """The search has ended: nothing is left for a later one."""
        if self._stream:
            self._path.unlink(missing_ok=True)  # while the lock is held: a new search makes a new file
            with contextlib.suppress(OSError):  # what the disk has not taken is tried again
                self._stream.close()
            self._stream = None

    def leave(self) -> int:
        """The search was interrupted: its runs stay, as many as this says."""
        if not self.kept:
            self.remove()
        if self._stream:
            self._stream.close()
            self._stream = None
            return self.kept
        return 0

    def _read(self, stream: IO[bytes]) -> None:
        """Take the lines up to the first that is torn or means nothing, and cut the rest off."""
        good, since = 0, ""
        for line in stream.read().splitlines(keepends=True):
            entry = _entry(line)
            if entry is None or ("since" in entry) != (not since):
                break
            since = since or entry["since"]
            if "out" in entry:
                self._runs.append(entry)
            good += len(line)
        stream.seek(good)
        stream.truncate()
        self.kept, self.since = len(self._runs), since if self._runs else ""
        if not since:
            header = {"since": datetime.now().astimezone().isoformat(" ", "seconds")}
            stream.write(json.dumps(header).encode() + b"\n")
            stream.flush()


def key(
    words: Sequence[str], fixes: Sequence[str], options: Sequence[object], sources: str, environment: Mapping[str, str]
) -> str:
    """The name of a search: all that its answers depend on, as far as can be seen from here.

    The command's words and what is in those that are files, the fixes and the digest of their `sources`, the options,
    the working directory and its git state, the environment, and this version of unfix.
    """
    settings = sorted((name, value) for name, value in environment.items() if name not in _NOT_OURS)
    files = [_content(word.partition("::")[0]) for word in words]  # pytest: file.py::test
    parts = [__version__, words, files, fixes, options, sources, os.getcwd(), _git(), settings]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _entry(line: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        entry = json.loads(line)
        if line.endswith(b"\n") and isinstance(entry, dict) and entry.keys() in ({"since"}, _RUN):
            return entry
    return None


def _locked(path: Path, create: bool) -> IO[bytes] | None:
    """The file, locked by this process; None where another one holds it. Raises OSError."""
    while True:
        stream = os.fdopen(os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600), "r+b")
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.close()
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(stream.fileno()), path.stat()):
                return stream
        stream.close()  # its search ended, and removed it, between our two steps


def _sweep(folder: Path) -> None:
    """Remove journals that nobody has added to for a day, unless their search still runs."""
    for path in folder.glob("*.jsonl"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_SECONDS and (stream := _locked(path, create=False)):
                path.unlink()
                stream.close()


def _content(word: str) -> str:
    try:
        if not os.path.isfile(word):  # a pipe or a device would never end
            return ""
        with open(word, "rb") as stream:
            digest = hashlib.sha256()
            while block := stream.read(1 << 20):
                digest.update(block)
            return digest.hexdigest()
    except (OSError, ValueError):
        return ""


def _git() -> list[str]:
    """The commit that is checked out here, and a digest of what differs from it; [] outside of a git checkout."""
    said = []
    for command in (["rev-parse", "HEAD"], ["diff", "HEAD", "--full-index", "--no-ext-diff", "--no-textconv"]):
        try:
            ended = subprocess.run(["git", *command], capture_output=True, check=True, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError):
            return []
        said.append(hashlib.sha256(ended.stdout).hexdigest())
    return said
