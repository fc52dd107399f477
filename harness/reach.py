"""The reach-proof: did this process run the overlay's file, and was the reverted function or kernel entered?

A mark is recorded the moment a target is entered, since the next thing that a reverted function does may be to kill the
process. Tracing stops as soon as every target has been seen.

A library proves nothing by being mapped where another leg may have mapped it, in a process that legs share: this leg
must have loaded it, by `tvm_ffi.load_module` or `ctypes.CDLL`.

Boundary: only the main thread is traced, and a debugger's own trace function ends ours.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

_DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_LOADERS = {("tvm_ffi.module", "load_module"): "path", ("ctypes", "__init__"): "name"}  # and the argument with the file


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
    """Context manager that calls ``record(name)`` once for each target that this process enters.

    ``own``: the libraries that were mapped before this process ran its first leg, where it may have run others.
    """

    def __init__(self, targets: list[Target], record: Callable[[str], None], own: Collection[Path] | None = None):
        self._record = record
        self._own = own
        self._others: set[Path] = set()  # libraries that earlier legs mapped, and this one did not load yet
        self._open = {target.name: target for target in targets}
        self._functions: dict[tuple[str, str], list[tuple[Target, set[int]]]] = {}
        self._loaders: dict[str, list[Target]] = {}
        for target in targets:
            if target.module is None:
                self._loaders.setdefault((target.entered_by or "").rpartition(".")[2], []).append(target)
            else:  # a body, of a module or a class, is entered, too: when the module is loaded
                key = (target.file, target.qualname.rpartition(".")[2] or "<module>")
                self._functions.setdefault(key, []).append((target, _definition_lines(target)))

    def __enter__(self) -> Reach:
        if self._loaders and self._own is not None:
            self._others = libraries().difference(self._own)
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
        for target, lines in self._functions.get((code.co_filename, code.co_name), ()):
            # Triton's interpreter compiles a kernel anew without its decorators, hence the last test
            if not target.qualname or code.co_firstlineno in lines or _is_kernel(target):
                self._mark(target)
        argument = self._others and _LOADERS.get((frame.f_globals.get("__name__", ""), code.co_name))
        if argument and frame.f_locals.get("handle") is None:  # else it is a library that is open, whatever the name
            loaded = os.path.realpath(str(frame.f_locals.get(argument)))  # as the kernel lists what is mapped
            self._others.discard(Path(loaded))
        for target in self._loaders.get(code.co_name, ()):
            module = (target.entered_by or "").rpartition(".")[0]
            if frame.f_globals.get("__name__") == module:
                folders = {library.parent for library in libraries() - self._others}
                if _built_from(Path(target.file), folders):
                    self._mark(target)

    def _mark(self, target: Target) -> None:
        if self._open.pop(target.name, None):
            self._record(target.name)
            if not self._open:
                sys.settrace(None)


@functools.cache  # a process may run many legs, and an overlay's file stays as it is
def _definition_lines(target: Target) -> set[int]:
    """First lines, decorators included, of all that bears the target's name: a property and its setter."""
    nodes: list[ast.AST] = [ast.parse(Path(target.file).read_bytes())]
    for name in filter(None, target.qualname.replace(".<locals>", "").split(".")):
        nodes = [found for node in nodes for found in _definitions(node) if found.name == name]
    return {
        min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        for node in nodes
        if isinstance(node, _DEFINITION)
    }


def _definitions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _DEFINITION):
            yield child
        else:
            yield from _definitions(child)


def _is_body(target: Target) -> bool:
    """A module's or a class's own body: it may have run before this process was forked."""
    return not target.qualname or isinstance(_object(target), type)


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


def libraries() -> set[Path]:
    """The shared objects that are mapped in this process."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        return {Path(line.split(maxsplit=5)[5].strip()) for line in maps if ".so" in line and "/" in line}


def _built_from(source: Path, folders: Collection[Path]) -> bool:
    """Does one of these hold this very source text, or a build file that names its path?"""
    text, name = source.read_bytes(), os.fsencode(source)
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
