"""What differs between two texts of a module, as edits that turn the new one into the old one.

They are compared statement by statement, through blocks whose headers are alike, so that layout, comments, docstrings
and imports don't count. Left alone, and said so: new functions, classes and constants (a helper that nobody calls does
no harm), and functions that are gone.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from harness.edits import Edit
from harness.errors import RottedError
from harness.pysource import (
    Function,
    PySource,
    Unit,
    chained,
    header_of,
    is_guard,
    kind_of,
    loads,
    own_loads,
    parameters,
    stores,
    without_docstring,
)
from harness.smallest import Finder, Place, Stmts, opcodes

_BLOCKS = ("body", "orelse", "finalbody")
_SIMILAR = 0.6  # of two functions' statements, for one to be the other's new name


@dataclass
class Piece:
    """One difference. `where` is the function's, or class's, dotted name in its module, "" for the module itself.

    `old` and `new` are its statements before and after ([] where there are none; always in a C-like file), `guard` the
    code of the statement among them that can refuse, "" if there is none.
    """

    where: str
    edit: Edit
    old: Stmts = ()
    new: Stmts = ()
    line: int = 0
    guard: str = ""
    params: frozenset[str] = frozenset()  # that a changed signature has gained
    known: frozenset[str] = frozenset()  # every name that the function had before, and
    still: frozenset[str] = frozenset()  # that it has now


@dataclass
class Comparison:
    """All that differs in a file. `left`: what isn't drafted, a line each; `helpers`: new functions that can refuse."""

    pieces: list[Piece] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    helpers: dict[str, str] = field(default_factory=dict)


def compare(old_text: str, new_text: str, wanted: Callable[[str], bool] | None = None) -> Comparison:
    """Compare two texts of a module. `wanted`: the functions to look at, by dotted name; then a new one among them is
    looked at, too, for what it refuses.

    Raises SyntaxError for a text that isn't Python, or is nested too deep to compare. What no edit undoes is among
    `left`.
    """
    try:
        return _compare(old_text, new_text, wanted)
    except RecursionError:
        raise SyntaxError("nested too deep to compare") from None


def _compare(old_text: str, new_text: str, wanted: Callable[[str], bool] | None) -> Comparison:
    old, new = PySource(old_text), PySource(new_text)
    result = Comparison(helpers=_helpers(old, new))
    gone = {name: unit for name, unit in old.units.items() if name not in new.units}
    for name, unit in new.units.items():
        if wanted and not wanted(name):
            continue
        before, renamed = old.units.get(name), ""
        if before is None and unit.kind == "function" and (renamed := _former_name(unit, gone)):
            before = gone.pop(renamed)
            result.left.append(f"{name}: was called {renamed}; only what is inside differs")
        comparer = _Comparer(old, new, before or unit, unit, result)
        try:
            if before is not None:
                result.pieces += comparer.pieces(signature=not renamed)
            elif unit.kind == "function" and wanted and (guards := list(comparer.guards())):
                result.pieces += guards
                result.left.append(f"{name}: new; only what it refuses is undone")
            elif name:
                result.left.append(f"{name}: new, left alone")
        except RottedError as error:
            result.left.append(f"{name}: left out, {error.message}")
    result.left += [f"{name}: gone, and not brought back" for name in gone if wanted is None or wanted(name)]
    return result


def _helpers(old: PySource, new: PySource) -> dict[str, str]:
    """New functions that return nothing and can refuse, by their last name, each with the code that refuses."""
    found = {}
    for name, unit in new.units.items():
        guards = [stmt for stmt in unit.body if is_guard(stmt, ())]
        answers = any(isinstance(node, ast.Return) and node.value for node in ast.walk(unit.node))
        if unit.kind == "function" and name not in old.units and guards and not answers:
            found[name.rpartition(".")[2]] = ast.unparse(guards[0])
    return found


def _former_name(unit: Unit, gone: dict[str, Unit]) -> str:
    """The function that this one was before it was renamed, "" if none is like it."""
    best, name = _SIMILAR, ""
    for other in gone.values():
        matcher = difflib.SequenceMatcher(None, other.lines, unit.lines, autojunk=False)
        if other.kind == "function" and matcher.quick_ratio() > best and (ratio := matcher.ratio()) > best:
            best, name = ratio, other.name
    return name


class _Comparer:
    """Compares one function (or a class's or module's own statements) with what it was."""

    def __init__(self, old: PySource, new: PySource, before: Unit, after: Unit, result: Comparison) -> None:
        self.old, self.new, self.before, self.after = old, new, before, after
        self.helpers, self.left = result.helpers, result.left
        self.finder = Finder(old, new, after)
        self.known, self.still = (
            frozenset(name for stmt in unit.body for name in stores(stmt) | loads(stmt)) for unit in (before, after)
        )

    def pieces(self, *, signature: bool) -> list[Piece]:
        found = list(self.signature()) if signature else []
        found += self.block(self.before.body, self.after.body)
        self.finder.check([piece.edit for piece in found])
        return found

    def guards(self) -> Iterator[Piece]:
        """What a new function refuses."""
        body = self.after.body
        for at, stmt in enumerate(body):
            if is_guard(stmt, self.helpers):
                yield self.piece(Place([], body, (0, 0), (at, at + 1)), stmt)

    def signature(self) -> Iterator[Piece]:
        old, new = self.before.node, self.after.node
        if not isinstance(old, Function) or not isinstance(new, Function):
            return
        if [*map(ast.dump, old.decorator_list)] != [*map(ast.dump, new.decorator_list)]:
            self.left.append(f"{self.after.name}: its decorators differ, left alone")
        texts = self.old.header(old), self.new.header(new)
        if parameters(old) != parameters(new) and all(texts):
            gained = frozenset(parameters(new)) - frozenset(parameters(old))
            yield Piece(self.after.name, self.finder.lines(texts[1], texts[0]), line=new.lineno, params=gained)

    def block(self, old: Stmts, new: Stmts) -> Iterator[Piece]:
        """The pieces between two lists of statements, in order."""
        old, new = _without_imports(old), _without_imports(new)
        exact = [[ast.dump(without_docstring(stmt)) for stmt in stmts] for stmts in (old, new)]
        rough = [[kind_of(stmt) for stmt in stmts] for stmts in (old, new)]
        for tag, a, b, c, d in opcodes(exact[0], exact[1]):
            if tag == "equal":
                continue
            matcher = difflib.SequenceMatcher(None, rough[0][a:b], rough[1][c:d], autojunk=False)
            for like, e, f, g, h in matcher.get_opcodes():
                olds, news = (a + e, a + f), (c + g, c + h)
                if like != "equal":
                    yield from self.run(Place(old, new, olds, news))
                for at in range(f - e if like == "equal" else 0):  # two versions of one statement
                    pair = (olds[0] + at, olds[0] + at + 1), (news[0] + at, news[0] + at + 1)
                    yield from self.run(Place(old, new, *pair))

    def run(self, place: Place) -> Iterator[Piece]:
        """The pieces of one stretch: what its place held before, and what it holds now."""
        gone, here = place.gone, place.here
        if len(gone) == len(here) == 1 and (parts := self.inside(gone[0], here[0])) is not None:
            try:
                pieces = [piece for part in parts for piece in self.block(*part)]
                self.finder.check([piece.edit for piece in pieces])
            except RottedError:
                pass  # it can't be told from its like in there, or two need one place: this statement as a whole
            else:
                yield from pieces
                return
        if gone:
            yield self.piece(place)
        elif self.after.kind != "function" and all(isinstance(stmt, ast.Assign | ast.AnnAssign) for stmt in here):
            names = ", ".join(sorted(name for stmt in here for name in stores(stmt)))
            self.left.append(f"{names or 'a name'}{f' of {self.after.name}' * bool(self.after.name)}: new, left alone")
        else:
            for first, end, guard in self.split(here):
                yield self.piece(place.part(first, end), guard)

    def piece(self, place: Place, guard: ast.stmt | None = None) -> Piece:
        code = ast.unparse(guard) if guard else ""
        piece = Piece(self.after.name, self.finder.edit(place), place.gone, place.here, place.line, code)
        piece.known, piece.still = self.known, self.still
        return piece

    def inside(self, old: ast.stmt, new: ast.stmt) -> list[tuple[Stmts, Stmts]] | None:
        """The blocks of two statements with one header, in pairs; None where it must be taken as a whole."""
        if kind_of(old) != kind_of(new) or not getattr(new, "body", None) or isinstance(new, ast.Match):
            return None
        if self.new.is_one_line(new) or self.old.is_one_line(old):
            return None
        parts: list[tuple[Stmts, Stmts]] = [(getattr(old, name, ()), getattr(new, name, ())) for name in _BLOCKS]
        handlers = getattr(old, "handlers", []), getattr(new, "handlers", [])
        if [*map(header_of, handlers[0])] != [*map(header_of, handlers[1])]:
            return None
        parts += [(mine.body, theirs.body) for mine, theirs in zip(*handlers, strict=True)]
        if any(bool(olds) != bool(news) for olds, news in parts):
            return None
        elifs = [chained(stmt) for stmt in (old, new)]
        return parts if elifs[0] == elifs[1] else None

    def split(self, run: Stmts) -> list[tuple[int, int, ast.stmt | None]]:
        """An inserted run as (first, end, guard): each guard with what only it needs, the rest in stretches."""
        owner: list[int | None] = [at if is_guard(stmt, self.helpers) else None for at, stmt in enumerate(run)]
        ran = {id(node) for stmt in run for node in ast.walk(stmt)}
        others = [node for stmt in self.after.body for node in ast.walk(stmt) if id(node) not in ran]
        outside = set().union(*map(own_loads, others)) if others else set()
        for at in range(len(run) - 1, -1, -1):
            names = stores(run[at])
            users = {owner[later] for later in range(at + 1, len(run)) if names & loads(run[later])}
            if owner[at] is None and names and not names & outside and len(users) == 1:
                owner[at] = users.pop()
        parts: list[tuple[int, int, ast.stmt | None]] = []
        for at, mine in enumerate(owner):
            if at and mine == owner[at - 1]:
                parts[-1] = parts[-1][0], at + 1, parts[-1][2]
            else:
                parts.append((at, at + 1, None if mine is None else run[mine]))
        return parts


def _without_imports(stmts: Sequence[ast.stmt]) -> Stmts:
    return [stmt for stmt in stmts if not isinstance(stmt, ast.Import | ast.ImportFrom)]
