"""Unified diffs: what `git show`, `git format-patch` and `diff -u` write, and how to take one out of a text again.

    diff --git a/pkg/mod.py b/pkg/mod.py     optional, as are rename from/to, new file mode, deleted file mode
    --- a/pkg/mod.py
    +++ b/pkg/mod.py
    @@ -12,3 +12,4 @@ def f():
     context, -removed, +added

A hunk ends where its header's counts say so: mail signatures and commit messages around it are no part of it. Line ends
don't count, neither the diff's nor the text's: a patch that a mail program turned into CRLF is the same patch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from harness.errors import UsageError
from harness.tokens import NEWLINE

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}


@dataclass(frozen=True)
class Hunk:
    """`old` and `new`: its lines before and after, without line ends. `start`: 1-based, where it is after."""

    old: tuple[str, ...]
    new: tuple[str, ...]
    start: int
    line: int  # of the diff, for errors


@dataclass
class FileDiff:
    """One file of a diff. `old` or `new` is None where the file is new or deleted."""

    old: str | None
    new: str | None
    line: int
    hunks: list[Hunk] = field(default_factory=list)
    binary: bool = False

    @property
    def path(self) -> str:
        return self.new or self.old or ""

    @property
    def renamed(self) -> bool:
        return None not in (self.old, self.new) and self.old != self.new


class DoesNotApply(Exception):
    """A hunk whose lines aren't in the text. `hunk` is the one; the message says what stands there, in one line."""

    def __init__(self, message: str, hunk: Hunk) -> None:
        super().__init__(message)
        self.hunk = hunk


def parse(text: str, name: str = "<diff>") -> list[FileDiff]:
    """The files of a diff, in its order. Raises UsageError, with the diff's line, for what is no unified diff."""
    lines = re.sub(r"\n\Z", "", re.sub(NEWLINE, "\n", text)).split("\n")
    files = list(_files(lines, name))
    if not files:
        raise UsageError(f"{name}: no unified diff in it: give what git show, git format-patch or diff -u writes")
    return files


def undo(text: str, hunks: list[Hunk]) -> str:
    """The text as it was before these hunks. Each is looked for nearest to where its header says.

    Raises DoesNotApply for a hunk that isn't there.
    """
    found = re.findall(NEWLINE, text)
    newline = Counter(found).most_common(1)[0][0] if found else "\n"
    lines = re.split(NEWLINE, text)
    shift = 0
    for hunk in sorted(hunks, key=lambda hunk: hunk.start):
        start = hunk.start - bool(hunk.new)  # of no lines, the header names the one before
        at = _find(lines, hunk, start + shift)
        lines[at : at + len(hunk.new)] = hunk.old
        shift = at - start + len(hunk.old) - len(hunk.new)
    return newline.join(lines)


def _find(lines: list[str], hunk: Hunk, near: int) -> int:
    new = list(hunk.new)
    if not new:  # with no context at all, only its header says where
        return min(max(near, 0), len(lines))
    places = [at for at in range(len(lines) - len(new) + 1) if lines[at] == new[0] and lines[at : at + len(new)] == new]
    if places:
        return min(places, key=lambda at: abs(at - near))
    wrong = next((at for at in range(len(new)) if new[at] not in lines), 0)
    old = [at for at in range(len(lines)) if lines[at : at + len(hunk.old)] == list(hunk.old)]
    if old and hunk.old:
        raise DoesNotApply(
            f"what it replaces is what stands there, line {old[0] + 1}: these sources lack the fix", hunk
        )
    raise DoesNotApply(f"no such lines around line {max(near, 0) + 1}: `{new[wrong].strip()[:80]}`", hunk)


def _files(lines: list[str], name: str) -> Iterator[FileDiff]:
    current: FileDiff | None = None
    unnamed = False  # a git header was read, and its --- and +++ may follow
    at = 0
    while at < len(lines):
        line, following = lines[at], lines[at + 1] if at + 1 < len(lines) else ""
        if line.startswith("diff --git "):
            if current is not None:
                yield current
            current, unnamed = FileDiff(*_git_paths(line), at + 1), True
        elif line.startswith("--- ") and following.startswith("+++ "):
            if current is not None and not unnamed:
                yield current
            old, new = _paths(line[4:], following[4:])
            current = current if current is not None and unnamed else FileDiff(old, new, at + 1)
            current.old, current.new, unnamed = old, new, False
            at += 1
        elif line.startswith(("@@@", "diff --cc ", "diff --combined ")):
            raise UsageError(
                f"{name}:{at + 1}: a merge's combined diff: give git show -m --first-parent, or one commit"
            )
        elif line.startswith("@@ ") and current is not None:
            at = _hunk(lines, at, current, name)
            continue
        elif unnamed and current is not None:
            _header(line, current)
        elif found := re.match(r"Binary files (.+) and (.+) differ", line):
            if current is not None:
                yield current
            current = FileDiff(*_paths(found.group(1), found.group(2)), at + 1, binary=True)
        at += 1
    if current is not None:
        yield current


def _header(line: str, current: FileDiff) -> None:
    if line.startswith("rename from "):
        current.old = _unquoted(line[len("rename from ") :])
    elif line.startswith("rename to "):
        current.new = _unquoted(line[len("rename to ") :])
    elif line.startswith("new file mode "):
        current.old = None
    elif line.startswith("deleted file mode "):
        current.new = None
    elif line.startswith(("Binary files ", "GIT binary patch")):
        current.binary = True


def _hunk(lines: list[str], at: int, current: FileDiff, name: str) -> int:
    """Read the hunk whose header is at this index, and return the index behind it."""
    found = _HUNK.match(lines[at])
    if found is None:
        raise UsageError(f"{name}:{at + 1}: no hunk header: must be like @@ -12,3 +12,4 @@")
    _, olds, start, news = (1 if count is None else int(count) for count in found.groups())
    old: list[str] = []
    new: list[str] = []
    header, at = at, at + 1
    while len(old) < olds or len(new) < news:
        line = lines[at] if at < len(lines) else "?"
        kind, text = line[:1] or " ", line[1:]  # an empty line: editors strip the blank of an empty context line
        if kind not in " +-\\":
            raise UsageError(
                f"{name}:{at + 1}: the hunk of line {header + 1} ends too early: {len(old)} of {olds} old lines and"
                f" {len(new)} of {news} new ones"
            )
        if kind in " -":
            old.append(text)
        if kind in " +":
            new.append(text)
        at += 1
    current.hunks.append(Hunk(tuple(old), tuple(new), start, header + 1))
    return at


def _paths(old: str, new: str) -> tuple[str | None, str | None]:
    names = [_unquoted(text.split("\t")[0].rstrip()) for text in (old, new)]
    prefixed = all(name == "/dev/null" or re.match(r"[abciow]/", name) for name in names)
    before, after = (None if name == "/dev/null" else name[2:] if prefixed else name for name in names)
    return before, after


def _git_paths(line: str) -> tuple[str | None, str | None]:
    """The two paths of a git header, which has no separator but a blank: both are alike unless it is a rename."""
    rest = line[len("diff --git ") :]
    if found := re.fullmatch(r'("a/.*"|a/.*) ("b/.*"|b/.*)', rest):
        return _paths(found.group(1), found.group(2))
    half = len(rest) // 2
    return (rest[:half], rest[half + 1 :]) if rest[:half] == rest[half + 1 :] else (rest, rest)


def _unquoted(name: str) -> str:
    """git puts quotes around names with odd characters, and writes their bytes in octal."""
    if not (name.startswith('"') and name.endswith('"') and len(name) > 1):
        return name

    def plain(found: re.Match[str]) -> str:
        return chr(int(found.group(1), 8)) if found.group(1)[0].isdigit() else _ESCAPES.get(found.group(1), "")

    raw = re.sub(r"\\([0-7]{3}|.)", plain, name[1:-1])
    try:
        return raw.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return raw
