"""Where a reversal's target lives: from `pkg.mod.Class.method` or `pkg/csrc/file.cuh` to a file and a region of it.

Nothing of the package is imported: a target may be slow to import, broken, or made for a GPU that isn't here.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import io
import re
import tokenize
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from harness.errors import MissingPackageError, RottedError, UsageError
from harness.tokens import NEWLINE, Language, language_of

Region = tuple[int, int]
_BOM = b"\xef\xbb\xbf"
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Source:
    """A file's text with its line ends as they are, and what it takes to write it back byte by byte."""

    text: str
    encoding: str
    bom: bool

    def encode(self, text: str) -> bytes:
        return (_BOM if self.bom else b"") + text.encode(self.encoding, self._errors)

    @property
    def _errors(self) -> str:
        return "surrogateescape" if self.encoding == "utf-8" else "strict"

    @staticmethod
    def decode(data: bytes, language: Language) -> Source:
        """Raise ValueError or SyntaxError for a file whose bytes can't be written back as they were."""
        bom = data.startswith(_BOM)
        body = data[len(_BOM) :] if bom else data
        encoding = "utf-8"
        if language == "python":
            encoding = tokenize.detect_encoding(io.BytesIO(body).readline)[0]
        strict = language == "python" or encoding != "utf-8"
        text = body.decode(encoding, "strict" if strict else "surrogateescape")
        source = Source(text, encoding, bom)
        if source.encode(text) != data:
            raise ValueError(f"encoding {encoding} doesn't round-trip")
        return source


@dataclass(frozen=True)
class Location:
    """A target that was found.

    `root` is the directory on the import path, `package` the top-level package below it (or its one file), `relpath`
    the file's path below `root`. `regions` are character offsets into `source.text`: one region, or several where a
    name is defined more than once (a property's getter and setter, the branches of an `if`). `qualname` is what
    Python calls it (`f.<locals>.g`), "" for a whole module or file.
    """

    target: str
    kind: Literal["function", "class", "module", "file"]
    file: Path
    root: Path
    package: Path
    relpath: Path
    module: str
    qualname: str
    regions: tuple[Region, ...]
    source: Source
    language: Language


def check_target(target: str) -> None:
    """Raise UsageError unless `target` reads like a dotted path, or a relative path below a package."""
    if "/" in target or "\\" in target:
        parts = target.split("/")
        if "\\" in target or "\0" in target or len(parts) < 2 or any(part in ("", ".", "..") for part in parts):
            raise UsageError(f"target {target!a} must be a relative path such as pkg/csrc/file.cuh, without '..'")
        if language_of(target) is None:
            raise UsageError(f"target {target!a} must be a Python, C++ or CUDA source (.py, .cpp, .cu, .cuh, .h, …)")
    elif not all(part.isidentifier() for part in target.split(".")):
        raise UsageError(f"target {target!a} must be a dotted path such as pkg.mod.Class.method, or pkg/csrc/file.cuh")


def locate(target: str, roots: Sequence[Path | str] = ()) -> Location:
    """Find `target`'s file and region. `roots` are directories to search before the import path.

    Raises UsageError for a malformed target, MissingPackageError if its top-level package isn't installed, and
    RottedError, with the nearest name, if the package has no such thing.
    """
    check_target(target)
    is_path = "/" in target
    parts = target.split("/" if is_path else ".")
    root = import_root(parts[0], roots)
    package = root / parts[0]
    rest: list[str] = []
    if is_path:
        file = root.joinpath(*parts)
        if not file.is_file():
            raise RottedError(f"no such file in {root}{_nearest_file(root, file)}", target=target)
    else:
        file, rest = _module_file(root, parts, target)
        if not package.is_dir():
            package = file
    inside = package.resolve() if package.is_dir() else root.resolve()
    if not file.resolve().is_relative_to(inside):
        raise RottedError(f"{file} is a link that leaves {inside}: only its own files are edited", target=target)
    language = language_of(file)
    assert language is not None
    try:
        source = Source.decode(file.read_bytes(), language)
    except (ValueError, SyntaxError, LookupError) as error:
        raise RottedError(f"{file} can't be decoded: {error}", target=target) from None
    relpath = file.relative_to(root)
    module = ".".join(relpath.with_suffix("").parts).removesuffix(".__init__") if language == "python" else ""
    kind: Literal["function", "class", "module", "file"] = "file" if is_path else "module"
    regions: tuple[Region, ...] = ((0, len(source.text)),)
    qualname = ""
    if rest:
        try:
            found = definitions(source.text)
        except (SyntaxError, ValueError, RecursionError) as error:
            raise RottedError(f"{file} doesn't parse under this Python: {error}", target=target) from None
        wanted = ".".join(rest)
        if wanted not in found:
            raise RottedError(f"{file} has no {wanted}{_nearest_name(module, wanted, found)}", target=target)
        nodes, qualname = found[wanted]
        kind = "class" if isinstance(nodes[0], ast.ClassDef) else "function"
        regions = tuple(_region(source.text, node) for node in nodes)
    return Location(target, kind, file, root, package, relpath, module, qualname, regions, source, language)


def import_root(top: str, roots: Sequence[Path | str]) -> Path:
    for root in map(Path, roots):
        if (root / top).is_dir() or (root / f"{top}.py").is_file():
            return root.absolute()
    try:
        spec = importlib.util.find_spec(top)  # a top-level name: looks it up, imports nothing
    except (ImportError, ValueError, AttributeError):
        spec = None
    candidates = list(spec.submodule_search_locations or ()) if spec else []
    if spec and spec.origin and not candidates:
        candidates = [spec.origin]
    for candidate in map(Path, candidates):
        if candidate.name in (top, f"{top}.py") and candidate.exists():
            return candidate.absolute().parent
    places = "".join(f", {root}" for root in roots)
    raise MissingPackageError(f"no sources of package {top!a}: looked on the import path{places}", package=top)


def _module_file(root: Path, parts: list[str], target: str) -> tuple[Path, list[str]]:
    """The file of the deepest module on the way, and the names that are left, as Python's import would pick it."""
    directory = root
    for index, part in enumerate(parts):
        below, module = directory / part, directory / f"{part}.py"
        if below.is_dir() and ((below / "__init__.py").is_file() or not module.is_file()):
            directory = below
        elif module.is_file():
            return module, parts[index + 1 :]
        else:
            init = directory / "__init__.py"
            if init.is_file() and ".".join(parts[index:]) in _names_of(init):
                return init, parts[index:]
            names = [p.stem if p.suffix == ".py" else p.name for p in directory.iterdir() if _is_module(p)]
            prefix = ".".join(parts[:index])
            near = difflib.get_close_matches(part, sorted([*names, *_names_of(init)]), 1, 0.5)
            hint = f"; nearest: {prefix}.{near[0]}" if near else ""
            raise RottedError(f"{prefix} has no {part}{hint}", target=target)
    init = directory / "__init__.py"
    if not init.is_file():
        raise RottedError(f"{directory} has no __init__.py: nothing to edit", target=target)
    return init, []


def _is_module(path: Path) -> bool:
    return path.suffix == ".py" or (path.is_dir() and path.name.isidentifier() and path.name != "__pycache__")


def _names_of(file: Path) -> list[str]:
    try:
        return list(definitions(Source.decode(file.read_bytes(), "python").text))
    except (OSError, ValueError, SyntaxError, LookupError, RecursionError):
        return []


@lru_cache(maxsize=8)
@lru_cache(maxsize=32)
def definitions(text: str) -> dict[str, tuple[list[_Definition], str]]:
    """Every function and class of a module: dotted name -> (its definitions in source order, Python's qualname)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(text)
    found: dict[str, tuple[list[_Definition], str]] = {}

    def visit(node: ast.AST, dotted: str, qualname: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, _Definition):
                name, qual = dotted + child.name, qualname + child.name
                found.setdefault(name, ([], qual))[0].append(child)
                visit(child, f"{name}.", f"{qual}." if isinstance(child, ast.ClassDef) else f"{qual}.<locals>.")
            elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                visit(child, dotted, qualname)

    visit(tree, "", "")
    return found


def _region(text: str, node: _Definition) -> Region:
    starts = [0, *(found.end() for found in re.finditer(NEWLINE, text))]
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    assert node.end_lineno is not None and node.end_col_offset is not None
    last = text[starts[node.end_lineno - 1] :].split("\n", 1)[0]
    column = len(last.encode("utf-8", "surrogatepass")[: node.end_col_offset].decode("utf-8", "surrogatepass"))
    return starts[first - 1], starts[node.end_lineno - 1] + column


def _nearest_name(module: str, wanted: str, found: dict[str, tuple[list[_Definition], str]]) -> str:
    owner, _, name = wanted.rpartition(".")
    siblings = {other.rpartition(".")[2]: other for other in found if other.rpartition(".")[0] == owner}
    near = [siblings[hit] for hit in difflib.get_close_matches(name, siblings, 1, 0.5)]
    near = near or [other for other in found if other.rpartition(".")[2] == name]
    near = near or difflib.get_close_matches(wanted, found, 1, 0.5)
    return f"; nearest: {module}.{near[0]}, line {found[near[0]][0][0].lineno}" if near else ""


def _nearest_file(root: Path, file: Path) -> str:
    top = root / file.relative_to(root).parts[0]
    names = {path.name: path for path in sorted(top.rglob(f"*{file.suffix}"))} if top.is_dir() else {}
    near = difflib.get_close_matches(file.name, names, 1, 0.5)
    return f"; nearest: {names[near[0]].relative_to(root).as_posix()}" if near else ""
