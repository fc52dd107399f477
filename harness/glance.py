"""The lines of one function or class of a Python source, seen without parsing the rest: a file has thousands of lines.

Only what leaves no doubt is answered: a name that is defined once, indented by blanks, where brackets pair up. Strings
and comments are blanked first, so that nothing in them counts. What these lines say is then the parser's to tell, and
all that is in doubt, too: lines that were cut wrongly don't parse, since a bracket or a backslash is left open.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from harness.strings import PREFIXES, string

# Each pattern starts with a plain character: such a one is looked for at the speed of memchr.
_OPAQUE = re.compile(
    r"""\#[^\n]*
    | \"\"\"[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*\"\"\"
    | '''[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*'''
    | "(?!"")[^"\\\n]*(?:\\.[^"\\\n]*)*"
    | '(?!'')[^'\\\n]*(?:\\.[^'\\\n]*)*'
    | " | '""",
    re.VERBOSE | re.DOTALL,
)
# A formatted string that ends at its own quote on every version: what is in its braces has neither quotes nor braces.
_PLAIN = re.compile(
    r""""(?!")(?:[^"{}\\\n]|\{\{|\}\}|\{[^"'{}\\\n\#]*\})*" | '(?!')(?:[^'{}\\\n]|\{\{|\}\}|\{[^"'{}\\\n\#]*\})*'""",
    re.VERBOSE,
)
_PREFIX = re.compile(r"(?<!\w)[A-Za-z]{1,2}\Z")
# A head, or a line's indent, that a backslash breaks: what is indented then isn't seen on one line.
_BROKEN = re.compile(r"(?:def|class|async) *\\\n|^ *\\\n", re.MULTILINE)
_PAIRS = (("(", ")"), ("[", "]"), ("{", "}"))


class Lines(NamedTuple):
    """Whole lines that are one definition and its decorators, as character offsets, and the word that it has."""

    start: int
    end: int
    word: str


def lines(text: str, names: Sequence[str]) -> Lines | Literal["absent"] | None:
    """Of a top-level function or class, or a method as [class, method]. "absent" where a name is never defined at all.

    None is no answer. An answer is right if its lines parse.
    """
    if text.isascii() and any(name not in text for name in names):
        return "absent"
    code = _code(text)
    if code is None:
        return None
    headers = [_headers(code, name) for name in names]
    if not all(headers):
        return "absent"
    found = Lines(0, len(code), "")
    for depth, those in enumerate(headers):
        inside = [header for header in those if found.start <= header[0] < found.end]
        if len(inside) != 1:
            return None
        [(at, indent, word)] = inside
        if _owners(code, found.start, at, indent) if depth else indent:
            return None  # it may be in another definition
        behind = re.compile(rf"\n {{0,{indent}}}[^\s)\]}}]").search(code, _line_end(code, at), found.end)
        found = Lines(at, behind.start() + 1 if behind else found.end, word)
        if _unpaired(code, at, found.end) or _continues(code, found.end):
            return None  # the line that was taken for a statement is in brackets, or goes on: there is more below
    start = _decorated(code, at, indent)
    return None if start is None else found._replace(start=start)


def _headers(code: str, name: str) -> list[tuple[int, int, str]]:
    """Of each definition of this name where its line starts, how far it is indented, and its word, `def` or `class`."""
    found = []
    for word in ("def", "class"):
        for hit in re.compile(rf"{word} +{re.escape(name)}(?!\w)").finditer(code):
            at = code.rfind("\n", 0, hit.start()) + 1
            before = code[at : hit.start()]
            if before.strip() in ("", "async"):
                found.append((at, len(before) - len(before.lstrip()), word))
    return found


def _owners(code: str, start: int, at: int, indent: int) -> bool:
    """Whether there is a definition, behind that at `start`, which what is indented by `indent` at `at` may be in."""
    return bool(re.compile(rf"\n {{0,{indent - 1}}}(?:async|def|class)\b").search(code, _line_end(code, start), at))


def _decorated(code: str, at: int, indent: int) -> int | None:
    """Where the decorators start of the definition whose line starts at `at`, or `at`; None in doubt."""
    first = begin = at
    while begin:
        begin, stop = code.rfind("\n", 0, begin - 1) + 1, begin
        line = code[begin:stop].rstrip()
        blanks = len(line) - len(line.lstrip())
        if line and blanks <= indent and line[blanks] not in ")]}":
            if line[blanks] != "@" or _continues(code, begin):
                break
            first = begin
    if _unpaired(code, begin, at):
        return None  # the line that was taken for a statement is in brackets
    return None if _continues(code, begin) else first


def _unpaired(code: str, start: int, end: int) -> bool:
    return any(code.count(opening, start, end) != code.count(closing, start, end) for opening, closing in _PAIRS)


def _continues(code: str, begin: int) -> bool:
    """Whether the line that starts here goes on with the one before it."""
    return code.endswith("\\\n", 0, begin)


def _line_end(code: str, at: int) -> int:
    end = code.find("\n", at)
    return end if end >= 0 else len(code)


@lru_cache(maxsize=8)
def _code(text: str) -> str | None:
    """The text with its strings and comments blanked, of the same length; None for one that isn't plain."""
    if "\r" in text:
        return None
    parts, at = [], 0
    while found := _OPAQUE.search(text, at):
        start, end = found.span()
        if text[start] == "#":
            parts += [text[at:start], " " * (end - start)]
        else:
            if text[start - 1 : start].isalpha():
                prefix = _PREFIX.search(text, max(start - 3, 0), start)
                if prefix and {"f", "t"} & set(prefix[0].lower()) and prefix[0].lower() in PREFIXES:
                    end = _formatted(text, start, prefix[0])
            if end <= start + 1:  # a quote without another
                return None
            parts += [text[at:start], "_" * (end - start)]
        at = end
    code = "".join([*parts, text[at:]])
    plain = code.isascii() and "\t" not in code and "\f" not in code and not ("\\\n" in code and _BROKEN.search(code))
    return code if plain and not _unpaired(code, 0, len(code)) else None


def _formatted(text: str, at: int, prefix: str) -> int:
    """Where the string ends whose quotes start at `at`; 0 if it doesn't."""
    if found := _PLAIN.match(text, at):
        return found.end()
    quote = text[at : at + 3] if text[at : at + 3] in ('"""', "'''") else text[at]
    end, _ = string(text, at - len(prefix), prefix, quote)
    return end if text.endswith(quote, at + len(quote), end) else 0
