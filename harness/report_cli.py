"""``unfix report``: matrix files -> a page and what changed since the nights before. Runs nothing, fetches nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from harness import history, output, plain, publish, report
from harness.digest import Digest, cases
from harness.extras import NOTHING, extras

Badge = Annotated[
    Path | None, typer.Option("--badge", metavar="F", help="write the JSON of a shields.io endpoint badge to F")
]
GitHub = Annotated[
    bool, typer.Option("--github", help="in a step of GitHub Actions: write its summary, and annotations")
]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("report")(report_command)


def report_command(
    ctx: typer.Context,
    files: Annotated[list[Path], typer.Argument(metavar="JSON…", help="matrices of one night")],
    html: Annotated[Path | None, typer.Option("--html", metavar="F", help="write one self-contained page to F")] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="FILE|DIR", help="last night, or a folder of nights in order of their names"),
    ] = None,
    nights: Annotated[int, typer.Option(min=2, help="nights that a flaky case is read off")] = history.NIGHTS,
    badge: Badge = None,
    github: GitHub = False,
    json_out: Annotated[
        str | None, typer.Option("--json", metavar="F", help="write the summary as JSON to F ('-': stdout)")
    ] = None,
) -> None:
    """One night's matrices as a page for people, and what changed since the nights before. Exit code as `run`.

    Example: unfix report out/matrix.json --baseline nights/ --html out/report.html
    """
    output.check_json(json_out)
    publish.check(html=html, badge=badge, github=github, json_out=json_out)
    night = history.read_night(files, name=", ".join(file.stem for file in files))
    since = history.compare(night, history.read_baseline(baseline, but=files) if baseline else [], nights)
    if baseline and not since.last:
        output.note(f"--baseline {baseline}: no earlier night is in it")
    told = Digest(night, since)
    known = extras(night, takes(ctx)) if html or github else NOTHING
    if json_out:
        output.write_json(json_out, _summary(told), output.say)
    publish.publish(told, known, html=html, badge=badge, github=github)
    if json_out != "-":
        for line in lines(told):
            output.say(plain.log_line(line))
    raise typer.Exit(told.exit_code)


def takes(ctx: typer.Context) -> set[str]:
    """The options of ``unfix repro``, as the command line that this command belongs to has them."""
    known = getattr(ctx.find_root().command, "commands", {})
    return {str(option.name) for option in known["repro"].params}


def _summary(told: Digest) -> dict[str, Any]:
    return {
        "schema_version": report.SCHEMA_VERSION,
        "incomplete": told.incomplete,
        "verdicts": report.counts(told.rows),
        "findings": [found.as_dict() for found in told.found],
        "history": told.since.as_dict(),
    }


def lines(told: Digest) -> Iterable[str]:
    """The same for a terminal: what did not run, what each finding amounts to, what changed, and the count."""
    yield from (f"incomplete: {sentence}" for sentence in told.incomplete)
    for found in told.found:
        yield f"{found.word}: {found.fix}, {cases(found.cases)}. {found.sentence}"
    if told.since.last:
        changed = ", ".join(f"{n} {told.title(kind).lower()}" for kind, n in told.since.counts().items())
        yield f"since {told.since.last}: {changed or 'nothing changed'}"
        yield from (f"around the code: {line}" for line in told.since.environment)
    rest = "incomplete" if told.incomplete else told.part
    yield report.summary_line(told.rows) + (f"; {rest}" if rest else "")
