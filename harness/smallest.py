"""The smallest edit that undoes one difference: tried with the edit engine on the function that it is in.

A match that isn't unique there takes in statements around it that stayed as they were, up to three on a side.
"""

from __future__ import annotations

import ast
import difflib
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness import meaning
from harness.edits import Change, Edit, apply
from harness.errors import RottedError
from harness.pysource import PySource, Unit

_WIDEST = 3
Stmts = Sequence[ast.stmt]


@dataclass(frozen=True)
class Place:
    """Where a difference is: `old` and `new` are the lists of statements that it is in, `olds` and `news` its indices
    (first, end) in them."""

    old: Stmts
    new: Stmts
    olds: tuple[int, int]
    news: tuple[int, int]

    @property
    def gone(self) -> Stmts:
        return self.old[slice(*self.olds)]

    @property
    def here(self) -> Stmts:
        return self.new[slice(*self.news)]

    @property
    def line(self) -> int:
        """The line that it is on, or, where nothing is there any more, that it is beside."""
        near = (*self.here, *self.new[self.news[1] :][:1], *self.new[: self.news[0]][-1:])
        return near[0].lineno if near else 0

    def part(self, first: int, end: int) -> Place:
        """Only a part of what is new; what was old stays out of it."""
        return Place(self.old, self.new, (self.olds[0], self.olds[0]), (self.news[0] + first, self.news[0] + end))

    def widened(self, above: int, below: int) -> Place | None:
        """With so many more statements on each side, None where those aren't there or aren't what they were."""
        olds, news = ((first - above, end + below) for first, end in (self.olds, self.news))
        if min(olds[0], news[0]) < 0 or olds[1] > len(self.old) or news[1] > len(self.new):
            return None
        wide = Place(self.old, self.new, olds, news)
        sides = [(wide.gone[:above], wide.here[:above]), (wide.gone[-below:], wide.here[-below:])][: 1 + bool(below)]
        same = all([*map(ast.dump, mine)] == [*map(ast.dump, theirs)] for mine, theirs in sides)
        return wide if same else None


class Finder:
    """Finds edits in one function, or among the statements that are a class's or a module's own."""

    def __init__(self, old: PySource, new: PySource, unit: Unit) -> None:
        self.old, self.new, self.name = old, new, unit.name
        self.text = new.crop(unit)

    def edit(self, place: Place) -> Edit:
        """Raises RottedError where no edit will do."""
        why = "nothing stands beside it"
        for at, edit in enumerate(self._candidates(place)):
            try:
                self._applied(edit)
                return edit
            except RottedError as error:
                why = why if at else error.message
        raise RottedError(f"line {place.line}: no edit undoes this: {why}", target=self.name)

    def check(self, edits: Sequence[Edit]) -> None:
        """Raises RottedError where edits that each apply alone don't go together."""
        if len(edits) > 1:
            self._applied(*edits)

    def lines(self, new: str, old: str) -> Edit:
        """Only the lines that differ, where replacing them does what replacing the whole does; else the whole."""
        whole = Edit(new, replacement=old)
        news, olds = new.split("\n"), old.split("\n")
        head = tail = 0
        while head < min(len(news), len(olds)) - 1 and news[head] == olds[head]:
            head += 1
        while tail < min(len(news), len(olds)) - head - 1 and news[-1 - tail] == olds[-1 - tail]:
            tail += 1
        cut = [_dedent(lines[head : len(lines) - tail]) for lines in (news, olds)]
        part = Edit(cut[0], replacement=cut[1])
        try:
            same = meaning.same(*(meaning.parse(self._applied(edit)) for edit in (part, whole)))
        except RottedError:
            return whole
        return part if same else whole

    def _applied(self, *edits: Edit) -> str:
        whole = ((0, len(self.text)),)
        return apply(self.text, [Change(edit, whole) for edit in edits], name=self.name or "the module")

    def _candidates(self, place: Place) -> Iterator[Edit]:
        gone, here = self.old.text(place.gone), self.new.text(place.here)
        if here and not gone:
            yield Edit(here, replacement="")
        elif here:
            yield self.lines(here, gone)
            yield Edit(here, replacement=gone)
        else:
            for behind in place.new[place.news[1] :][:1]:
                yield Edit(self.new.header(behind) or self.new.text([behind]), prepend=gone)
            for ahead in place.new[: place.news[0]][-1:]:
                if not hasattr(ahead, "body"):
                    yield Edit(self.new.text([ahead]), append=gone)
        for count in range(1, _WIDEST + 1):
            for sides in ((count, 0), (0, count), (count, count)):
                if wide := place.widened(*sides):
                    yield Edit(self.new.text(wide.here), replacement=self.old.text(wide.gone))


def opcodes(old: Sequence[str], new: Sequence[str]) -> Iterator[tuple[str, int, int, int, int]]:
    """What difflib finds between what two lists both begin and end with: on a thousand like lines it takes seconds."""
    head = tail = 0
    shorter = min(len(old), len(new))
    while head < shorter and old[head] == new[head]:
        head += 1
    while tail < shorter - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    ours, theirs = (each[head : len(each) - tail] for each in (old, new))
    for tag, a, b, c, d in difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
        yield tag, head + a, head + b, head + c, head + d


def _dedent(lines: list[str]) -> str:
    text = "\n".join(lines)
    return text if '"""' in text or "'''" in text else textwrap.dedent(text)
