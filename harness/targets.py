"""Where a reversal's target lives: from `pkg.mod.Class.method` or `pkg/csrc/file.cuh` to a file and a region of it.

Nothing of the package is imported: a target may be slow to import, broken, or made for a GPU that isn't here.
"""

from __future__ import annotations

import difflib
import importlib.util
import io
import os
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from harness import outline
from harness.errors import MissingPackageError, RottedError, UsageError
from harness.outline import Crop, Region
from harness.tokens import Language, language_of

_BOM = b"\xef\xbb\xbf"
_LONGEST = 250  # bytes of a target: a file system takes 255 for a name


@dataclass(frozen=True)
class Source:
    """A file's bytes, its text with line ends as they are, and what it takes to write another one back byte by byte."""

    data: bytes
    text: str
    encoding: str
    bom: bool

    def __hash__(self) -> int:
        return hash((len(self.data), self.encoding))  # a quarter of a megabyte would take as long as to read it

    def encode(self, text: str) -> bytes:
        return (_BOM if self.bom else b"") + text.encode(self.encoding, self._errors)

    def line(self, offset: int) -> int:
        """The 1-based line of a character offset."""
        ends = {end: self.text.count(end, 0, offset) for end in ("\n", "\r")}
        return 1 + ends["\n"] + (ends["\r"] - self.text.count("\r\n", 0, offset) if ends["\r"] else 0)

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
        source = Source(data, text, encoding, bom)
        if encoding != "utf-8" and source.encode(text) != data:  # in UTF-8 a text has one way to be written
            raise ValueError(f"encoding {encoding} doesn't round-trip")
        return source


@dataclass(frozen=True)
class Location:
    """A target that was found.

    `root` is the directory on the import path, `package` the top-level package below it (or its one file), `relpath`
    the file's path below `root`. `regions` are character offsets into `source.text`: one region, or several where a
    name is defined more than once (a property's getter and setter, the branches of an `if`). `crop` is the function,
    method or top-level class around them, or the whole file. `qualname` is what Python calls it (`f.<locals>.g`), ""
    for a whole module or file.
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
    crop: Crop
    source: Source
    language: Language


def check_target(target: str) -> None:
    """Raise UsageError unless `target` reads like a dotted path, or a relative path below a package."""
    if len(target.encode("utf-8", "surrogatepass")) > _LONGEST:
        raise UsageError(f"target {target[:60]!a}… must have at most {_LONGEST} bytes")
    parts = target.split("/" if "/" in target else ".")
    if "/" in target or "\\" in target:
        if "\\" in target or "\0" in target or len(parts) < 2 or any(part in ("", ".", "..") for part in parts):
            raise UsageError(f"target {target!a} must be a relative path such as pkg/csrc/file.cuh, without '..'")
        if not parts[0].isidentifier() or not target.isprintable():  # `a.b/c.py`: looking for a.b would import a
            raise UsageError(f"target {target!a} must start with a package's name, such as pkg in pkg/csrc/file.cuh")
        if language_of(target) is None:
            raise UsageError(f"target {target!a} must be a Python, C++ or CUDA source (.py, .cpp, .cu, .cuh, .h, …)")
    elif not all(part.isidentifier() for part in parts):
        raise UsageError(f"target {target!a} must be a dotted path such as pkg.mod.Class.method, or pkg/csrc/file.cuh")


def locate(target: str, roots: Sequence[Path | str] = (), *, explain: bool = True) -> Location:
    """Find `target`'s file and region. `roots` are directories to search before the import path.

    Raises UsageError for a malformed target, MissingPackageError if its top-level package isn't installed, and
    RottedError if the package has no such thing: with the nearest name, for which a whole package may be searched, or
    without `explain` sooner.
    """
    check_target(target)
    is_path = "/" in target
    parts = target.split("/" if is_path else ".")
    root = import_root(parts[0], roots)
    rest: list[str] = []
    if is_path:
        file = _path(f"{root}/{target}")
        if not os.path.isfile(file):
            near = _nearest_file(root, file) if explain else ""
            raise RottedError(f"no such file in {root}{near}", target=target)
    else:
        file, rest = _module_file(root, parts, target, explain)
    package, relpath, module = _names(root, file)
    if any(os.path.islink(f"{root}/{step}") for step in (relpath, *relpath.parents[:-2])):
        inside = os.path.realpath(package if package != file else root)
        if not os.path.realpath(file).startswith(f"{inside.rstrip('/')}/"):
            raise RottedError(f"{file} is a link that leaves {inside}: only its own files are edited", target=target)
    language = language_of(file)
    assert language is not None
    try:
        source = _read(file, language)
    except (ValueError, SyntaxError, LookupError) as error:
        raise RottedError(f"{file} can't be decoded: {error}", target=target) from None
    kind: Literal["function", "class", "module", "file"] = "file" if is_path else "module"
    regions: tuple[Region, ...] = ((0, len(source.text)),)
    crop = Crop(0, len(source.text))
    qualname = ""
    if rest:
        wanted = ".".join(rest)
        try:
            place = _place(source, wanted)
            near = outline.nearest(source.text, wanted, module) if place is None and explain else ""
        except (SyntaxError, ValueError, RecursionError) as error:
            raise RottedError(f"{file} doesn't parse under this Python: {error}", target=target) from None
        if place is None:
            raise RottedError(f"{file} has no {wanted}{near}", target=target)
        kind, qualname, regions, crop = place.kind, place.qualname, place.regions, place.crop
    return Location(target, kind, file, root, package, relpath, module, qualname, regions, crop, source, language)


@lru_cache(maxsize=32)
def _place(source: Source, name: str) -> outline.Place | None:
    return outline.find(source.text, name, source.data)


_path = lru_cache(maxsize=256)(Path)


@lru_cache(maxsize=256)
def _names(root: Path, file: Path) -> tuple[Path, Path, str]:
    """The package below a root that a file is in, or its one file; the file's path below the root; its module."""
    relpath = file.relative_to(root)
    module = ".".join(relpath.with_suffix("").parts).removesuffix(".__init__")
    return root / relpath.parts[0], relpath, module if language_of(file) == "python" else ""


_sources: dict[Path, Source] = {}  # as last read, for a process asks about the same few all the time


def _read(file: Path, language: Language) -> Source:
    """A file's text, as it is now. Raises what `Source.decode` does."""
    with open(file, "rb") as opened:
        data = opened.read()
    before = _sources.pop(file, None)
    source = _sources[file] = before if before and before.data == data else Source.decode(data, language)
    while len(_sources) > 16:
        del _sources[next(iter(_sources))]
    return source


def import_root(top: str, roots: Sequence[Path | str]) -> Path:
    for root in map(_path, roots):
        if os.path.isdir(f"{root}/{top}") or os.path.isfile(f"{root}/{top}.py"):
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


def _module_file(root: Path, parts: list[str], target: str, explain: bool) -> tuple[Path, list[str]]:
    """The file of the deepest module on the way, and the names that are left, as Python's import would pick it."""
    directory = str(root)
    for index, part in enumerate(parts):
        below, module = f"{directory}/{part}", f"{directory}/{part}.py"
        if os.path.isdir(below) and (os.path.isfile(f"{below}/__init__.py") or not os.path.isfile(module)):
            directory = below
        elif os.path.isfile(module):
            return _path(module), parts[index + 1 :]
        else:
            init = Path(directory, "__init__.py")
            if init.is_file() and ".".join(parts[index:]) in _names_of(init):
                return init, parts[index:]
            prefix = ".".join(parts[:index])
            near = _nearest_module(Path(directory), part, prefix) if explain else ""
            raise RottedError(f"{prefix} has no {part}{near}", target=target)
    init = _path(f"{directory}/__init__.py")
    if not os.path.isfile(init):
        raise RottedError(f"{directory} has no __init__.py: nothing to edit", target=target)
    return init, []


def _nearest_module(directory: Path, part: str, prefix: str) -> str:
    names = [path.stem if path.suffix == ".py" else path.name for path in directory.iterdir() if _is_module(path)]
    near = difflib.get_close_matches(part, sorted([*names, *_names_of(directory / "__init__.py")]), 1, 0.5)
    return f"; nearest: {prefix}.{near[0]}" if near else ""


def _is_module(path: Path) -> bool:
    return path.suffix == ".py" or (path.is_dir() and path.name.isidentifier() and path.name != "__pycache__")


def _names_of(file: Path) -> list[str]:
    try:
        return list(outline.definitions(Source.decode(file.read_bytes(), "python").text))
    except (OSError, ValueError, SyntaxError, LookupError, RecursionError):
        return []


def _nearest_file(root: Path, file: Path) -> str:
    top = root / file.relative_to(root).parts[0]
    names = {path.name: path for path in sorted(top.rglob(f"*{file.suffix}"))} if top.is_dir() else {}
    near = difflib.get_close_matches(file.name, names, 1, 0.5)
    return f"; nearest: {names[near[0]].relative_to(root).as_posix()}" if near else ""
