"""Fixes drafted from what a diff changed: which differences belong together, what they are called, what they do.

Two differences are one fix where undoing one without the other would break: one uses a name that the other introduces,
one statement moved, the same words were replaced by the same words. What can refuse (an assert, an `if` that raises, a
call to a helper that does) is a fix of its own, called `…-assert`. What only adds something that such a guard reads is
left alone, as new functions are: without the guard it does no harm.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from harness import changes, clike
from harness.changes import Comparison, Piece
from harness.edits import Edit
from harness.lost_imports import lost
from harness.naming import factor, guard_of, kind_of, name_of, summary_of
from harness.pysource import exports, loads, stores
from harness.snippets import shorten
from harness.tokens import Language, lex


@dataclass(frozen=True)
class Texts:
    """One file of a diff: `target` is its dotted module, or its path below the import root where it isn't Python."""

    target: str
    language: Language
    old: str
    new: str


@dataclass(frozen=True)
class Part:
    """A piece and the target that it is an edit of."""

    target: str
    piece: Piece
    file: int

    @property
    def uses(self) -> set[str]:
        return set().union(*map(loads, self.piece.new)) if self.piece.new else _words(self.piece.edit.match)

    @property
    def introduces(self) -> set[str]:
        """The names that it assigns, takes or passes, and did not before."""
        if not self.piece.new and not self.piece.old:
            return set(self.piece.params) or _words(self.piece.edit.match) - _words(self.piece.edit.replacement or "")
        now, then = (set().union(*map(_said, stmts)) for stmts in (self.piece.new, self.piece.old))
        return now - then - self.piece.known

    @property
    def drops(self) -> set[str]:
        """The names that it assigned, and that its function has no more."""
        now, then = (set().union(*map(_said, stmts)) for stmts in (self.piece.new, self.piece.old))
        return then - now - self.piece.still

    @property
    def exports(self) -> set[str]:
        """Those of them that code elsewhere can see. A class's, or a module's, own names are all that."""
        if not self.piece.new:
            return self.introduces
        return self.introduces & set().union(*map(exports, self.piece.new))

    @property
    def only_adds(self) -> bool:
        words = [[token.text for token in lex(text or "").tokens if not token.optional and token.kind != "newline"]
                 for text in (self.piece.edit.replacement, self.piece.edit.match)]  # fmt: skip
        there = iter(words[1])
        return self.piece.edit.replacement is not None and all(word in there for word in words[0])


@dataclass
class DraftFix:
    """A fix as a toggle file has it, its parts in the order of the sources. `guard`: a regular expression, or None."""

    name: str
    kind: str
    summary: str
    parts: list[Part]
    guard: str | None = None

    @property
    def reversals(self) -> dict[str, list[Edit]]:
        """For each target, its edits."""
        found: dict[str, list[Edit]] = {}
        for part in self.parts:
            found.setdefault(part.target, []).append(part.piece.edit)
        return found


@dataclass
class Draft:
    """The fixes, and what of the diff is in none of them, a line each."""

    fixes: list[DraftFix] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def draft(
    texts: Sequence[Texts], only: str | None = None, name: str | None = None, summary: str | None = None
) -> Draft:
    """Draft the fixes. `only`: a glob of functions, and behind a colon one of fixes; `name`: makes all one fix.

    Raises SyntaxError, with the target as its filename, for a text that isn't Python.
    """
    functions, _, names = (only or "").partition(":")
    result, parts, helpers = Draft(), [], {}
    for index, text in enumerate(texts):
        compared = _compare(text, functions)
        helpers.update(compared.helpers)
        new_file = [] if text.old or compared.pieces else ["a new file, left alone"]
        result.left += [f"{text.target}: {line}" for line in new_file or compared.left]
        for piece in compared.pieces:
            below = f".{piece.where}" * bool(piece.where and text.language == "python")
            parts.append(Part(text.target + below, piece, index))
    groups = _grouped(parts, _known_words(texts))
    if name is not None and groups:
        groups = [[part for group in groups for part in group]]
    groups, left = _without_feeders(groups)
    result.left += left
    for group in groups:
        fix = _fix(group, helpers)
        taken = [other.name for other in result.fixes]
        fix.name = name or next(
            each for at in range(1, 999) if (each := f"{fix.name}-{at}" if at > 1 else fix.name) not in taken
        )
        result.fixes.append(fix)
    if names:
        kept = [fix for fix in result.fixes if fnmatchcase(fix.name, names)]
        result.left += [f"{fix.name}: not asked for by --only" for fix in result.fixes if fix not in kept]
        result.fixes = kept
    for fix in result.fixes:
        if summary is not None and len(result.fixes) == 1:
            fix.summary = summary
        fix.parts = _with_imports(fix, texts, result)
    return result


def _compare(text: Texts, functions: str) -> Comparison:
    def wanted(name: str) -> bool:
        dotted = f"{text.target}.{name}" if text.language == "python" else name
        return any(fnmatchcase(each, functions) for each in (name, dotted, name.rpartition(".")[2]))

    compare = changes.compare if text.language == "python" else clike.compare
    try:
        return compare(text.old, text.new, wanted if functions and functions != "*" else None)
    except SyntaxError as error:
        error.filename = text.target
        raise


def _words(text: str) -> set[str]:
    return {token.text for token in lex(text).tokens if token.kind == "name"}


def _said(stmt: ast.stmt) -> set[str]:
    return stores(stmt) | {node.arg for node in ast.walk(stmt) if isinstance(node, ast.keyword) and node.arg}


def _known_words(texts: Sequence[Texts]) -> set[str]:
    """Every name that any of the files had before: a name that isn't among them is the diff's own."""
    return {token.text for text in texts for token in lex(text.old, text.language).tokens if token.kind == "name"}


def _grouped(parts: Sequence[Part], known: set[str]) -> list[list[Part]]:
    """The parts that belong together. A guard belongs to nobody, but the pieces of one edit's place do."""
    group = list(range(len(parts)))
    for at, one in enumerate(parts):
        for to, other in enumerate(parts[:at]):
            if not one.piece.guard and not other.piece.guard and _depend(one, other, known):
                keep, drop = sorted((group[at], group[to]))
                group = [keep if each == drop else each for each in group]
    # The same new name in two places: a guard of changed code can't stay when that code goes.
    groups = [[part for part, mine in zip(parts, group, strict=True) if mine == each] for each in dict.fromkeys(group)]
    for alone in [each for each in groups if each[0].piece.guard]:
        for merged in groups:
            fed = not merged[0].piece.guard and any(_feeds(part, alone[0]) for part in merged)
            if fed and not all(part.only_adds for part in merged):
                merged += alone
                groups.remove(alone)
                break
    return groups


def _depend(one: Part, other: Part, known: set[str]) -> bool:
    same_place = (one.file, one.piece.where) == (other.file, other.piece.where)
    for mine, theirs in ((one, other), (other, one)):
        if same_place and mine.piece.new and mine.introduces & theirs.uses:
            return True
        if same_place and mine.drops & set().union(*map(loads, theirs.piece.old)):
            return True
        if any(name.lstrip(".") not in known for name in mine.exports & (theirs.uses | theirs.exports)):
            return True
        before, after = ({ast.dump(stmt) for stmt in stmts} for stmts in (mine.piece.old, theirs.piece.new))
        if same_place and before & after:
            return True
    swapped = _swapped(one.piece.edit)
    return one.file == other.file and bool(swapped) and swapped == _swapped(other.piece.edit)


def _swapped(edit: Edit) -> tuple[tuple[str, ...], ...]:
    """The words that were replaced and those that they were replaced by; () where something was only added or taken."""
    old, new = ([token.text for token in lex(text or "").tokens if token.kind != "newline"]
                for text in (edit.replacement, edit.match))  # fmt: skip
    codes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    changed = [(tuple(old[a:b]), tuple(new[c:d])) for tag, a, b, c, d in codes if tag != "equal"]
    return (*changed[0],) if len(changed) == 1 and all(changed[0]) else ()


def _feeds(part: Part, guard: Part) -> bool:
    """Whether a guard reads what this part introduces, in its own function or for all to see."""
    local = part.file == guard.file and part.piece.where == guard.piece.where
    return part is not guard and bool((part.introduces if local else part.exports) & guard.uses)


def _without_feeders(groups: list[list[Part]]) -> tuple[list[list[Part]], list[str]]:
    guards = [part for group in groups for part in group if part.piece.guard]
    kept, left = [], []
    for group in groups:
        fed = [guard for guard in guards if guard not in group and any(_feeds(part, guard) for part in group)]
        if fed and not any(part.piece.guard for part in group) and all(part.only_adds for part in group):
            why = f"only there for {shorten(fed[0].piece.guard, 40)}, left alone"
            left += [f"{part.target}, line {part.piece.line}: {why}" for part in group]
        else:
            kept.append(group)
    return kept, left


def _fix(group: list[Part], helpers: dict[str, str]) -> DraftFix:
    pieces = [part.piece for part in group]
    guard = guard_of(pieces[0].guard, helpers) if len(pieces) == 1 and pieces[0].guard else None
    more = factor(pieces)
    kind = "guard" if guard else kind_of(pieces)
    return DraftFix(
        name_of(pieces, group[0].target, more), kind, summary_of(pieces, group[0].target, more), group, guard
    )


def _with_imports(fix: DraftFix, texts: Sequence[Texts], result: Draft) -> list[Part]:
    """The fix's parts, behind those that bring back the imports that the old text needs."""
    added = []
    for index in dict.fromkeys(part.file for part in fix.parts):
        text = texts[index]
        if text.language == "python":
            pieces = [part.piece for part in fix.parts if part.file == index]
            back, unknown = lost(pieces, text.old, text.new)
            added += [Part(text.target, piece, index) for piece in back]
            result.left += [f"{text.target}: the old text uses {name}, which isn't there any more" for name in unknown]
    return added + fix.parts
