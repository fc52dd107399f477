"""Where a diff's files are in the sources that have the fix, and which package they belong to.

A diff's paths start anywhere: `python/sglang/srt/x.py`, `src/toy/x.py`, `0.5.13/sglang/srt/x.py`. So leading folders
are dropped until what is left is a file of the sources. Its package is the topmost folder above it, inside of the
directory that was named, that holds an `__init__.py` (with gaps below, as in SGLang), or else the module alone.
The toggle file calls the code base by that name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from harness import upstream
from harness.errors import MissingPackageError, UsageError
from harness.pysource import PySource, calls
from harness.targets import Source, import_root
from harness.tokens import Language, language_of

_ROOTS = ("python", "src", "")  # of a checkout, where packages are
_TESTS = {"test", "tests", "testing", "benchmark", "benchmarks", "doc", "docs", "example", "examples"}


@dataclass(frozen=True)
class Found:
    """A file of a diff in the sources. `relpath` is its path below the import root `root`, `package` the code base."""

    root: Path
    relpath: PurePosixPath
    package: str
    language: Language
    source: Source

    @property
    def target(self) -> str:
        """Its dotted module, or its path where it isn't Python."""
        if self.language != "python":
            return self.relpath.as_posix()
        return ".".join(self.relpath.with_suffix("").parts).removesuffix(".__init__")


def why_skipped(path: str) -> str:
    """Why a path holds nothing to undo, "" if it may."""
    parts = PurePosixPath(path)
    name = parts.name
    if {part.lower() for part in parts.parts[:-1]} & _TESTS or name.startswith("test_") or name == "conftest.py":
        return "a test, a benchmark or a document"
    if parts.stem.endswith("_test"):
        return "a test"
    return "" if language_of(path) else "neither Python nor C++"


def find(path: str, source: str | None, release: str | None) -> Found | None:
    """The file that a diff calls `path`: in a checkout, in a release of SGLang, or in an installed package.

    None where it isn't there. Raises UsageError for a directory that doesn't exist, and what `upstream.release` does.
    """
    parts = PurePosixPath(path).parts
    for at in range(len(parts)):
        for file in _places(parts[at:], source, release):
            if file.is_file():
                return _found(file, Path(source).absolute() if source else None)
    return None


def _places(parts: tuple[str, ...], source: str | None, release: str | None) -> Iterator[Path]:
    if source is not None:
        if not Path(source).is_dir():
            raise UsageError(f"--source {source}: no such directory")
        yield from (Path(source, below, *parts).absolute() for below in _ROOTS)
    elif release is not None:
        yield upstream.release(release).root.joinpath(*parts)
    elif (top := PurePosixPath(parts[0]).stem).isidentifier():
        try:
            root = import_root(top, ())
        except MissingPackageError:
            return
        if len(parts) == 1 or (root / top / "__init__.py").is_file():
            yield root.joinpath(*parts)


def _found(file: Path, directory: Path | None) -> Found:
    language = language_of(file)
    assert language is not None
    marked = [folder for folder in file.parents if (folder / "__init__.py").is_file()]
    inside = [folder for folder in marked if directory is None or directory in folder.parents]
    package = next(reversed(inside or marked), None)  # none inside: the directory is itself a package
    root = package.parent if package else file.parent
    try:
        text = Source.decode(file.read_bytes(), language)
    except (OSError, ValueError, SyntaxError, LookupError) as error:
        raise UsageError(f"{file} can't be read: {error}") from None
    name = package.name if package else file.stem
    return Found(root, PurePosixPath(file.relative_to(root).as_posix()), name, language, text)


def loader_of(found: Found) -> str:
    """The Python function that has a C++ file's build loaded, by a look at who names the file; "" if nobody does.

    A function that calls the one that names it comes before that one: it is entered when the build is used.
    """
    best: tuple[int, str] = (0, "")
    for file in sorted((found.root / found.package).rglob("*.py")):
        text = file.read_text(encoding="utf-8", errors="replace")
        if found.relpath.name not in text:
            continue
        try:
            units = [unit for unit in PySource(text).units.values() if unit.kind == "function"]
        except SyntaxError:
            continue
        module = Found(
            found.root, PurePosixPath(file.relative_to(found.root).as_posix()), "", "python", found.source
        ).target
        naming = [unit for unit in units if found.relpath.name in ast.unparse(unit.node)]
        names = {unit.name.rpartition(".")[2] for unit in naming}
        using = [unit for unit in units if unit not in naming and names & set(calls(unit.node))]
        public = [unit for unit in using if not unit.name.startswith(("_", "can_"))]
        for rank, chosen in ((1, naming), (2, using), (3, public)):
            if chosen and rank > best[0]:
                best = rank, f"{module}.{chosen[-1].name}"
    return best[1]
