"""The commands about code bases other than the checkout's own: `check`, `status`, `exec`."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from harness import __version__, execute, fixes, output, plain, report, selection, upstream
from harness.check import Finding, check, rotted
from harness.errors import UsageError
from harness.root import project_root

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SEL…]", help="fixes; all without. After --release, a word with a dot is one more release"),
]
Release = Annotated[
    list[str] | None, typer.Option("--release", metavar="V…", help="published releases of SGLang, by pip")
]
SourceDir = Annotated[str | None, typer.Option("--source", metavar="DIR", help="a checkout of SGLang")]
JsonOut = Annotated[str | None, typer.Option("--json", metavar="F", help="write JSON to F ('-': stdout)")]

_STATUS = {"fixed": "fixed", "not fixed": "not fixed", "rotted": "unknown"}


def register(app: typer.Typer) -> None:
    """Add the commands to the `unfix` command line."""
    app.command("check")(check_command)
    app.command("status")(status_command)
    app.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(
        exec_command
    )


def check_command(
    words: Words = None, release: Release = None, source: SourceDir = None, json_out: JsonOut = None
) -> None:
    """Does every reversal still apply? Reads sources only: no GPU, nothing imported.

    Says for each fix and source tree: applied; not fixed here (the text without the fix is what stands there); or
    rotted, with the nearest match and its line. SGLang's own registry is linted, too. Without --release and --source:
    eagle_kv in this checkout, and the SGLang that is installed. Exit code 3 where anything rotted, in-tree or not.

    Example: unfix check 27338 27460 --release 0.5.13 0.5.23
    """
    chosen, versions = _split(words, release)
    sources = _sources(versions, source)
    findings = []
    if not sources:
        findings = check(chosen, "eagle_kv", [upstream.Source("checkout", project_root() / "kernels")])
        sources = [found] if (found := upstream.installed()) else []
        if not sources:
            output.note("no SGLang is installed here: name a --release or a --source to check it")
    everything = not words or all("." in word for word in words)
    findings += check(chosen, "sglang", sources, with_registry=everything)
    _write(findings, json_out, [finding.as_dict() for finding in findings])
    if json_out != "-":
        _print(findings, {"fixed": "applied", "not fixed": "not fixed here", "rotted": "rotted"})
        for text in _reasons(findings):
            output.say(plain.log_line(text))
    raise typer.Exit(3 if rotted(findings) else 0)


def status_command(
    words: Words = None, release: Release = None, source: SourceDir = None, json_out: JsonOut = None
) -> None:
    """Which SGLang has which fix: a table of fixed, not fixed, unknown (no form of the fix is found: see unfix check).

    Without --release and --source: the releases that were fetched before, and the SGLang that is installed.

    Example: unfix status --release 0.5.12.post1 0.5.13
    """
    chosen, versions = _split(words, release)
    sources = _sources(versions, source)
    if not sources:
        sources = [upstream.release(version) for version in upstream.cached()]
        sources += [found] if (found := upstream.installed()) else []
    if not sources:
        raise UsageError("no release was fetched yet and none is installed: name one, such as --release 0.5.23")
    findings = check(chosen, "sglang", sources)
    rows = [{**finding.as_dict(), "state": _STATUS[finding.state.kind]} for finding in findings]
    _write(findings, json_out, rows)
    if json_out != "-":
        _print(findings, _STATUS)


def exec_command(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD…", help="what to run")],
    revert: Annotated[str | None, typer.Option(metavar="SEL", help="fixes to take out")] = None,
    put_in: Annotated[str | None, typer.Option("--apply", metavar="SEL", help="fixes to put in where missing")] = None,
    target: Annotated[str | None, typer.Option(help="only this code base: sglang, eagle_kv, …")] = None,
) -> None:
    """Run a command, and all that it starts, with fixes out or put in; its exit code is this one's.

    Works on every code base that the fixes are in and that the command's Python can import. What is out goes to stderr.
    Without --revert and --apply, SGLANG_DEBUG_REVERT_PR says what is out; the command itself never gets that variable,
    but UNFIX_REVERT, the list of what is out: this project's own tests take it for a whole session's revert.

    Example: unfix exec --revert 27338 -- python -m pytest test_eagle.py
    """
    selection.refuse_nested()
    registered = fixes.load(project_root() / "toggles")
    if revert is None and put_in is None:
        out = selection.parse(os.environ.get(selection.VARIABLE), registered)
    else:
        out = selection.parse(revert, registered, source="--revert")
    into = selection.parse(put_in, registered, source="--apply")
    prepared = execute.prepare(command, registered, out, into, target)
    for note in prepared.notes:
        output.note(note)
    execute.run(prepared)


def _split(words: Sequence[str] | None, release: Sequence[str] | None) -> tuple[list[fixes.Fix], list[str]]:
    """The selected fixes and the releases. An option takes one value, so more releases arrive among the arguments."""
    words = list(words or ())
    versions = [part for text in release or () for part in text.split(",") if part]
    versions += [word for word in words if release and "." in word]
    named = [word for word in words if not (release and "." in word)]
    registered = fixes.load(project_root() / "toggles")
    ids = selection.parse(",".join(named) or "all", registered, source="SEL")
    return [registered.fix(fix) for fix in ids], list(dict.fromkeys(versions))


def _sources(versions: Iterable[str], directory: str | None) -> list[upstream.Source]:
    sources = [upstream.release(version) for version in versions]
    return sources + ([upstream.checkout(directory)] if directory else [])


def _write(findings: Sequence[Finding], where: str | None, rows: list[dict[str, Any]]) -> None:
    if not where:
        return
    document = {
        "schema_version": report.SCHEMA_VERSION,
        "environment": {"unfix": __version__, "python": platform.python_version()},
        "releases": list(dict.fromkeys(finding.release for finding in findings)),
        "results": rows,
    }
    output.write_json(where, document)


def _label(finding: Finding) -> str:
    return f"in-tree {finding.fix}" if finding.in_tree else finding.fix


def _print(findings: Sequence[Finding], words: dict[str, str]) -> None:
    """A row a fix, a column a release; neighbours that say the same share a column."""
    releases = list(dict.fromkeys((finding.code_base, finding.release) for finding in findings))
    labels = list(dict.fromkeys(_label(finding) for finding in findings))
    cells = {
        (_label(each), each.code_base, each.release): words[each.state.kind].upper()
        if each.state.kind == "rotted"
        else words[each.state.kind]
        for each in findings
    }
    table = Table(header_style="bold")
    table.add_column("fix", no_wrap=True)
    columns = []
    for column, group in groupby(releases, lambda name: [cells.get((label, *name), "-") for label in labels]):
        names = [release if code_base == "sglang" else f"{code_base} {release}" for code_base, release in group]
        table.add_column(names[0] if len(names) == 1 else f"{names[0]} to\n{names[-1]} ({len(names)})")
        columns.append(column)
    for row, label in enumerate(labels):
        table.add_row(label, *(column[row] for column in columns))
    Console(highlight=False, width=None if sys.stdout.isatty() else 180).print(table)


def _reasons(findings: Sequence[Finding]) -> list[str]:
    """Why things are rotted: a fix and its releases on a line, and what is wrong in the last of them below."""
    lines = []
    for label, group in groupby(sorted(rotted(findings), key=_label), _label):
        told = list(group)
        lines.append(f"rotted: {label} in {', '.join(each.release for each in told)}")
        lines.append(f"  {told[-1].release}: {told[-1].state.message}")
    return lines
