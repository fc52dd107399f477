"""Plain text: what was captured, so that neither a reader's eye, a terminal nor a log takes it for anything else.

    visible   control characters are spelt out: a dying process must not change what a report says
    hidden    the first such character, "" where there is none
    one_line  line ends, too, and cut to a length
    log_line  and nothing in it that GitHub's runner takes for a command to itself

The runner reads a job's stdout and stderr. It takes a line that starts with ``::name`` for a command, and the older
``##[name]`` anywhere in a line (ActionCommand.cs of github.com/actions/runner). Standard library only.
"""

from __future__ import annotations

import re

# what a terminal, or a reader's eye, takes for more than a character, or for none: C0 but tab and newline, C1, soft
# hyphens, direction, blanks without width, annotations, lone surrogates, tags
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
# the runner compares by its culture, which skips more than blanks before the colons
_COMMAND = re.compile(r"^([^0-9A-Za-z]*?):(?=:)")


def visible(text: str) -> str:
    """Control characters as ``\\x1b``; tabs and line ends stay."""
    return _UNSEEN.sub(lambda found: ascii(found.group())[1:-1], text)


def hidden(text: str) -> str:
    """The first character that `visible` would spell out, "" where there is none."""
    found = _UNSEEN.search(text)
    return found.group() if found else ""


def one_line(text: str, most: int | None = None) -> str:
    """At most ``most`` characters, the last of which says that there were more."""
    line = visible(text).replace("\n", "\\n").replace("\t", " ")
    return line if most is None or len(line) <= most else line[: most - 1] + "…"


def log_line(text: str) -> str:
    """One line of stdout or stderr, whatever it holds."""
    return _COMMAND.sub(r"\1\\x3a", one_line(text)).replace("##[", "#\\x23[")
