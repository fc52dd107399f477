"""Truth tables: shapes as text, one a line, so that a regression reads like what it claims."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def shapes(table: str) -> Iterator[dict[str, Any]]:
    """The rows of a table as keyword arguments of a scenario's ``case``.

    The first line names the columns; ``#`` starts a comment. A column of lengths takes ``3,5`` and ``7x1500`` (seven of
    1500) and ``-`` for none; other values are integers where they look like it.
    """
    lines = [line.split("#")[0].split() for line in table.strip().splitlines()]
    names, rows = lines[0], [line for line in lines[1:] if line]
    for row in rows:
        if len(row) != len(names):
            raise ValueError(f"a row of {len(row)} values under {len(names)} columns: {' '.join(row)}")
        yield {name: _value(name, text) for name, text in zip(names, row, strict=True)}


def _value(name: str, text: str) -> Any:
    if name in ("seq_lens", "slots"):
        return [] if text == "-" else [value for part in text.split(",") for value in _repeated(part)]
    return int(text) if text.lstrip("-").isdigit() else text


def _repeated(part: str) -> list[int]:
    count, times, value = part.partition("x")
    return [_integer(value)] * int(count) if times else [_integer(count)]


def _integer(text: str) -> int:
    base, power, exponent = text.partition("^")
    return int(base) ** int(exponent) if power else int(text)
