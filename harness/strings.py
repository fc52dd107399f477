"""Python's string literals: where one ends, and what it says whichever quotes were chosen.

An f-string ends where Python 3.12 says, on every version: it may hold its own quote inside braces. Each place is looked
at a bounded number of times, whatever the text.
"""

from __future__ import annotations

import re
from functools import lru_cache

PREFIXES = frozenset(("", "r", "u", "b", "f", "t", "br", "rb", "fr", "rf", "tr", "rt"))
_FORMATTED = frozenset(prefix for prefix in PREFIXES if "f" in prefix or "t" in prefix)
_CODE = re.compile(
    r"""(?P<prefix>[A-Za-z]{0,2})(?P<quote>\"\"\"|'''|"|') | (?P<open>[(\[{]) | (?P<close>[)\]}]) | (?P<format>:)
    | \w+ | \#[^\r\n]* | [^\w'"()\[\]{}:\#]+""",
    re.VERBOSE,
)
_DEEPEST = 20  # strings in strings
_MOST_BRACKETS = 20  # in one another, in one pair of braces


def string(source: str, start: int, prefix: str, quote: str) -> tuple[int, str]:
    """The end of the string that starts at `start`, and its text with the choice of quotes taken out.

    One without an end goes to the end of its line, or, in triple quotes, of the source.
    """
    prefix = prefix.lower()
    body_at = start + len(prefix) + len(quote)
    end = _closing(source, body_at, quote, prefix in _FORMATTED)
    if end is None:  # as Python 3.11 reads it
        end = _closing(source, body_at, quote, False)
    if end is None:
        end = _plain(quote, True).match(source, body_at).end()  # type: ignore[union-attr]  # it takes an empty text, too
        return end, f"{prefix}?{source[body_at:end]}"
    body = source[body_at:end]
    if "r" not in prefix:
        body = re.sub(r"\\(.)", lambda m: m.group(1) if m.group(1) in "\"'" else m.group(), body, flags=re.DOTALL)
    if prefix in _FORMATTED:
        body = _same_inner_quotes(body)
    body = re.sub(r"\r\n?", "\n", body)
    return end + len(quote), f"{''.join(sorted(prefix.replace('u', '')))}'{body}"


@lru_cache(maxsize=8)
def _plain(quote: str, braces: bool) -> re.Pattern[str]:
    """What goes on inside a string's quotes, with or without `braces` as nothing special."""
    limit = "" if len(quote) == 3 else r"\r\n"
    if braces:
        return re.compile(rf"(?:\\(?:\r\n|.)|(?!{quote})[^\\{limit}])*", re.DOTALL)
    return re.compile(
        rf"(?:\\(?:\r\n|[^{{}}]|(?=[{{}}]))|\{{\{{|\}}\}}|(?!{quote})[^\\{{}}{limit}])*",
        re.DOTALL,
    )


def _closing(source: str, at: int, quote: str, formatted: bool, level: int = 0) -> int | None:
    """Where the closing quote is of a string whose body starts at `at`; None if there is none."""
    inside = _plain(quote, not formatted)
    while True:
        at = inside.match(source, at).end()  # type: ignore[union-attr]
        if source.startswith(quote, at):
            return at
        if not formatted or source[at : at + 1] != "{":
            return None
        behind = _field(source, at + 1, quote, level + 1)
        if behind is None:
            return None
        at = behind


def _field(source: str, at: int, quote: str, level: int) -> int | None:
    """Where the text goes on behind the braces whose inside starts at `at`; None if they don't close."""
    brackets = 0
    while level < _DEEPEST and brackets < _MOST_BRACKETS and (found := _CODE.match(source, at)):
        at = found.end()
        if inner := found.group("quote"):
            closed = _closing(source, at, inner, found.group("prefix").lower() in _FORMATTED, level + 1)
            if closed is None:
                return None
            at = closed + len(inner)
        elif found.group("open"):
            brackets += 1
        elif found.group("close") and brackets:
            brackets -= 1
        elif found.group("close"):
            return at if found.group() == "}" else None
        elif found.group("format") and not brackets:
            return _format(source, at, quote, level)
    return None


def _format(source: str, at: int, quote: str, level: int) -> int | None:
    """The same of a format, `>10` of `{x:>10}`, which may hold braces of its own."""
    limit = "" if len(quote) == 3 else r"\r\n"
    inside = re.compile(rf"(?:(?!{quote})[^{{}}{limit}])*")
    while True:
        at = inside.match(source, at).end()  # type: ignore[union-attr]
        if source[at : at + 1] != "{":
            return at + 1 if source[at : at + 1] == "}" else None
        behind = _field(source, at + 1, quote, level + 1)
        if behind is None:
            return None
        at = behind


def _same_inner_quotes(body: str) -> str:
    parts, depth, at = [], 0, 0
    while at < len(body):
        if depth == 0 and body[at : at + 2] in ("{{", "}}"):
            parts.append(body[at : at + 2])
            at += 2
            continue
        depth += {"{": 1, "}": -1}.get(body[at], 0)
        parts.append("'" if depth > 0 and body[at] == '"' else body[at])
        at += 1
    return "".join(parts)
