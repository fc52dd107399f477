"""The command `unfix bisect`: which fixes matter to a command? The answer, and two commands that show it."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from harness import bisect, candidates, fixes, journal, output, plain, progress, report, selection
from harness.bisect import Answer, EndsError, FoundSet, Search
from harness.candidates import Candidates
from harness.errors import InfraError, UnfixError, UsageError
from harness.journal import Journal
from harness.root import project_root
from harness.trial import Run, Trials, signals_interrupt

_UNSEEN = (
    "but no run imported a file of an overlay, so nothing was tried: does the command put a path of its own first"
    " (PYTHONPATH, pytest's pythonpath, another directory), or keep Python from writing bytecode?"
)


def register(app: typer.Typer) -> None:
    """Add the command to the `unfix` command line."""
    app.command("bisect", context_settings={"allow_interspersed_args": False})(bisect_command)


def bisect_command(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD…", help="what to run; {revert}: see below")],
    sel: Annotated[
        str | None,
        typer.Option("--fixes", metavar="SEL", help="search among these; all that CMD's code can be without"),
    ] = None,
    find: Annotated[
        str | None, typer.Option(metavar="breaking|blaming", help="say so if it is the other way round")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-n", min=1, help="trials at once")] = 1,
    repeat: Annotated[int, typer.Option(min=1, help="runs of each trial; where they differ, it is flaky")] = 1,
    fail_on: Annotated[
        str | None, typer.Option(metavar="REGEX", help="fails where a line of the output matches, else passes")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="S", help="seconds for a run; too long is an answer of its own")
    ] = None,
    json_out: Annotated[str | None, typer.Option("--json", metavar="F", help="write JSON to F ('-': stdout)")] = None,
) -> None:
    """The smallest sets of fixes whose revert breaks a command, or mends it, with two commands that show it.

    Runs CMD with everything in and with everything out. Breaking: it passes with everything in; which fixes, taken out,
    make it fail? Blaming: it fails with everything in; which, taken out, make it pass? CMD passes with exit code 0,
    skips a trial with 125, and fails with any other. It sees what `unfix exec --revert` shows it; {revert} in its words
    becomes the comma list of what is out (0: nothing), for a command that passes it on to a container or a scheduler.
    After Ctrl-C the same line goes on from there.

    Exit codes: 0 all sets are named, 1 nothing to find, flaky or unresolved.

    Example: unfix bisect --timeout 600 -- python -m pytest -x test_eagle.py
    """
    if find not in (None, *get_args(bisect.Direction)):
        raise UsageError(f"--find {find!a}: must be breaking or blaming")
    output.check_json(json_out)
    if timeout is not None and not timeout > 0:  # nor is NaN
        raise UsageError(f"--timeout {timeout:g}: must be more than 0 seconds")
    try:
        pattern = re.compile(fail_on) if fail_on is not None else None
    except re.error as error:
        raise UsageError(f"--fail-on {fail_on!a}: not a regular expression: {error}") from None
    selection.refuse_nested()
    registered = fixes.load(project_root() / "toggles")
    chosen = selection.parse(sel, registered, source="--fixes")
    if sel is not None and not chosen:
        raise UsageError(f"--fixes {sel!a} selects no fix; leave it out for all of them")
    subject = candidates.find(command, registered, chosen)
    options = (find, repeat, fail_on, timeout)
    kept = Journal(journal.key(subject.command, subject.fixes, options, subject.digest, subject.environment))
    watch, notes = progress.Watch(subject.fixes), list[str]()

    def note(text: str) -> None:
        notes.append(text)
        watch.note(text)

    trials = Trials(subject, kept, jobs=jobs, timeout=timeout, fail_on=pattern, began=watch.began, ended=watch.ended)
    with watch, signals_interrupt(), _only_an_interruption_leaves(kept, watch), trials:
        for text in _opening(subject, kept):
            note(text)
        found: Search | UnfixError
        try:
            direction = cast("bisect.Direction | None", find)
            subject.forget_imports()
            found = bisect.search(subject.fixes, trials.ask, find=direction, jobs=jobs, repeat=repeat, note=note)
        except UnfixError as error:
            found = error
            alike = isinstance(error, EndsError) and error.near.kind == error.far.kind
            if alike and not kept.since and not subject.imported():  # runs that were taken over left no trace
                note(_UNSEEN)
    if isinstance(found, Search) and json_out != "-":  # before a file that may not be writable
        output.say("\n".join(map(plain.log_line, _lines(subject, found, fail_on))))
    if json_out:
        output.write_json(json_out, _document(subject, found, trials.runs, notes))
    if isinstance(found, UnfixError):
        for (out, kind), last in _last_words(trials.runs):
            watch.note(f"{kind} with {watch.name(out)}: {last}")
        raise InfraError(f"{found}; {_UNSEEN}") if _UNSEEN in notes else found
    watch.note(f"{found.trials} trials beyond the two ends, {found.runs} runs")
    raise typer.Exit(0 if found.sets and found.complete else 1)


def _opening(subject: Candidates, kept: Journal) -> list[str]:
    lines = [*subject.notes, f"searching among {len(subject.fixes)}: {', '.join(subject.fixes)}"]
    if kept.busy:
        lines.append("the same search runs at this moment: this one keeps no journal, and Ctrl-C ends it for good")
    if kept.kept:
        lines.append(f"takes {kept.kept} runs from the same search of {kept.since}, which was interrupted")
    return lines


@contextmanager
def _only_an_interruption_leaves(kept: Journal, watch: progress.Watch) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        if left := kept.leave():
            watch.note(f"{left} runs are kept for a day: the same line goes on from there")
        elif kept.lost:
            watch.note(kept.lost)
        raise
    finally:
        kept.remove()


def pasted(subject: Candidates, out: Sequence[str]) -> str:
    """The command line that runs the command with these fixes out."""
    words = shlex.join(subject.words(out))
    if subject.sight is None or not (out or any(name in os.environ for name in selection.VARIABLES)):
        return words
    called = Path(sys.argv[0])
    unfix = [sys.argv[0]] if called.name == "unfix" else [sys.executable, "-m", "harness.cli"]
    return f"{shlex.join(unfix)} exec --revert {','.join(out) or '0'} -- {words}"


def _lines(subject: Candidates, found: Search, fail_on: str | None) -> list[str]:
    bad = str(found.far if found.direction == "breaking" else found.near)
    width = max(len("passes"), len(bad)) + 1
    lines = []
    for one in found.sets:
        lines.append(", ".join(one.out) + (" (each of them is needed)" if len(one.out) > 1 else ""))
        lines.append(f"  {'passes:':{width}} {pasted(subject, one.passing)}")
        lines.append(f"  {bad + ':':{width}} {pasted(subject, one.failing)}")
        if len(one.out) > 1:
            lines.append(f"  these two differ by {one.out[-1]}; with everything in it {found.near}, too")
    if found.sets and fail_on is not None:
        lines.append(f"it fails where a line of its output matches {shlex.quote(fail_on)}, whatever its exit code")
    return lines + list(found.notes)


def _last_words(runs: Sequence[Run]) -> list[tuple[tuple[tuple[str, ...], str], str]]:
    """What the runs of a search that found nothing said last, for a reader who has to find out why."""
    said = {(run.out, run.kind): run.last for run in runs if run.kind != "pass" and run.last}
    return list(said.items())[:4]


def _document(subject: Candidates, found: Search | UnfixError, runs: Sequence[Run], notes: list[str]) -> dict[str, Any]:
    trials: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for run in runs:
        said = {"answer": run.kind, "seconds": run.seconds, "exit": run.exit, "last_line": run.last}
        trials.setdefault(run.out, []).append(said)
    document: dict[str, Any] = {
        "schema_version": report.SCHEMA_VERSION,
        "command": list(subject.command),
        "fixes": list(subject.fixes),
        "direction": None,
        "ends": None,
        "sets": [],
        "unresolved": [],
        "flaky": [],
        "complete": False,
        "error": str(found) if isinstance(found, UnfixError) else None,
        "trials": [{"out": list(out), "runs": said} for out, said in trials.items()],
        "notes": notes,
    }
    if isinstance(found, Search | EndsError):
        document["ends"] = {"everything_in": _said(found.near), "everything_out": _said(found.far)}
    if isinstance(found, Search):
        document["direction"], document["complete"] = found.direction, found.complete
        document["notes"] = [*notes, *found.notes]
        document["flaky"] = [{"out": list(one.out), **_said(one.answer)} for one in found.flaky]
        document["sets"] = [_set(subject, one) for one in found.sets]
        document["unresolved"] = [
            {"out": list(one.out), "open": dict(zip(one.open, map(_said, one.answers), strict=True))}
            for one in found.unresolved
        ]
    return document


def _set(subject: Candidates, one: FoundSet) -> dict[str, Any]:
    return {
        "out": list(one.out),
        **_said(one.answer),
        "without": {fix: _said(answer) for fix, answer in zip(one.out, one.without, strict=True)},
        "everything_else_out": _said(one.complement),
        "passes": {"out": list(one.passing), "command": pasted(subject, one.passing)},
        "fails": {"out": list(one.failing), "command": pasted(subject, one.failing)},
    }


def _said(answer: Answer) -> dict[str, Any]:
    return {"answer": answer.kind, "runs": dict(answer.counts), "text": str(answer)}
