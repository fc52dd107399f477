"""Which files of the code under test a process reads. What it never read, it can't tell the text of.

Seen is whatever Python opens: sources, their compiled copies, and texts that a JIT hands to a compiler. What another
program reads isn't, so a process that starts one counts as having read everything. Standard library only: this runs in
a leg.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EVERYTHING = "*"
_OPENS = {"open", "import", "ctypes.dlopen"}
_STARTS = {"subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "pty.spawn"}
# multiprocessing starts a Python with no event of its own; these are imported when it first does
_SPAWNERS = {"multiprocessing.popen_spawn_posix", "multiprocessing.popen_forkserver"}


def log(file: Path, roots: Sequence[str]) -> None:
    """From here to the process's end, write a line to ``file`` for each path, relative to its root, that is read.

    What was imported before counts as read. A line is out as soon as its file is open: the process may die over it.
    """
    stream = open(file, "a", encoding="utf-8", errors="surrogateescape", buffering=1)  # noqa: SIM115
    inside = [
        root.rstrip(os.sep) + os.sep for name in roots for root in {os.path.abspath(name), os.path.realpath(name)}
    ]
    seen: set[str] = set()

    def write(line: str) -> None:
        if line not in seen:
            seen.add(line)
            stream.write(line + "\n")

    def note(path: Any) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)):  # a file descriptor was opened before
            return
        for spelled in _spellings(_source(os.fsdecode(path))):  # PYTHONPYCACHEPREFIX: the copy lies elsewhere
            for root in inside:
                if spelled.startswith(root):
                    write(spelled[len(root) :])

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _STARTS:
            # a compiler that is asked for its version reads no source
            if not (event == "subprocess.Popen" and list(arguments[1][1:]) == ["--version"]):
                write(EVERYTHING)
        elif event in _OPENS:
            if event == "import" and arguments[0] in _SPAWNERS:
                write(EVERYTHING)
            for argument in arguments[:2]:  # of an import: its name, and the file where it is no source
                with contextlib.suppress(ValueError):  # a null byte in a name: it will not be opened either
                    note(argument)

    if _SPAWNERS & sys.modules.keys():
        write(EVERYTHING)
    for module in list(sys.modules.values()):
        note(getattr(module, "__file__", None))
    sys.addaudithook(hook)


def _spellings(path: str) -> set[str]:
    """An overlay's links lead into the sources: the same file, by either name."""
    return {os.path.abspath(path), os.path.realpath(path)}


def _source(path: str) -> str:
    """The source that a compiled copy was made from, or is being made from; any other path as it is."""
    made, _, part = path.rpartition(".")
    if part.isdigit() and made.endswith(".pyc"):  # it is renamed once it is whole
        path = made
    if not path.endswith(".pyc"):
        return path
    try:
        return importlib.util.source_from_cache(path)
    except ValueError:
        return path
