"""Tables in a page of docs/ that a script writes: each stands between two comments, and the rest is by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def filled(text: str, script: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """The page with each table, by its name in the comments, as it is now. ``script``: the path in them."""
    for name, made in tables.items():
        begin, end = f"<!-- {name}: python {script} -->\n", f"<!-- end of {name} -->\n"
        before, rest = text.split(begin)
        text = before + begin + made() + end + rest.split(end)[1]
    return text
