"""The functions and classes of a Python source, and where in it one of them is."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Literal

from harness import glance
from harness.meaning import parse
from harness.remembered import remembered
from harness.tokens import NEWLINE

Region = tuple[int, int]
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Definitions = dict[str, tuple[list[Definition], str]]
Found = tuple[str, str, list[Region], tuple[int, int, str]]  # kind, qualname, regions, a crop's fields
_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")  # where a statement holds others, as the source has them
_HEAD = "class _:\n"  # in front of a method's lines


@dataclass(frozen=True)
class Crop:
    """Whole lines of a source that are all that an edit in there has to look at, since a file has thousands of them.

    `start` and `end` are character offsets, `head` is what makes the lines a module: a method needs a class.
    """

    start: int
    end: int
    head: str = ""

    def text(self, source: str) -> str:
        return self.head + source[self.start : self.end]

    def regions(self, regions: Iterable[Region]) -> tuple[Region, ...]:
        """Regions of the source as regions of `text`; a part that is outside is cut off."""
        shift, last = len(self.head) - self.start, len(self.head) + self.end - self.start
        return tuple((max(start + shift, 0), min(end + shift, last)) for start, end in regions)


@dataclass(frozen=True)
class Place:
    """Where a name is defined: see `targets.Location`."""

    kind: Literal["function", "class"]
    qualname: str
    regions: tuple[Region, ...]
    crop: Crop


def find(text: str, dotted: str, data: bytes | None = None) -> Place | None:
    """The place of `Class.method`; None if a source has no such name. Raises SyntaxError where it doesn't parse.

    `data`: the bytes that the text was read from.
    """
    answer = remembered("outline.find", text, dotted, lambda: _find(text, dotted), data)
    if answer is None:
        return None
    kind, qualname, regions, crop = answer
    return Place(kind, qualname, tuple((start, end) for start, end in regions), Crop(*crop))


def nearest(text: str, dotted: str, module: str) -> str:
    """A hint, `; nearest: pkg.mod.name, line 12`, or "" if no name is like this one."""
    found = definitions(text)
    owner, _, name = dotted.rpartition(".")
    siblings = {other.rpartition(".")[2]: other for other in found if other.rpartition(".")[0] == owner}
    near = [siblings[hit] for hit in difflib.get_close_matches(name, siblings, 1, 0.5)]
    near = near or [other for other in found if other.rpartition(".")[2] == name]
    near = near or difflib.get_close_matches(dotted, found, 1, 0.5)
    return f"; nearest: {module}.{near[0]}, line {found[near[0]][0][0].lineno}" if near else ""


@lru_cache(maxsize=8)  # a tree is tens of thousands of objects, for each full collection to go through
def definitions(text: str) -> Definitions:
    """Every function and class of a module: dotted name -> (its definitions in source order, Python's qualname)."""
    tree = parse(text)
    found: Definitions = {}

    def visit(node: ast.AST, dotted: str, qualname: str) -> None:
        for child in chain.from_iterable(getattr(node, field, ()) for field in _BLOCKS):
            if isinstance(child, Definition):
                name, qual = dotted + child.name, qualname + child.name
                found.setdefault(name, ([], qual))[0].append(child)
                visit(child, f"{name}.", f"{qual}." if isinstance(child, ast.ClassDef) else f"{qual}.<locals>.")
            else:
                visit(child, dotted, qualname)

    visit(tree, "", "")
    return found


@lru_cache(maxsize=32)
def _line_starts(text: str) -> list[int]:
    """Where each line starts, as character offsets, and where the last one ends."""
    return [0, *(found.end() for found in re.finditer(NEWLINE, text)), len(text)]


def _find(text: str, dotted: str) -> Found | None:
    seen = _glance(text, dotted.split("."))
    if seen == "absent":
        return None
    if seen is not None and (found := _find_in(text, dotted, seen)):
        return found
    return _find_parsed(text, dotted)


def _glance(text: str, names: list[str]) -> Crop | Literal["absent"] | None:
    """The lines that a name is in, and a few below them; "absent" where there are none, None in doubt."""
    seen = glance.lines(text, names[:1])
    if not isinstance(seen, glance.Lines):
        return seen
    if seen.word == "class" and len(names) > 1:
        method = glance.lines(text, names[:2])
        if not isinstance(method, glance.Lines):
            return method
        if method.word == "def":
            return Crop(method.start, method.end, _HEAD)
    return Crop(seen.start, seen.end)


def _find_in(text: str, dotted: str, seen: Crop) -> Found | None:
    """`_find_parsed` of these lines alone; None unless they are one definition that has this name."""
    owner, _, rest = dotted.partition(".")
    lines = seen.text(text)
    try:
        found = _find_parsed(lines, f"_.{rest}" if seen.head else dotted)
    except SyntaxError:
        return None
    if found is None or len(definitions(lines)["_" if seen.head else owner][0]) > 1:
        return None
    kind, qualname, regions, (start, end, head) = found
    shift = seen.start - len(seen.head)
    name = owner + qualname[1:] if seen.head else qualname
    return kind, name, [(a + shift, b + shift) for a, b in regions], (start + shift, end + shift, head)


def _find_parsed(text: str, dotted: str) -> Found | None:
    found = definitions(text)
    if dotted not in found:
        return None
    nodes, qualname = found[dotted]
    crop = _crop(text, qualname, found)
    kind = "class" if isinstance(nodes[0], ast.ClassDef) else "function"
    return kind, qualname, [_region(text, node) for node in nodes], (crop.start, crop.end, crop.head)


def _crop(text: str, qualname: str, found: Definitions) -> Crop:
    names = qualname.split(".")
    [node, *others] = found[names[0]][0]
    head = ""
    if isinstance(node, ast.ClassDef) and not others and len(names) > 1:
        [method, *more] = found[f"{names[0]}.{names[1]}"][0]
        if not more and not isinstance(method, ast.ClassDef) and method.col_offset:
            node, head = method, _HEAD
    if others or node.end_lineno is None or (node.col_offset and not head):
        return Crop(0, len(text))
    starts = _line_starts(text)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return Crop(starts[first - 1], starts[node.end_lineno], head)


def _region(text: str, node: Definition) -> Region:
    starts = _line_starts(text)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    assert node.end_lineno is not None and node.end_col_offset is not None
    last = text[starts[node.end_lineno - 1] : starts[node.end_lineno]]
    column = len(last.encode("utf-8", "surrogatepass")[: node.end_col_offset].decode("utf-8", "surrogatepass"))
    return starts[first - 1], starts[node.end_lineno - 1] + column
