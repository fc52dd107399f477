"""What GitHub is told of a night: the summary of a step (Markdown) and annotations (workflow commands).

The summary says what the page says first (:mod:`harness.digest`), in at most 200 lines: whether to worry, what did not
run, the counts, the findings, what changed, and the commands that show a finding again. An annotation is one line of
stdout for each finding, at the fix's line of its toggle file; warnings are for cases that are flaky or slower. GitHub
shows ten of a kind for a step.

Nothing that a run captured is more than text. In Markdown all that could be markup, or HTML, is written as a character
reference; a command stands in a fence that is longer than any in it. In a workflow command line ends, and what ends a
property, are escaped as the runner reads them (ActionCommand.cs of github.com/actions/runner).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness import diagnosis, digest, output, plain, report
from harness.diagnosis import Diagnosis
from harness.digest import Digest
from harness.errors import InfraError, UsageError
from harness.extras import NOTHING, Extras
from harness.history import Key

VARIABLE = "GITHUB_STEP_SUMMARY"
ANNOTATIONS = 10  # of a kind
_MISSING, _FINDINGS, _COMMANDS, _LINES, _CASES, _AROUND = 8, 20, 6, 5, 3, 8  # how many of each are shown
_TEXT, _LONG, _COMMAND = 200, 600, 2000  # characters
_MARKUP = re.compile(r"""[]&<>"'`*_~|\\[()#@:.!$^+]|^[-=]""")  # colons and dots: bare links need no more


def summary_file() -> Path:
    """Where the step that this runs in keeps its summary. Raises UsageError."""
    if named := os.environ.get(VARIABLE):
        try:
            with open(named, "a"):
                return Path(named)
        except OSError as error:
            raise UsageError(f"--github: {VARIABLE} names {named}, which can't be written: {error.strerror}") from None
    raise UsageError(f"--github: {VARIABLE} names no file: GitHub Actions sets it in each step of a job")


def publish(told: Digest, known: Extras) -> None:
    """Append to the step's summary, and print the annotations. Raises UsageError, InfraError."""
    file = summary_file()
    try:
        with file.open("a", encoding="utf-8") as stream:
            stream.write(("\n" if stream.tell() else "") + summary(told, known))
    except OSError as error:
        raise InfraError(f"{VARIABLE}: {file} could not be written: {error.strerror or error}") from error
    for line in annotate(told, known):
        output.say(line)


def summary(told: Digest, known: Extras = NOTHING) -> str:
    """Raises UsageError where a case is in the night twice."""
    blocks = [
        ["## " + _text(told.headline)],
        [f"- **{line}**" for line in _few([_text(sentence) for sentence in told.incomplete], _MISSING)],
        [_counts(told)],
        [f"**Revert active in every leg:** {_text(', '.join(told.reverted))}"] if told.reverted else [],
        _findings(told),
        ["### Since last night" + (f" ({_text(told.since.last)})" if told.since.last else "")],
        list(_changes(told)),
        *_again(told, known),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _counts(told: Digest) -> str:
    said = ", ".join(f"{n} {kind}" for kind, n in report.counts(told.rows).items())
    blind = f"{told.blind} of the proved on inputs that cannot tell" if told.blind else ""
    parts = [f"{digest.cases(len(told.rows))}: {said or 'nothing ran'}", blind, ", ".join(told.places), told.part]
    return _text(" · ".join(filter(None, [*parts, told.night.name])), _LONG)


def _findings(told: Digest) -> list[str]:
    if not told.found:
        return []
    rows = [
        [
            f"**{_text(each.word)}**", _code(each.fix), _text(f"{each.cases}{f' ({news})' if news else ''}"),
            _text(each.sentence) + (f"<br>{_text(each.detail, _LONG)}" if each.detail else ""),
        ]
        for each in told.found[:_FINDINGS]
        for news in [told.news(each.fix)]
    ]  # fmt: skip
    if more := len(told.found) - len(rows):
        rows.append([f"and {more} more", "", "", ""])
    return [
        "| finding | fix | cases | what it means |",
        "|---|---|---|---|",
        *(f"| {' | '.join(cells)} |" for cells in rows),
    ]


def _changes(told: Digest) -> Iterator[str]:
    since = told.since
    if not since.last:
        yield "There is no earlier night to compare with."
    elif not since.changes and not since.environment:
        yield "Nothing changed."
    for kind, n in since.counts().items():
        yield f"- **{told.title(kind)}: {n}**"
        lines = digest.grouped(since.of(kind))
        for line in lines[:_LINES]:
            yield f"  - {_code(line.fix)} on {_text(f'{line.where}: {line.text}', _LONG)}"
            if kind in ("flaky", "slower"):
                yield from (f"    - {_code(each.key.case)} {_text(each.detail)}" for each in line.changes[:_CASES])
        if lines[_LINES:]:
            yield f"  - and {len(lines) - _LINES} more"
    if since.environment:
        yield f"- **Around the code: {len(since.environment)}**"
        yield from (f"  - {line}" for line in _few([_text(line) for line in since.environment], _AROUND))


def _again(told: Digest, known: Extras) -> list[list[str]]:
    blocks = []
    for found in told.found:
        case = _case(found, told)
        command = plain.one_line(known.commands.get(case, ""))
        if 0 < len(command) <= _COMMAND:
            blocks += [[f"{_code(found.fix)} on {_code(case.case)}"], _fenced(command)]
    return [["### Show it again"], *blocks[: 2 * _COMMANDS]] if blocks else []


def _case(found: Diagnosis, told: Digest) -> Key:
    """The case that shows it best: a finding of its own, and one that can tell; where it has none, a neighbour's."""

    def worth(key: Key) -> tuple[bool, bool, bool]:
        row = told.records[key]
        return diagnosis.is_finding(row) and row["blames"] == found.fix, row["fix"] == found.fix, bool(row["tells"])

    return max(told.records, key=worth)


def _fenced(text: str) -> list[str]:
    mark = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return [f"{mark}sh", text, mark]


def _few(lines: Sequence[str], most: int) -> list[str]:
    return [*lines[:most], *([f"and {len(lines) - most} more"] if lines[most:] else [])]


def _text(text: str, most: int = _TEXT) -> str:
    """Text that is neither Markdown nor HTML, in one line."""
    return _MARKUP.sub(lambda found: f"&#{ord(found.group())};", plain.one_line(text.strip(), most))


def _code(text: str) -> str:
    return f"<code>{_text(text)}</code>"


def annotate(told: Digest, known: Extras = NOTHING) -> list[str]:
    """Workflow commands, a line each: errors for what did not run and what was found, warnings for flaky and slower."""
    errors = [_command("error", "Incomplete", sentence) for sentence in told.incomplete]
    for each in told.found:
        said = ", ".join(filter(None, [digest.cases(each.cases), told.news(each.fix)]))
        message = "\n".join(filter(None, [f"{said}. {each.sentence}", each.detail]))
        errors.append(_command("error", f"{each.word}: {each.fix}", message, known.places.get(each.fix)))
    warnings = [
        _command(
            "warning", f"{digest.CHANGES[kind]}: {line.fix}",
            f"{line.where}: {line.text}\n{line.changes[0].key.case}", known.places.get(line.fix),
        )
        for kind in ("flaky", "slower")
        for line in digest.grouped(told.since.of(kind))
    ]  # fmt: skip
    return [*_shown("error", errors), *_shown("warning", warnings)]


def _shown(kind: str, commands: Sequence[str]) -> list[str]:
    if len(commands) <= ANNOTATIONS:
        return list(commands)
    more = len(commands) - ANNOTATIONS + 1
    return [*commands[: ANNOTATIONS - 1], _command(kind, f"{more} more", "The step's summary has them, too.")]


def _command(kind: str, title: str, message: str, place: tuple[str, int] | None = None) -> str:
    properties = {"file": place[0], "line": str(place[1])} if place else {}
    properties["title"] = title
    said = ",".join(f"{name}={_escaped(plain.one_line(value, _TEXT), ':,')}" for name, value in properties.items())
    return f"::{kind} {said}::{_escaped(plain.visible(message)[:_LONG])}"


def _escaped(text: str, more: str = "") -> str:
    """As the runner takes it back: percent signs and line ends, and in a property colons and commas, too."""
    return re.sub(f"[%\r\n{more}]", lambda found: f"%{ord(found.group()):02X}", text)
