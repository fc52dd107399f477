"""What differs between two texts of a C++ or CUDA file, line by line and by tokens: see `harness.changes`.

Without a parser for C++, a place's function is the nearest name above it, at its own depth of braces or less, that
reads like a definition; only `--only` depends on it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from harness.changes import Comparison, Piece
from harness.edits import Change, Edit, apply
from harness.errors import RottedError
from harness.smallest import opcodes
from harness.tokens import NEWLINE, lex

_GUARD = re.compile(r"\s*(assert|static_assert|[A-Za-z_:]*(CHECK|Check|RuntimeCheck)\w*)\s*\(")
_DEFINITION = re.compile(r"(\w+)\s*\([^;]*$")
_NOT_NAMES = {
    "if",
    "for",
    "while",
    "switch",
    "return",
    "else",
    "do",
    "assert",
    "sizeof",
    "defined",
    "__launch_bounds__",
}
_WIDEST = 3


def compare(old_text: str, new_text: str, wanted: Callable[[str], bool] | None = None) -> Comparison:
    """Compare two texts of a file. `wanted`: the functions to look at, by name."""
    result = Comparison()
    old, new = _code_lines(old_text), _code_lines(new_text)
    source = "\n".join(re.split(NEWLINE, new_text))
    for tag, a, b, c, d in opcodes(*([_key(text) for _, text in lines] for lines in (old, new))):
        if tag == "equal":
            continue
        stretches = [(c, d, "")] if a < b else list(_split(new, c, d))
        for first, end, guard in stretches:
            line = new[min(first, len(new) - 1)][0] if new else 1
            where = _function(new, first)
            if wanted and not wanted(where):
                continue
            if a == b and all(text.lstrip().startswith("#include") for _, text in new[first:end]):
                result.left.append(f"line {line}: an #include, left alone")
                continue
            try:
                edit = _edit(source, old, new, (a, b), (first, end))
            except RottedError as error:
                result.left.append(f"{where or 'line'} {line}: left out, {error.message}")
                continue
            result.pieces.append(Piece(where, edit, line=line, guard=guard))
    return result


def _code_lines(text: str) -> list[tuple[int, str]]:
    """The lines with code on them, without comments: (1-based number, code)."""
    text = "\n".join(re.split(NEWLINE, text))
    parts, at = [], 0
    for comment in lex(text, "c").comments:
        parts.append(text[at : comment.start] + "\n" * text.count("\n", comment.start, comment.end))
        at = comment.end
    code = "".join([*parts, text[at:]]).split("\n")
    return [(number, line.rstrip()) for number, line in enumerate(code, 1) if _key(line)]


def _key(line: str) -> str:
    return " ".join(token.text for token in lex(line, "c").tokens)


def _split(lines: list[tuple[int, str]], first: int, end: int) -> Iterator[tuple[int, int, str]]:
    """Inserted lines as (first, end, guard): every guard on its own, the rest in stretches."""
    start = at = first
    while at < end:
        if _GUARD.match(lines[at][1]):
            if start < at:
                yield start, at, ""
            stop = at + 1
            while stop < end and not lines[stop - 1][1].rstrip().endswith(";"):
                stop += 1
            guard = " ".join(text.strip() for _, text in lines[at:stop])
            yield at, stop, guard if guard.endswith(";") else ""  # else the lines of a macro
            start = at = stop
        else:
            at += 1
    if start < end:
        yield start, end, ""


def _function(lines: list[tuple[int, str]], at: int) -> str:
    depth = 0
    for _, text in reversed(lines[:at]):
        depth += text.count("}") - text.count("{")
        found = _DEFINITION.search(text)
        if found and depth <= 0 and found.group(1) not in _NOT_NAMES and "=" not in text and "]" not in text:
            return found.group(1)
    return ""


def _edit(
    source: str, old: list[tuple[int, str]], new: list[tuple[int, str]], olds: tuple[int, int], news: tuple[int, int]
) -> Edit:
    """The edit with the fewest lines around it that the engine finds once."""
    why: RottedError | None = None
    for above, below in [
        (0, 0),
        *((wide, 0) for wide in range(1, _WIDEST)),
        *((wide, wide) for wide in range(1, _WIDEST)),
    ]:
        here = _text(new[max(news[0] - above, 0) : news[1] + below])
        gone = _text(old[max(olds[0] - above, 0) : olds[1] + below])
        if not here:
            continue
        edit = Edit(here, replacement="" if not above + below and olds[0] == olds[1] else gone)
        try:
            apply(source, [Change(edit, ((0, len(source)),))], language="c", name="it")
        except RottedError as error:
            why = why or error
            continue
        return edit
    raise why or RottedError("no edit undoes this")


def _text(lines: list[tuple[int, str]]) -> str:
    margin = min((len(text) - len(text.lstrip()) for _, text in lines), default=0)
    return "\n".join(text[margin:] for _, text in lines)
