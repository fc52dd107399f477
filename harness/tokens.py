"""A small lexer for Python and C-like sources, so that snippets are compared by what they say and not by how they look.

It differs from the standard library's `tokenize` on purpose: it reads a snippet with unbalanced brackets, it gives the
same tokens on every Python version (an f-string is one token), and it tells which commas and newlines mean nothing.
"""

from __future__ import annotations

import keyword
import re
from functools import lru_cache
from pathlib import PurePath
from typing import Literal, NamedTuple

from harness.strings import PREFIXES, string

Language = Literal["python", "c"]
Kind = Literal["name", "number", "string", "op", "newline", "directive", "comment"]

C_SUFFIXES = frozenset({".c", ".cc", ".cpp", ".cxx", ".cu", ".cuh", ".h", ".hh", ".hpp", ".hxx", ".inc", ".inl"})


class Token(NamedTuple):
    """One token. `text` is normalised, `start` and `end` are character offsets into the source it was read from.

    `depth` is the bracket depth just after the token. `optional` marks a comma that changes nothing, since a closing
    bracket follows it.
    """

    kind: Kind
    text: str
    start: int
    end: int
    depth: int
    optional: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, self.text


class Lexed(NamedTuple):
    """The tokens that count, and the comments, both in source order."""

    tokens: tuple[Token, ...]
    comments: tuple[Token, ...]


def language_of(path: str | PurePath) -> Language | None:
    """The language that a file name's ending stands for, None where we have no lexer for it."""
    suffix = PurePath(path).suffix
    return "python" if suffix in (".py", ".pyi") else "c" if suffix in C_SUFFIXES else None


NEWLINE = r"\r\n|\r|\n"
_NUMBER = r"""(?:0[xXbBoO][0-9a-fA-F_']+
    | (?:[0-9][0-9_']*\.?[0-9_]* | \.[0-9][0-9_]*)(?:[eE][+-]?[0-9_]+)?)[A-Za-z_]*"""
_PYTHON = re.compile(
    rf"""(?P<space>[ \t\f\ufeff]+ | \\(?:{NEWLINE}))
    | (?P<newline>{NEWLINE})
    | (?P<comment>\#[^\r\n]*)
    | (?P<string>[A-Za-z]{{0,2}}(?:\"\"\"|'''|"|'))
    | (?P<number>{_NUMBER.replace("'", "")})
    | (?P<name>[^\W\d]\w*)
    | (?P<op>\*\*=|//=|>>=|<<=|\.\.\.|->|:=|==|!=|<=|>=|\*\*|//|<<|>>|[-+*/%@&|^]=|.)""",
    re.VERBOSE | re.DOTALL,
)
_C = re.compile(
    rf"""(?P<space>[ \t\f\v\ufeff]+ | \\(?:{NEWLINE}))
    | (?P<newline>{NEWLINE})
    | (?P<comment>//(?:\\(?:{NEWLINE})|[^\r\n])* | /\*.*?(?:\*/|\Z))
    | (?P<raw>(?:u8|[uUL])?R"[^()\\\s]{{0,16}}\()
    | (?P<string>(?:u8|[uUL])?(?:"(?:\\.|[^"\\\r\n])*" | '(?:\\.|[^'\\\r\n])*'))
    | (?P<number>{_NUMBER})
    | (?P<name>[^\W\d]\w*)
    | (?P<op><<=|>>=|<=>|->\*|\.\.\.|::|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|\#\#|.)""",
    re.VERBOSE | re.DOTALL,
)
_DIRECTIVE = re.compile(rf"\#(?:\\(?:{NEWLINE})|/\*.*?(?:\*/|\Z)|(?!//)[^\r\n])*", re.DOTALL)
_CLOSERS = {")": "(", "]": "[", "}": "{"}


@lru_cache(maxsize=64)
def lex(source: str, language: Language = "python") -> Lexed:
    """Split `source` into tokens. Any text is accepted: what can't be read becomes a one-character `op` token.

    Python: newlines count at bracket depth 0 only, blank lines and indentation don't. C-like: newlines don't count, a
    preprocessor line is one token.
    """
    reader = _Reader(source, language)
    reader.read()
    return Lexed(tuple(reader.tokens), tuple(reader.comments))


class _Reader:
    def __init__(self, source: str, language: Language) -> None:
        self.source = source
        self.python = language == "python"
        self.tokens: list[Token] = []
        self.comments: list[Token] = []
        # For every open bracket: its character, whether it calls or indexes something, how many commas it holds.
        self.open: list[list] = []

    def read(self) -> None:
        pattern = _PYTHON if self.python else _C
        at, line_start = 0, True
        while at < len(self.source):
            if not self.python and line_start and (directive := _DIRECTIVE.match(self.source, at)):
                text = re.sub(rf"\\(?:{NEWLINE})|/\*.*?(?:\*/|\Z)", " ", directive.group(), flags=re.DOTALL)
                end = at + len(directive.group().rstrip())
                self.add("directive", "#" + " ".join(text[1:].split()), at, end)
                at, line_start = directive.end(), False
                continue
            found = pattern.match(self.source, at)
            assert found is not None and found.lastgroup is not None  # `.` with DOTALL takes anything
            kind, text, end = found.lastgroup, found.group(), found.end()
            if kind == "string" and self.python:
                prefix = text.rstrip("\"'")
                if prefix.lower() not in PREFIXES:
                    kind, text, end = "name", prefix, at + len(prefix)
                else:
                    end, text = string(self.source, at, prefix, text[len(prefix) :])
            elif kind == "raw":
                fence = text[text.index('"') + 1 : -1]
                closed = self.source.find(f'){fence}"', end)
                kind, end = ("string", closed + len(fence) + 2) if closed >= 0 else ("op", at + 1)
                text = self.source[at:end]
            if kind == "newline":
                line_start = True
                if self.python and not self.open and self.tokens and self.tokens[-1].kind != "newline":
                    self.add("newline", "\n", at, end)
            elif kind == "comment":
                self.comments.append(Token("comment", text, at, end, len(self.open)))
            elif kind == "op":
                self.operator(text, at, end)
                line_start = False
            elif kind != "space":
                self.add(kind, text, at, end)  # type: ignore[arg-type]
                line_start = False
            at = end

    def add(self, kind: Kind, text: str, start: int, end: int) -> None:
        self.tokens.append(Token(kind, text, start, end, len(self.open)))

    def operator(self, text: str, start: int, end: int) -> None:
        if text in ("(", "[", "{"):
            self.open.append([text, bool(self.tokens) and _takes_a_list(self.tokens[-1]), 0])
        elif text == "," and self.open:
            self.open[-1][2] += 1
        elif text in _CLOSERS:
            if not self.open and self.tokens and self.tokens[-1].kind == "newline":
                self.tokens.pop()  # a snippet that starts inside a bracket: this line end was inside, too
            if self.tokens and self.tokens[-1].key == ("op", ",") and self.comma_is_idle(text):
                self.tokens[-1] = self.tokens[-1]._replace(optional=True)
            if self.open and self.open[-1][0] == _CLOSERS[text]:
                self.open.pop()
        self.add("op", text, start, end)

    def comma_is_idle(self, closer: str) -> bool:
        if not self.python:
            return closer == "}"
        if not self.open or self.open[-1][2] > 1:
            return True
        bracket, after_primary, _ = self.open[-1]
        # `(x,)` and `a[x,]` are tuples: there the only comma does mean something.
        return bracket == "{" or (bracket == "(") == after_primary


def _takes_a_list(token: Token) -> bool:
    """Whether brackets behind this token call it, index it or, of an import, hold names: all else are tuples."""
    if token.kind == "name":
        return token.text == "import" or not keyword.iskeyword(token.text)
    return token.kind == "string" or token.text in (")", "]", "}")
