"""The edit engine: find a snippet by its tokens, exactly once, and replace it or put lines beside it.

All edits of one file are found in the original text, so their order doesn't matter and no edit can match what another
one wrote. What lies outside the edits stays as it is, byte by byte.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from harness import meaning
from harness.errors import RottedError, UsageError
from harness.outline import Region
from harness.snippets import Pattern, Text, reindent
from harness.tokens import Language, lex

_CONTINUES = frozenset({"elif", "else", "except", "finally"})


@dataclass(frozen=True)
class Edit:
    """One change: what to find, and exactly one of what replaces it ("" deletes) or which lines go before or after."""

    match: str
    replacement: str | None = None
    prepend: str | None = None
    append: str | None = None

    def __post_init__(self) -> None:
        if sum(text is not None for text in (self.replacement, self.prepend, self.append)) != 1:
            raise UsageError("an edit takes exactly one of replacement, prepend, append")


@dataclass(frozen=True)
class Reversal:
    """How one fix is undone in one place. `entered_by`: for a non-Python target, the function that loads the build."""

    fix: str
    target: str
    edits: tuple[Edit, ...]
    entered_by: str | None = None


@dataclass(frozen=True)
class Change:
    """An edit and where it may match: `regions` are (start, end) offsets. `fix` and `target` are for errors."""

    edit: Edit
    regions: tuple[Region, ...]
    fix: str = ""
    target: str = ""

    def rotted(self, message: str) -> RottedError:
        return RottedError(message, fix=self.fix, target=self.target)


@dataclass(frozen=True)
class _Splice:
    start: int
    end: int
    text: str
    change: Change


def apply(
    source: str,
    changes: Sequence[Change],
    *,
    language: Language = "python",
    name: str = "<source>",
    explain: bool = True,
) -> str:
    """The text with all `changes` made. `name` is the file's name in errors.

    Raises RottedError, and changes nothing, if a match isn't found exactly once, if two changes overlap, if one is
    already made or says nothing new, or if the result doesn't compile (C-like: its brackets don't balance). Looking for
    what comes nearest to a match that isn't there takes a while: without `explain` the error doesn't say.
    """
    text = Text(source, language, name)
    found = [(change, *_find(text, change, explain)) for change in changes]
    gone = {
        index
        for change, first, last in found
        if change.edit.replacement is not None and not lex(change.edit.replacement, language).tokens
        for index in range(first, last + 1)
    }
    splices = [_splice(text, change, first, last, gone) for change, first, last in found]
    result = _join(text, splices)
    if changes:
        _check(text, result, splices)
    return result


def _find(text: Text, change: Change, explain: bool) -> tuple[int, int]:
    """The first and last token index of the one place where the edit matches."""
    pattern = Pattern.of(change.edit.match, text.language)
    if not pattern.tokens:
        raise UsageError(f"{change.fix or change.target or 'an edit'}: match has no code in it")
    places = text.find(pattern, change.regions)
    if len(places) == 1:
        return places[0]
    if places:
        lines = ", ".join(str(text.line(first)) for first, _ in places)
        times = f"appears {len(places)} times in {text.name}"
        raise change.rotted(f"match {pattern} {times}: lines {lines}; make it longer")
    if not explain:
        raise change.rotted(f"match {pattern} isn't in {text.name}")
    message = f"match {pattern} isn't in {text.name}{text.nearest(pattern, change.regions)}"
    other = text.find(pattern, ((0, len(text.source)),))
    if other:
        message += f"; outside of the target it is on line {', '.join(str(text.line(first)) for first, _ in other[:3])}"
    written = Pattern.of(change.edit.replacement or "", text.language)
    if written.tokens and (there := text.find(written, change.regions)):
        message += f"; its replacement is already there, line {text.line(there[0][0])}: reverted, or never fixed?"
    raise change.rotted(message)


def _splice(text: Text, change: Change, first: int, last: int, gone: set[int]) -> _Splice:
    edit = change.edit
    if edit.replacement is None:
        return _insertion(text, change, first, last)
    if not lex(edit.replacement, text.language).tokens:
        return _deletion(text, change, first, last, gone)
    written = Pattern.of(edit.replacement, text.language)
    for there in text.find(written, change.regions):
        if there[0] <= first and last <= there[1] and there != (first, last):
            raise change.rotted(f"the replacement is already there: {text.name}, line {text.line(there[0])}")
    start, end = text.tokens[first].start, text.tokens[last].end
    new = reindent(edit.replacement, text, text.indent(first), dedent=True)
    new = new.removeprefix(text.indent(first))
    if Pattern.of(edit.match, text.language).tokens[-1].text == "," != text.tokens[last].text:
        new = re.sub(r",\s*\Z", "", new)  # the match's last comma fell to a reformat: so must the replacement's
    return _Splice(start, end, new, change)


def _insertion(text: Text, change: Change, first: int, last: int) -> _Splice:
    edit = change.edit
    before = edit.prepend is not None
    written = Pattern.of((edit.prepend if before else edit.append) or "", text.language)
    if not written.tokens:
        raise change.rotted(f"{'prepend' if before else 'append'} has no code in it, so it changes nothing")
    begin, stop = text.statement(first, last)
    beside = text.find(written, ((0, len(text.source)),), whole=False)
    if any((text.skip_newlines(b, 1) == begin) if before else (text.skip_newlines(stop, 1) == a) for a, b in beside):
        raise change.rotted(f"the lines are already there, beside line {text.line(first)} of {text.name}")
    new = reindent((edit.prepend if before else edit.append) or "", text, text.indent(begin), dedent=False)
    if before:
        at = text.line_start(text.tokens[begin].start)
        return _Splice(at, at, new + text.newline, change)
    at = text.next_line(text.tokens[stop].end)
    if at == len(text.source) and not text.source.endswith(("\n", "\r")):
        return _Splice(at, at, text.newline + new, change)
    return _Splice(at, at, new + text.newline, change)


def _deletion(text: Text, change: Change, first: int, last: int, gone: set[int]) -> _Splice:
    start, end = text.tokens[first].start, text.tokens[last].end
    kept = textwrap.dedent(change.edit.replacement or "").strip()
    statement = text.is_statement(first, last)
    if text.language == "c":
        # Without its statement or block, an `if (…)` would take the next one.
        before, ends = text.tokens[first - 1].text if first else "", text.tokens[last].text in (";", "}")
        if statement and ends and before in (")", "else", "do"):
            return _Splice(start, end, ";", change)
    elif statement and not text.is_whole_lines(first, last):
        return _Splice(start, end, "pass", change)  # `if x: y` or `a; b`
    if not text.is_whole_lines(first, last):
        return _Splice(start, end, "", change)
    lines = [reindent(kept, text, text.indent(first), dedent=True)] if kept else []
    if text.language == "python" and statement:
        _check_block(text, change, first, last)
        if _empties_block(text, first, last, gone):
            lines.append(text.indent(first) + "pass")
    start, end = text.line_start(start), text.next_line(end)
    new = "".join(line + text.newline for line in lines)
    if new and end == len(text.source) and not text.source.endswith(("\n", "\r")):
        new = new[: -len(text.newline)]
    return _Splice(start, end, new, change)


def _check_block(text: Text, change: Change, first: int, last: int) -> None:
    """Refuse a deletion after which what follows would quietly belong to another block, or get another's decorator."""
    above, end = text.skip_newlines(first, -1), text.statement(last, last)[0]
    if above >= 0 and text.tokens[text.statement(above, above)[0]].key == ("op", "@") != text.tokens[end].key:
        raise change.rotted(f"deleting line {text.line(first)} would leave its decorator, line {text.line(above)}")
    following = text.skip_newlines(last, 1)
    if following >= len(text.tokens):
        return
    mine, theirs = len(text.indent(first)), len(text.indent(following))
    word, line = text.tokens[following].text, text.line(following)
    if theirs > mine:
        raise change.rotted(f"deleting line {text.line(first)} would leave the rest of its block, line {line}")
    if theirs == mine and word in _CONTINUES and text.tokens[first].text not in _CONTINUES:
        raise change.rotted(f"deleting line {text.line(first)} would leave its `{word}`, line {line}")


def _empties_block(text: Text, first: int, last: int, gone: set[int]) -> bool:
    """Whether no statement of this block is left, and this deletion is the first of those that empty it."""
    before = text.skip_newlines(first, -1, gone)
    if before < 0 or text.tokens[before].text != ":" or text.tokens[before].depth or gone & set(range(before, first)):
        return False
    after = text.skip_newlines(last, 1, gone)
    return after >= len(text.tokens) or len(text.indent(after)) < len(text.indent(first))


def _join(text: Text, splices: Sequence[_Splice]) -> str:
    """Put the splices in. At one place, appended lines come before prepended ones, each in the order given."""
    ordered = sorted(splices, key=lambda s: (s.start, s.end, s.change.edit.append is None))
    parts, at = [], 0
    previous: _Splice | None = None
    for splice in ordered:
        if previous is not None and splice.start < previous.end:
            names = " and ".join(repr(s.change.fix or s.change.edit.match.strip()) for s in (previous, splice))
            line = text.line_of(splice.start)
            raise splice.change.rotted(f"{names} change the same place: {text.name}, line {line}")
        parts += [text.source[at : splice.start], splice.text]
        at, previous = splice.end, splice
    return "".join([*parts, text.source[at:]])


def _check(text: Text, result: str, splices: Sequence[_Splice]) -> None:
    """Refuse a result that doesn't compile, and any single change that changes nothing."""
    fixes = ", ".join(dict.fromkeys(splice.change.fix for splice in splices))
    target = ", ".join(dict.fromkeys(splice.change.target for splice in splices))
    if text.language == "c" and (lone := meaning.unbalanced(result)) and meaning.unbalanced(text.source) is None:
        raise RottedError(f"{text.name} has an unpaired {lone} after the edit", fix=fixes, target=target)
    if text.language == "c" and meaning.brackets(result) != meaning.brackets(text.source):
        raise RottedError(f"the edit unbalances the brackets of {text.name}", fix=fixes, target=target)
    try:
        new = meaning.read(result, text.language, compiles=True)
        old = meaning.read(text.source, text.language)
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        what = error.msg
        hint = "; append after a block's first line must be indented itself" if "indented block" in what else ""
        message = f"{text.name} doesn't compile after the edit{line}: {what}{hint}"
        raise RottedError(message, fix=fixes, target=target) from None
    is_same = meaning.same(new, old)
    for splice in splices:
        replaced = text.source[splice.start : splice.end]
        if meaning.words(splice.text, text.language) == meaning.words(replaced, text.language) and (
            is_same or meaning.says(_join(text, [splice]), text.language, old)
        ):
            raise splice.change.rotted(f"the edit changes nothing: {text.name}, line {text.line_of(splice.start)}")
    if is_same:
        raise RottedError(f"the edits change nothing in {text.name}", fix=fixes, target=target)
