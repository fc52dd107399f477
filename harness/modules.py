"""Modules that go with an import path: what was imported from an overlay must not be there for the next one."""

from __future__ import annotations

import importlib
import linecache
import os
import sys
import sysconfig
from collections.abc import Collection, Sequence
from types import ModuleType


def forget(path: Sequence[str], kept: Collection[str]) -> None:
    """Drop what was imported from below ``path``, but for the modules named in ``kept`` and all that is installed.

    So is what has the name of something below it, wherever it is from: one that was put into `sys.modules` has no file.
    """
    below = tuple(entry.rstrip(os.sep) + os.sep for entry in path)
    # a checkout holds its .venv: what is installed there stays, torch can't be imported twice
    installed = tuple(sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib"))
    names = {entry.partition(".")[0] for folder in path if os.path.isdir(folder) for entry in os.listdir(folder)}
    for name in set(sys.modules) - set(kept):
        place = _place(sys.modules[name])
        ours = place.startswith(below) or name.partition(".")[0] in names
        if ours and not place.startswith(installed):
            _drop(name)
    importlib.invalidate_caches()
    linecache.clearcache()


def _drop(name: str) -> None:
    module = sys.modules.pop(name)
    parent, _, own = name.rpartition(".")
    # or `from parent import own` would find it there
    if parent in sys.modules and vars(sys.modules[parent]).get(own) is module:
        delattr(sys.modules[parent], own)


def _place(module: ModuleType | None) -> str:
    """Its file; of a package without one, its first folder."""
    file = getattr(module, "__file__", None)
    return str(file or next(iter(getattr(module, "__path__", ())), ""))
