"""Legs that need not run again: what a leg did holds wherever all that it read is the same.

A leg of another backend never opens the file that a revert changes, so it cannot tell whether that fix is in or out.
Its answer is kept with what it read (:mod:`harness.reads`) and with what its overlay had changed. The same request gets
that answer under another overlay if both change the files that it read in the same way; where it started another
program, if both change all files in the same way.

Answers are for one command, which gives them a directory and removes it. All of its processes share them. A leg that
hung, that something outside of it ended, or that the machine failed, leaves none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from harness import outcome
from harness.reads import EVERYTHING
from harness.sandbox import Ending, Request, Servers

_OF_ITS_OWN = {"SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL"}  # signals that a leg brings upon itself

Changes = dict[str, str]  # a file that an overlay changes -> the digest of its text there


class Answers(Servers):
    """Fork servers that run a leg only where no kept answer holds. ``sources``: what overlays are built from."""

    def __init__(self, directory: Path, sources: Path, device: str, preload: Sequence[str] = ()):
        super().__init__(device, preload)
        self._directory, self._sources = directory, sources
        self._changes: dict[Path | None, Changes] = {None: {}}

    def run(self, tree: Path | None, request: Request) -> Ending:
        if tree not in self._changes:
            self._changes[tree] = _changes(tree) if tree else {}
        changes, place = self._changes[tree], self._directory / _key(tree, request)
        for file in sorted(place.glob("*.json")):
            kept = json.loads(file.read_text())
            if _same(kept["ending"]["read"], kept["changes"], changes):
                return _ending(kept["ending"])
        roots = [str(self._sources), *([str(tree)] if tree else [])]
        ending = super().run(tree, replace(request, roots=roots))
        whole = ending.report or ending.signal in _OF_ITS_OWN
        if ending.read is not None and not ending.timed_out and whole and not _infra(ending):
            _keep(place, {"changes": changes, "ending": asdict(ending)})
        return ending


def _infra(ending: Ending) -> str:
    """Why the machine is at fault: out of memory in one session, it need not be in another."""
    return outcome.read(ending, reverted=(), guards=(), detector="none", predicted=None, targets=()).infra


def _same(read: Sequence[str], one: Changes, other: Changes) -> bool:
    return one == other if EVERYTHING in read else all(one.get(file) == other.get(file) for file in read)


def _changes(tree: Path) -> Changes:
    """All that is a file of its own in an overlay; the rest are links."""
    found = {}
    for folder, folders, names in os.walk(tree):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for path in (Path(folder, name) for name in names):
            if not path.is_symlink():
                found[str(path.relative_to(tree))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _key(tree: Path | None, request: Request) -> str:
    """All of a request but the overlay's place."""
    asked = asdict(replace(request, path=[entry for entry in request.path if entry != str(tree)]))
    for target in asked["targets"]:
        target["file"] = os.path.relpath(target["file"], tree) if tree else target["file"]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def _ending(kept: dict[str, Any]) -> Ending:
    return Ending(**{**kept, "reached": tuple(kept["reached"]), "read": tuple(kept["read"])})


def _keep(place: Path, document: dict[str, Any]) -> None:
    """Whole or not at all: other processes look for it. Kept nowhere once the command has removed its directory."""
    with contextlib.suppress(FileNotFoundError):
        place.mkdir(exist_ok=True)
        with NamedTemporaryFile("w", dir=place, suffix=".part", delete=False) as part:
            json.dump(document, part)
        os.rename(part.name, f"{part.name}.json")
