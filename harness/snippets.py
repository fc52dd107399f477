"""Finding a snippet in a source by its tokens, and fitting new lines into the source's own layout."""

from __future__ import annotations

import difflib
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass

from harness.outline import Region
from harness.tokens import NEWLINE, Language, Token, lex

_MEMBER = frozenset({".", "->"})
_C_STARTS = frozenset({";", "{", "}", ")", ":", "else", "do"})
_CLOSING = frozenset({")", "]", "}"})


@dataclass(frozen=True)
class Pattern:
    """The tokens of a snippet, without those that mean nothing."""

    tokens: tuple[Token, ...]
    shown: str

    @staticmethod
    def of(snippet: str, language: Language) -> Pattern:
        tokens = [token for token in lex(snippet, language).tokens if not token.optional]
        while tokens and tokens[-1].kind == "newline":
            tokens.pop()
        return Pattern(tuple(tokens), shorten(snippet))

    def __str__(self) -> str:
        return self.shown


def shorten(snippet: str, width: int = 90) -> str:
    """A snippet on one line, in backquotes."""
    line = " ".join(snippet.split())
    return f"`{line if len(line) <= width else line[: width - 1] + '…'}`"


class Text:
    """A source, its tokens and its lines. `first` and `last` are token indices, both included."""

    def __init__(self, source: str, language: Language, name: str) -> None:
        self.source, self.language, self.name = source, language, name
        self.tokens, self.comments = lex(source, language)
        self._starts = [0, *(found.end() for found in re.finditer(NEWLINE, source))]
        newlines = Counter(re.findall(NEWLINE, source))
        self.newline: str = newlines.most_common(1)[0][0] if newlines else "\n"

    def find(self, pattern: Pattern, regions: Sequence[Region], *, whole: bool = True) -> list[tuple[int, int]]:
        """Where the pattern matches. Places that are whole statements win over places that are parts of others."""
        places = []
        for start, end in regions:
            for first, token in enumerate(self.tokens):
                if token.start < start or token.key != pattern.tokens[0].key:
                    continue
                if token.start >= end:
                    break
                last = self._match(pattern.tokens, first)
                if last is not None and self.tokens[last].end <= end:
                    places.append((first, last))
        statements = [place for place in places if self.is_statement(*place)]
        return statements if statements and whole else places

    def _match(self, pattern: Sequence[Token], first: int) -> int | None:
        if pattern[0].kind == "name" and first and self.tokens[first - 1].text in _MEMBER:
            return None  # `x` isn't the `x` of `self.x`
        at = first
        for index, wanted in enumerate(pattern):
            while at < len(self.tokens) and self.tokens[at].optional and wanted.key != self.tokens[at].key:
                at += 1
            here = self.tokens[at].key if at < len(self.tokens) else None
            if here == wanted.key:
                at += 1
            elif wanted.kind == "newline" and self.tokens[at - 1].depth:
                continue  # a line end of the snippet that falls inside a bracket here
            elif wanted.text == "," and index == len(pattern) - 1 and here is not None and here[1] in _CLOSING:
                break
            else:
                return None
        return at - 1

    def nearest(self, pattern: Pattern, regions: Sequence[Region]) -> str:
        """A hint, `; nearest: line 12: …`, or "" if nothing in the regions is like the pattern."""
        wanted = [token.text for token in pattern.tokens]
        windows: list[tuple[float, int, list[str]]] = []
        for start, end in regions:
            inside = [index for index, token in enumerate(self.tokens) if start <= token.start < end]
            for index in inside:
                if index > inside[0] and self.line(index) == self.line(index - 1):
                    continue
                window = [token.text for token in self.tokens[index : index + len(wanted)]]
                common = sum((Counter(window) & Counter(wanted)).values())
                windows.append((2 * common / (len(window) + len(wanted)), index, window))
        windows.sort(key=lambda entry: (-entry[0], entry[1]))
        best, at = 0.0, 0
        for _, index, window in windows[:30]:
            ratio = difflib.SequenceMatcher(None, window, wanted, autojunk=False).ratio()
            if ratio > best:
                best, at = ratio, index
        if best < 0.4:
            return ""
        start = self.tokens[at].start
        stop = self.tokens[min(at + len(wanted), len(self.tokens)) - 1].end
        return f"; nearest: line {self.line(at)}: {shorten(self.source[start:stop])}"

    def line_of(self, offset: int) -> int:
        """The 1-based line of a character offset."""
        return bisect_right(self._starts, offset)

    def line(self, index: int) -> int:
        return self.line_of(self.tokens[index].start)

    def line_start(self, offset: int) -> int:
        return self._starts[self.line_of(offset) - 1]

    def next_line(self, offset: int) -> int:
        """Where the line after the one of `offset` starts, or the end of the source."""
        line = self.line_of(offset)
        return self._starts[line] if line < len(self._starts) else len(self.source)

    def indent(self, index: int) -> str:
        """The white space that the token's line starts with."""
        found = re.compile(r"[ \t\f\v]*").match(self.source, self.line_start(self.tokens[index].start))
        return found.group() if found else ""

    def is_whole_lines(self, first: int, last: int) -> bool:
        """Whether nothing but these tokens and comments after them stands on their lines."""
        start, end = self.tokens[first].start, self.tokens[last].end
        if self.source[self.line_start(start) : start].strip():
            return False
        stop = self.next_line(end)
        following = self.tokens[last + 1] if last + 1 < len(self.tokens) else None
        if following is not None and following.kind != "newline" and following.start < stop:
            return False
        return all(not start <= comment.start < stop or comment.end <= stop for comment in self.comments)

    def is_statement(self, first: int, last: int) -> bool:
        """Whether the tokens are one statement or several, or a block's first line."""
        before = self.tokens[first - 1] if first else None
        after = self.tokens[last + 1] if last + 1 < len(self.tokens) else None
        if self.language == "c":
            starts = before is None or before.kind == "directive" or before.text in _C_STARTS
            return starts and (self.tokens[last].kind == "directive" or self.tokens[last].text in (";", "{", "}"))
        starts = before is None or (before.depth == 0 and (before.kind == "newline" or before.text in (";", ":")))
        ends = after is None or (after.depth == 0 and (after.kind == "newline" or after.text == ";"))
        return starts and ends and self.tokens[last].depth == 0

    def statement(self, first: int, last: int) -> tuple[int, int]:
        """Widen to the first and last token of the lines, or of the Python statements, that the tokens are part of."""
        if self.language == "c":
            start, stop = self.line_start(self.tokens[first].start), self.next_line(self.tokens[last].end)
            while first and self.tokens[first - 1].start >= start:
                first -= 1
            while last + 1 < len(self.tokens) and self.tokens[last + 1].start < stop:
                last += 1
            return first, last
        while first and self.tokens[first - 1].kind != "newline":
            first -= 1
        while last + 1 < len(self.tokens) and self.tokens[last + 1].kind != "newline":
            last += 1
        return first, last

    def skip_newlines(self, index: int, step: int, gone: Set[int] = frozenset()) -> int:
        """The next token before (-1) or after (1) `index` that is no newline and not in `gone`; may be out of range."""
        index += step
        while 0 <= index < len(self.tokens) and (index in gone or self.tokens[index].kind == "newline"):
            index += step
        return index

    def indent_unit(self) -> str:
        """What this file indents a block by."""
        if self.language == "python":
            for index, token in enumerate(self.tokens[1:-1], 1):
                if token.kind == "newline" and self.tokens[index - 1].text == ":":
                    inner = self.indent(index + 1)
                    outer = self.indent(self.statement(index - 1, index - 1)[0])
                    if inner.startswith(outer) and inner != outer:
                        return inner[len(outer) :]
        return "\t" if re.search(r"^\t", self.source, re.MULTILINE) else "    "


def reindent(snippet: str, text: Text, indent: str, *, dedent: bool) -> str:
    """The snippet's lines at `indent`, in the indent unit and with the line ends of `text`, without a last line end.

    `dedent` takes out what the first line is indented by. Blank lines, and those that start inside a string, stay as
    they are.
    """
    snippet = re.sub(NEWLINE, "\n", snippet).rstrip()
    snippet = re.sub(r"\A(?:[ \t]*\n)+", "", snippet)
    tokens = lex(snippet, text.language).tokens
    starts = [0, *(found.end() for found in re.finditer("\n", snippet))]
    strings = [(token.start, token.end) for token in tokens if token.kind == "string"]
    inside = {start for start in starts if any(begin < start < end for begin, end in strings)}
    begins = {token.start for at, token in enumerate(tokens) if at == 0 or tokens[at - 1].kind == "newline"}
    lines = []
    for start, line in zip(starts, snippet.split("\n"), strict=True):
        blank = line[: len(line) - len(line.lstrip())]
        lines.append((start in inside, start + len(blank) in begins, blank, line.lstrip()))
    first = lines[0][2] if dedent else ""
    base = len(first)
    blanks = [blank for kept, begin, blank, _ in lines if begin and not kept and "\t" not in blank]
    step, unit = min((abs(len(blank) - base) for blank in blanks if len(blank) != base), default=0), text.indent_unit()
    fitted = []
    for kept, _, blank, code in lines:
        if not blank.startswith(first[: len(blank)]):  # blanks and tabs: there is no telling which is deeper
            fitted.append(blank + code)
            continue
        deeper, less = blank[base:], max(base - len(blank), 0)
        if step and "\t" not in blank and unit != " " * step:
            deeper = unit * (len(deeper) // step) + " " * (len(deeper) % step)
            less = less // step * len(unit) + less % step
        outer = indent[: max(len(indent) - less, 0)]
        fitted.append(outer + deeper + code if code and not kept else blank + code)
    return text.newline.join(fitted)
