"""The reach-proof: did this process run the overlay's file, and was the reverted function or kernel entered?

A mark is recorded the moment a target is entered, since the next thing that a reverted function does may be to kill the
process. Tracing stops as soon as every target has been seen.

Boundary: only the main thread is traced, and a debugger's own trace function ends ours.
"""

from __future__ import annotations

import ast
import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any


@dataclass(frozen=True)
class Target:
    """One place that a revert changed."""

    name: str  # the reversal's target, as its toggle file has it
    file: str  # the overlay's file
    module: str | None  # dotted module; None for a file that Python does not import
    qualname: str  # "Class.method", or "" for a module's own body
    entered_by: str | None = (
        None  # for a file that Python does not import: "module.function" entered once its library is loaded
    )


class Reach:
    """Context manager that calls ``record(name)`` once for each target that this process enters."""

    def __init__(self, targets: list[Target], record: Callable[[str], None]):
        self._record = record
        self._open = {target.name: target for target in targets}
        self._functions: dict[tuple[str, str], list[tuple[Target, int | None]]] = {}
        self._loaders: dict[str, list[Target]] = {}
        for target in targets:
            if target.module is None:
                self._loaders.setdefault((target.entered_by or "").rpartition(".")[2], []).append(target)
            elif line := _definition_line(target):
                key = (target.file, target.qualname.rpartition(".")[2])
                self._functions.setdefault(key, []).append((target, line))

    def __enter__(self) -> Reach:
        if self._functions or self._loaders:
            sys.settrace(self._on_call)
        return self

    def __exit__(self, *_: object) -> None:
        if self._functions or self._loaders:
            sys.settrace(None)
        for target in list(self._open.values()):
            if target.module and (_is_body(target) or _launched(target)) and _loaded_from(target):
                self._mark(target)

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        for target, line in self._functions.get((code.co_filename, code.co_name), ()):
            # Triton's interpreter compiles a kernel anew without its decorators, hence the second test
            if line == code.co_firstlineno or _is_kernel(target):
                self._mark(target)
        for target in self._loaders.get(code.co_name, ()):
            module = (target.entered_by or "").rpartition(".")[0]
            if frame.f_globals.get("__name__") == module and _library_built_from(Path(target.file)):
                self._mark(target)

    def _mark(self, target: Target) -> None:
        if self._open.pop(target.name, None):
            self._record(target.name)
            if not self._open:
                sys.settrace(None)


def _definition_line(target: Target) -> int | None:
    """Line of the function's first decorator or ``def`` in the overlay's file; None where the target is no function."""
    node: ast.AST = ast.parse(Path(target.file).read_bytes())
    for name in [part for part in target.qualname.split(".") if part]:
        for child in ast.walk(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and child.name == name:
                node = child
                break
        else:
            return None
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    return min([node.lineno, *(d.lineno for d in node.decorator_list)])


def _is_body(target: Target) -> bool:
    return _definition_line(target) is None


def _loaded_from(target: Target) -> bool:
    module = sys.modules.get(target.module or "")
    return module is not None and getattr(module, "__file__", None) == target.file


def _object(target: Target) -> Any:
    found: Any = sys.modules.get(target.module or "")
    for name in target.qualname.split("."):
        found = getattr(found, name, None)
    return found


def _is_kernel(target: Target) -> bool:
    return type(_object(target)).__module__.startswith("triton.runtime") and _loaded_from(target)


def _launched(target: Target) -> bool:
    """A compiled kernel runs on the device, where no trace sees it; its launch fills this process's kernel cache."""
    caches = getattr(_object(target), "device_caches", None) or {}
    return any(cache[0] for cache in caches.values())


def _library_built_from(source: Path) -> bool:
    """Is a shared object mapped here whose folder holds this very source text, or a build file that names its path?"""
    text, name = source.read_bytes(), os.fsencode(source)
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        folders = {Path(line.split(maxsplit=5)[5].strip()).parent for line in maps if ".so" in line and "/" in line}
    for folder in folders:
        with contextlib.suppress(OSError):
            entries = list(folder.iterdir())
            if len(entries) > 64:  # a system folder, not a build folder
                continue
            for entry in entries:
                if entry.is_file() and entry.suffix not in (".so", ".o") and entry.stat().st_size < 1 << 20:
                    built_from = entry.read_bytes()
                    if built_from == text or name in built_from:
                        return True
    return False
