"""``unfix prove``: take out one fix after the other, and see that the tests notice. :mod:`harness.prove` judges."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness import fixes, output, plain, prove, pytest_run, report, selection
from harness.code_base import resolve
from harness.device import resolve_device
from harness.errors import InfraError
from harness.fixes import Fix
from harness.prove import Heard, Row
from harness.root import project_root
from harness.sessions import Sessions
from harness.trial import signals_interrupt


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("prove")(prove_command)


def prove_command(
    sel: Annotated[list[str] | None, typer.Argument(metavar="[SEL…]", help="fixes to take out; all without")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda: where legs run")] = "auto",
    target: Annotated[str, typer.Option(help="the code base under test: eagle_kv or sglang")] = "eagle_kv",
    release: Annotated[str | None, typer.Option(metavar="V", help="the release of SGLang, for --target sglang")] = None,
    source: Annotated[
        str | None, typer.Option(metavar="DIR", help="a checkout of SGLang, run in that environment")
    ] = None,
    jobs: Annotated[str, typer.Option("--jobs", "-n", help="sessions side by side: a number, or auto")] = "auto",
    json_out: Annotated[str | None, typer.Option("--json", metavar="F", help="write JSON to F ('-': stdout)")] = None,
) -> None:
    """The kill matrix: with each fix out, do its own tests fail as declared, and all others pass?

    All regressions run once with nothing out, which must be green, and once for each fix.

    Example: unfix prove 27338 --json out/kills.json
    """
    root = project_root()
    registered = fixes.load(root / "toggles")
    output.check_json(json_out)
    device = resolve_device(device)
    code_base = resolve(target, root, release, source)
    side_by_side = pytest_run.workers(jobs, device)
    ids, left_out = selection.chosen(sel, registered, target)
    if left_out:
        output.note(left_out)
    chosen = [registered.fix(fix) for fix in ids]
    able = [fix for fix in chosen if target in fix.code_bases]
    if ignored := [name for name in selection.VARIABLES if os.environ.get(name)]:
        output.note(f"{' and '.join(ignored)}: not heeded here, one fix is out at a time")
    with (
        signals_interrupt(),
        tempfile.TemporaryDirectory(prefix="unfix-prove-", ignore_cleanup_errors=True) as scratch,
    ):
        sessions = Sessions(
            Path(scratch),
            lambda workers, more: pytest_run.command(
                root, device, code_base, workers, release=release, source=source, more=more
            ),
        )
        baseline, environment = sessions.run(None, side_by_side)
        red = prove.red(baseline)
        output.note(f"nothing out: {_counted(baseline)}")
        rows: list[Row] = []
        if not red:
            for fix in able:
                if not prove.tellers(fix.id, baseline):
                    output.note(f"no test: {fix.id}")
            for fix, session in sessions.run_all(able, max(1, int(side_by_side))):
                rows.append(_judged(fix, device, baseline, session))
    document = _document(environment, chosen, baseline, red, rows)
    if len(rows) == sum(target in fix.code_bases for fix in registered):  # of a few, most tests are not about any
        document["idle"] = prove.idle(rows)
    if json_out != "-":  # before a file that may not be writable
        _print(document, rows)
    if json_out:
        output.write_json(json_out, document)
    raise typer.Exit(_exit_code(document, baseline, red, rows))


def _judged(fix: Fix, device: str, baseline: Mapping[str, Heard], session: Mapping[str, Heard]) -> Row:
    if set(session) != set(baseline):
        odd = sorted(set(session) ^ set(baseline))
        raise InfraError(
            f"with {fix.id} out, other tests ran than with nothing out: {len(odd)} differ, such as {odd[0]}"
        )
    for test, heard in session.items():
        for leg in (heard.record or {"legs": []})["legs"]:
            if fix.id not in leg["reverted"]:
                raise InfraError(f"with {fix.id} out, {test} ran a leg that has it in: nothing is proved")
    judged = prove.row(fix, device, baseline, session)
    told = ", ".join(f"{len(tests)} {kind}" for kind in prove.KINDS if (tests := judged.tests(kind)))
    output.note(f"{fix.id} out: {told}")
    return judged


def _document(
    environment: dict[str, Any],
    chosen: Sequence[Fix],
    baseline: Mapping[str, Heard],
    red: Mapping[str, str],
    rows: Sequence[Row],
) -> dict[str, Any]:
    ran = {row.fix: row for row in rows}
    return {
        "schema_version": report.SCHEMA_VERSION,
        "environment": environment,
        "untested": [fix.id for fix in chosen if not prove.tellers(fix.id, baseline)],
        "unable": [fix.id for fix in chosen if fix.id not in ran] if not red else [],
        "idle": [],
        "baseline": {"tests": list(baseline), "red": dict(red)},
        "fixes": {row.fix: {kind: len(row.tests(kind)) for kind in prove.KINDS} for row in rows},
        "results": [
            {"fix": row.fix, "test": test, "kind": cell.kind, "why": cell.why}
            for row in rows
            for test, cell in row.cells.items()
            if cell.kind != "quiet"
        ],
    }


def _exit_code(
    document: Mapping[str, Any], baseline: Mapping[str, Heard], red: Mapping[str, str], rows: Sequence[Row]
) -> int:
    """0 all well, 1 a finding, 3 rotted, 4 something could not be learnt here."""
    if red:
        kinds = {(baseline[test].record or {}).get("verdict") for test in red}
        return 4 if kinds == {"infra"} else 3 if "rotted" in kinds else 1
    if document["unable"] or any(row.tests("infra") for row in rows):
        return 4
    if any(row.tests("missed", "collateral") for row in rows) or document["untested"]:
        return 1
    return 0 if all(row.ok for row in rows) else 4  # nothing amiss, and nothing caught: its tests were skipped


def _print(document: Mapping[str, Any], rows: Sequence[Row]) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 180)
    lines = [f"no test: {fix}" for fix in document["untested"]]
    lines += [f"can't be taken out here: {fix}" for fix in document["unable"]]
    lines += _grouped("red", document["baseline"]["red"])
    if rows:
        table = Table(header_style="bold")
        for name in ("fix", "caught", "missed", "collateral", "tests that fail"):
            table.add_column(name, overflow="fold", no_wrap=name == "fix")
        for row in rows:
            own = len(row.tests("caught", "missed"))
            table.add_row(
                row.fix, f"[{'green' if row.ok else 'red'}]{len(row.tests('caught'))} of {own}[/]",
                *(f"[red]{n}[/]" if (n := len(row.tests(kind))) else "0" for kind in ("missed", "collateral")),
                escape("\n".join([*_functions(row, "caught"), *_functions(row, "noticed", ", a neighbour's")])),
            )  # fmt: skip
    for line in lines:
        console.print(plain.log_line(line), markup=False, soft_wrap=True)
    if not rows:
        return
    console.print(table)
    for row in rows:
        for kind in ("missed", "collateral", "infra"):
            for line in _grouped(f"{kind}: {row.fix}", {test: row.cells[test].why for test in row.tests(kind)}):
                console.print(plain.log_line(line), markup=False, soft_wrap=True)
    for test in document["idle"]:
        console.print(f"catches nothing: {test}", markup=False, soft_wrap=True)
    good = sum(row.ok for row in rows)
    counts = f"{good} as they must be, {len(rows) - good} not"
    console.print(f"unfix: {len(rows)} fixes x {len(rows[0].cells)} tests: {counts}")


def _functions(row: Row, kind: str, more: str = "") -> list[str]:
    """`test_x 16 of 20` a line: the cases that came out so, and how many cases the test has."""
    found = prove.by_function(row, kind).items()
    return [f"{name.rpartition('/')[2]} {n} of {of}{more}" for name, (n, of) in found]


def _grouped(head: str, said: Mapping[str, str]) -> list[str]:
    """A line a test function, with its first case and what that one says; all others are in the JSON."""
    cases: dict[str, list[str]] = {}
    for test in said:
        cases.setdefault(prove.function(test), []).append(test)
    return [
        f"{head}: {names[0]}" + (f" and {len(names) - 1} more" if names[1:] else "") + f": {said[names[0]]}"
        for names in cases.values()
    ]


def _counted(tests: Mapping[str, Heard]) -> str:
    outcomes = [heard.outcome for heard in tests.values()]
    return f"{len(tests)} tests: " + ", ".join(
        f"{outcomes.count(kind)} {kind}" for kind in ("passed", "skipped", "failed") if kind in outcomes
    )
