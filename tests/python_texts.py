"""Random Python, as the text itself and as the lines that it is made of: for tests/test_properties*.py.

An expression is drawn as parts, so that it can be written down in many ways: a line end may stand where brackets are
open, a comma before a closing bracket, either kind of quote around a text.
"""

from __future__ import annotations

import random
import sysconfig
from functools import lru_cache
from pathlib import Path

from hypothesis import strategies as st

WRAP, COMMA = "\0wrap", "\0comma"  # where a line end may stand; a comma that means nothing
NAMES = ["a", "b", "topk", "self.n", "été", "数", "𝒳", "_", "match", "ªb", "f", "rb", "x.y.z", "type"]
# Texts: code in them must not be found, whatever they hold.
WORDS = ["", "a = b", "n", "# no comment", "{", "}", "{{}}", "\\n", "é", "𝒳😀", "pass", "f(a,", "it is", "\\\\"]
NUMBERS = ["0", "1", "2**31", "0xFf", "1_000", "1.5e-3", ".5", "3j", "-1"]
OPERATORS = ["+", "*", "//", "@", "<<", "and", "or", "is not", "not in", "==", "<="]

Parts = tuple[str, ...]


def _text(prefix: str, word: str) -> Parts:
    return (f"\0text{prefix}:{word}",)


_atoms = st.one_of(
    st.sampled_from(NAMES).map(lambda name: (name,)),
    st.sampled_from(NUMBERS).map(lambda number: (number,)),
    st.builds(_text, st.sampled_from(["", "r", "b", "Rb", "u"]), st.sampled_from([w for w in WORDS if w.isascii()])),
    st.builds(_text, st.just(""), st.sampled_from(WORDS)),
    st.sampled_from(["f'{a}'", "f\"{a!r:>{b}} a = b\"", "f'{{a}} {b}'", "f'''{a\n}'''", "f\"{'}'}\" + '}'"]).map(
        lambda text: (text,)
    ),
)  # fmt: skip


def _inside(opening: str, items: list[Parts], closing: str) -> Parts:
    parts: list[str] = [opening, WRAP]
    for at, item in enumerate(items):
        parts += [*item, *((",", WRAP) if at + 1 < len(items) else ())]
    return (*parts, *((COMMA,) if len(items) > 1 or (items and opening != "(") else ()), WRAP, closing)


def _grown(inner: st.SearchStrategy[Parts]) -> st.SearchStrategy[Parts]:
    some = st.lists(inner, max_size=3)
    two = st.lists(inner, min_size=2, max_size=3)
    return st.one_of(
        st.builds(lambda a, o, b: ("(", WRAP, *a, f" {o} ", WRAP, *b, ")"), inner, st.sampled_from(OPERATORS), inner),
        st.builds(lambda name, items: (name, *_inside("(", items, ")")), st.sampled_from(["f", "a.g", "zeros"]), some),
        st.builds(lambda items: _inside("[", items, "]"), two),
        st.builds(lambda items: _inside("(", items, ")"), two),
        st.builds(lambda key, value: _inside("{", [(*key, ": ", *value)], "}"), inner, inner),
        st.builds(lambda a, b: ("(", *a, " if ", WRAP, *b, " else 1", ")"), inner, inner),
        st.builds(lambda a: ("(lambda n: ", *a, ")"), inner),
        st.builds(lambda a: ("[", *a, " for n in ", WRAP, "b]"), inner),
        st.builds(lambda a: ("a[", WRAP, *a, ":", "]"), inner),
    )  # fmt: skip


expressions = st.recursive(_atoms, _grown, max_leaves=5)
simple = st.one_of(
    st.builds(lambda a: ("a = ", *a), expressions),
    st.builds(lambda a: ("a.b[0] += ", *a), expressions),
    st.builds(lambda a, b: ("a, ", "b = ", *a, ", ", *b), expressions, expressions),
    st.builds(lambda a: ("assert ", *a), expressions),
    st.builds(lambda a: ("f(", WRAP, *a, WRAP, ")"), expressions),
    st.builds(lambda a: ("a: int = ", *a), expressions),
    st.sampled_from([("pass",), ("import os.path as p",), ("from . import (", WRAP, "a", COMMA, ")"), ("del a",)]),
    st.just(("raise E(", WRAP, "'a = b'", WRAP, ") from None")),
)  # fmt: skip


def _block(head: str) -> st.SearchStrategy[list[str | list]]:
    return st.deferred(lambda: bodies).map(lambda body: [head, body])


_heads = ["if a:", "for n in b:", "while a:", "with a as b, c:", "def f(a, *, b=1):", "class C(B):", "async def g():",
          "@d(1)\ndef f():", "else:", "try:", "match a:\n case 1:", "if (a and\n\tb):"]  # fmt: skip
# A statement: its parts, or a block as [head, body]; a body is a list of those. `else` and `try` are made whole below.
statements: st.SearchStrategy = st.deferred(lambda: simple | st.sampled_from(_heads).flatmap(_block))
bodies = st.lists(statements, min_size=1, max_size=3)


def written(parts: Parts, layout: random.Random | None = None) -> str:
    """A statement as a text: on one line, or in a random layout."""
    text = ""
    for part in parts:
        if part == WRAP:
            text += layout.choice(["", "", "\n", " # a = b\n", "\n\n    ", " \\\n"]) if layout else ""
        elif part == COMMA:
            text += layout.choice(["", ","]) if layout else ""
        elif part.startswith("\0text"):
            prefix, _, word = part[5:].partition(":")
            quotes = ["'", '"', "'''", '"""'] if layout else ["'"]
            text += prefix + (quote := layout.choice(quotes) if layout else quotes[0]) + word + quote
        else:
            text += part.replace(" ", layout.choice([" ", "  ", "\t"])) if layout and part[-1:] == " " else part
    return text


def lines(body: list, unit: str, layout: random.Random | None, depth: int = 0) -> list[str]:
    """A body, a statement or a head with its indentation an entry; an entry may hold line ends."""
    found: list[str] = []
    for statement in body:
        indent = unit * depth
        if isinstance(statement, tuple):
            found.append(indent + written(statement, layout))
        else:
            head, below = statement
            before = {"else:": ["if b:", f"{unit}b()"]}.get(head, [])
            after = {"try:": ["except (E, F):", f"{unit}pass"]}.get(head, [])
            deeper = 2 if head.startswith("match") else 1
            heads = head.replace("\n case", f"\n{indent}{unit}case").replace("\ndef", f"\n{indent}def")
            found += [indent + line for line in before] + [indent + heads]
            found += lines(below, unit, layout, depth + deeper) + [indent + line for line in after]
        if layout:
            found += layout.choice([[], [], [], [""], [indent + "# a = b"], ["\f"], ["#: '''"], ["  "]])
    return found


@st.composite
def modules(draw: st.DrawFn) -> tuple[list[str], str]:
    """A module's lines, as `lines` has them, and what it indents by."""
    unit = draw(st.sampled_from(["    ", "  ", "\t", " "]))
    layout = random.Random(draw(st.integers(0, 999)))
    return lines(draw(st.lists(statements, min_size=1, max_size=5)), unit, layout), unit


ENDS = ["\n", "\r\n", "\r"]


def with_ends(text: str, ends: str | int, last: bool = True) -> str:
    """A text with other line ends: all of them `ends`, or, for a number, mixed; with or without the last one."""
    mixed = random.Random(ends) if isinstance(ends, int) else None
    parts = text.split("\n")
    text = "".join(part + (mixed.choice(ENDS) if mixed else str(ends)) for part in parts[:-1]) + parts[-1]
    # "\r" and then an empty line's "\n" would be one line end, not two
    return text if last else text.rstrip("\r\n")


line_ends = st.one_of(st.sampled_from(ENDS), st.integers(0, 99))


@lru_cache(maxsize=4)
def standard_library(tests: bool = False) -> list[Path]:
    """The running Python's own files, and with `tests` those of its test suite, too, which are its largest."""
    top = Path(sysconfig.get_path("stdlib"))
    found = [file for file in sorted(top.rglob("*.py")) if not {"site-packages", "lib2to3"} & set(file.parts)]
    return [file for file in found if tests or not {"test", "tests", "idlelib"} & set(file.relative_to(top).parts)]
