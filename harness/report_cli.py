"""``unfix report``: matrix files -> a page and what changed since the nights before. Runs nothing, fetches nothing."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from harness import diagnosis, fixes, history, html_report, output, overlay, report, rerun, variants
from harness.code_base import resolve
from harness.errors import UnfixError, UsageError
from harness.history import History, Night
from harness.html_report import Extras
from harness.root import project_root


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""

    def takes() -> set[str]:
        """The options of ``unfix repro``, which may be registered after this."""
        [repro] = [
            known.callback for known in app.registered_commands if getattr(known.callback, "__name__", "") == "repro"
        ]
        return set(getattr(repro, "__annotations__", {}))

    @app.command("report")
    def report_command(
        files: Annotated[list[Path], typer.Argument(metavar="JSON…", help="matrices of one night")],
        html: Annotated[
            Path | None, typer.Option("--html", metavar="F", help="write one self-contained page to F")
        ] = None,
        baseline: Annotated[
            Path | None,
            typer.Option(metavar="FILE|DIR", help="last night, or a folder of nights in order of their names"),
        ] = None,
        nights: Annotated[int, typer.Option(min=2, help="nights that a flaky case is read off")] = history.NIGHTS,
        json_out: Annotated[
            str | None, typer.Option("--json", metavar="F", help="write the summary as JSON to F ('-': stdout)")
        ] = None,
    ) -> None:
        """One night's matrices as a page for people, and what changed since the nights before. Exit code as `run`.

        Example: unfix report out/matrix.json --baseline nights/ --html out/report.html
        """
        output.check_json(json_out)
        night = history.read_night(files, name=", ".join(file.stem for file in files))
        rows = list(night.records().values())
        since = history.compare(night, history.read_baseline(baseline, but=files) if baseline else [], nights)
        if baseline and not since.last:
            output.note(f"--baseline {baseline}: no earlier night is in it")
        if html:
            report.write_text(html, html_report.render(night, since, extras(night, takes())))
            output.note(f"wrote {html}")
        if json_out == "-":
            print(json.dumps(_summary(night, since), indent=1))
        else:
            if json_out:
                report.write_json(Path(json_out), _summary(night, since))
                output.note(f"wrote {json_out}")
            for line in lines(night, since):
                print(html_report.visible(line))
        raise typer.Exit(report.exit_code(rows))


def _summary(night: Night, since: History) -> dict[str, Any]:
    rows = list(night.records().values())
    return {
        "schema_version": report.SCHEMA_VERSION,
        "verdicts": report.counts(rows),
        "findings": [found.as_dict() for found in diagnosis.diagnose(rows)],
        "history": since.as_dict(),
    }


def lines(night: Night, since: History) -> Iterable[str]:
    """The same for a terminal: what each finding amounts to, what changed, and the count."""
    rows = list(night.records().values())
    for found in diagnosis.diagnose(rows):
        yield f"{found.word}: {found.fix}, {found.cases} case{'s' if found.cases != 1 else ''}. {found.sentence}"
    if since.last:
        changed = ", ".join(f"{n} {html_report.CHANGES[kind].lower()}" for kind, n in since.counts().items())
        yield f"since {since.last}: {changed or 'nothing changed'}"
        yield from (f"around the code: {line}" for line in since.environment)
    yield report.summary_line(rows)


def extras(night: Night, takes: Collection[str]) -> Extras:
    """Diffs and commands, as far as this checkout, and what is installed beside it, has the sources."""
    try:
        root = project_root()
        catalogue = fixes.load(root / "toggles")
    except UnfixError as error:
        output.note(f"no diffs and no commands: {error}")
        return Extras()
    diffs: dict[tuple[str, str, str], str] = {}
    notes: dict[tuple[str, str, str], str] = {}
    commands = {}
    for key, row in night.records().items():
        commands[key] = rerun.command(row, key.version or None, catalogue, takes)
        for fix in (row["fix"], row["blames"], *(name for leg in row["legs"] for name in leg["reverted"])):
            at = key.target, key.version, fix
            if at in diffs or at in notes:
                continue
            try:
                diffs[at] = _diff(root, catalogue, *at)
            except UnfixError as error:
                notes[at] = str(error)
    return Extras(diffs, notes, commands)


def _diff(root: Path, catalogue: fixes.Catalogue, target: str, version: str, fix: str) -> str:
    if fix not in catalogue.ids:
        raise UsageError("this checkout registers no such fix")
    release, _, source = version.partition(" environment, ")
    roots = [resolve(target, root, release or None, source or None).sources]
    return overlay.diff(overlay.plan(variants.choose_all(catalogue, [fix], target, roots), roots))
