"""`unfix new`: from a fix's own diff to a toggle file and a drafted regression.

Nothing is written before all of it is known to be right: the drafted toggle file is read back, and every reversal in
it is tried on the sources with the engine of `unfix check`.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from harness import fixes, origin, output, overlay, plain, report, scaffold, unidiff
from harness.check import check, rotted
from harness.draft import Draft, Texts, draft
from harness.errors import InfraError, RottedError, UnfixError, UsageError
from harness.origin import Found
from harness.root import project_root
from harness.upstream import Source

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def register(app: typer.Typer) -> None:
    """Add the command to the `unfix` command line."""
    app.command("new")(new_command)


def new_command(
    pr: Annotated[str, typer.Argument(metavar="PR", help="the PR's number")],
    diff: Annotated[str, typer.Option(metavar="FILE", help="what git show or diff -u wrote ('-': stdin)")],
    only: Annotated[
        str | None,
        typer.Option(
            metavar="GLOB", help="only these functions: '*.fill'; behind a colon, only these fixes: '*:*-assert'"
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="N", help="the fix's name; makes all of it one fix")] = None,
    summary: Annotated[str | None, typer.Option(metavar="S", help="what was wrong, in one sentence")] = None,
    source: Annotated[str | None, typer.Option(metavar="DIR", help="a checkout that has the fix")] = None,
    release: Annotated[str | None, typer.Option(metavar="V", help="a release of SGLang that has the fix")] = None,
) -> None:
    """Register a fix from its diff: writes toggles/PR.yaml and a regression with one function to fill in.

    The sources must have the fix: those installed, or --source, or --release. Prints the diff that each drafted fix is
    undone by; what of the diff was left alone goes to stderr.

    Example: git show | unfix new 27338 --diff - --only '*.init_cuda_graph_state' --source .
    """
    _check_words(pr, name, summary, source, release)
    root = project_root()
    paths = {
        "toggle": root / "toggles" / f"{pr}.yaml",
        "scenario": root / "regressions" / "scenarios" / f"pr_{pr}.py",
        "regression": root / "regressions" / f"test_{pr}.py",
    }
    for path in paths.values():
        if path.exists():
            raise UsageError(f"{path.relative_to(root)} is there already: edit it, or remove it first")
    notes: list[str] = []
    found, texts = _read(diff, source, release, only, notes)
    drafted = _draft(texts, only, name, summary)
    files = _written(pr, drafted, found, summary, notes)
    shown = _checked(pr, files["toggle"], found[0], source or release or "installed")
    with _all_or_none(paths.values()):
        for key, path in paths.items():
            report.write_text(path, files[key])
    for line in [*notes, *drafted.left]:
        output.note(line)
    output.say(plain.visible(shown), end="")
    for path in paths.values():
        output.note(f"wrote {path.relative_to(root)}")
    more = (
        f" --source {source}" * bool(source)
        if found[0].package not in ("sglang", "eagle_kv")
        else f" --release {release or 'V'}"
    )
    target = "" if found[0].package == "eagle_kv" else f" --target {found[0].package}{more}"
    output.note(f"next: fill in run() of {paths['scenario'].relative_to(root)}, then: unfix run {pr}{target}")


def _check_words(pr: str, name: str | None, summary: str | None, source: str | None, release: str | None) -> None:
    if not re.fullmatch(r"[1-9][0-9]{0,8}|own", pr):
        raise UsageError(f"PR {pr[:40]!a}: must be the PR's number, or own")
    if name is not None and not _NAME.fullmatch(name):
        raise UsageError(f"--name {name[:60]!a}: must be words of a-z and 0-9 with hyphens between, like topk-factor")
    if summary is not None and (not summary.strip() or len(summary.splitlines()) > 1):
        raise UsageError("--summary: must be one line")
    if source is not None and release is not None:
        raise UsageError("--source and --release: give one of them, the sources that have the fix")


def _read(
    diff: str, source: str | None, release: str | None, only: str | None, notes: list[str]
) -> tuple[list[Found], list[Texts]]:
    """The diff's files in the sources, each with its text before and after. What is skipped is noted."""
    label = "<stdin>" if diff == "-" else diff
    try:
        data = sys.stdin.buffer.read() if diff == "-" else Path(diff).read_bytes()
    except OSError as error:
        raise UsageError(f"--diff {diff}: {error.strerror}") from None
    pairs: list[tuple[unidiff.FileDiff, Found]] = []
    missing: list[str] = []
    for file in unidiff.parse(data.decode("utf-8", "surrogateescape"), label):
        why = "binary" if file.binary else origin.why_skipped(file.path) or "deleted" * (file.new is None)
        if not why and not file.hunks:
            why = f"renamed from {file.old}, and nothing in it changed" if file.renamed else "nothing in it changed"
        if why:
            notes.append(f"skipped: {file.path}: {why}")
        elif (found := origin.find(file.path, source, release)) is None:
            missing.append(file.path)
            notes.append(f"skipped: {file.path}: not in the sources")
        else:
            pairs.append((file, found))
    packaged = [pair for pair in pairs if len(pair[1].relpath.parts) > 1]
    if not pairs:
        where = f"in {source or release}" if source or release else "in any installed package: give --source DIR"
        raise UsageError(
            f"{label}: {missing[0]} isn't {where}" if missing else f"{label}: only {notes[0].removeprefix('skipped: ')}"
        )
    notes += [
        f"skipped: {file.path}: in no package" for file, each in pairs if packaged and len(each.relpath.parts) == 1
    ]
    pairs = packaged or pairs
    if len(packages := list(dict.fromkeys(found.package for _, found in pairs))) > 1:
        raise UsageError(f"{label}: it touches {' and '.join(packages)}: give the diff of one package")
    texts = [
        Texts(found.target, found.language, _before(file, found, label, only, notes), found.source.text)
        for file, found in pairs
    ]
    return [found for _, found in pairs], texts


def _before(file: unidiff.FileDiff, found: Found, label: str, only: str | None, notes: list[str]) -> str:
    """The file's text without the diff. With --only, a hunk that isn't there is noted: it may be another function's."""
    if file.old is None:
        return ""
    hunks = list(file.hunks)
    while True:
        try:
            return unidiff.undo(found.source.text, hunks)
        except unidiff.DoesNotApply as error:
            where = f"{label}:{error.hunk.line}: doesn't apply to {found.relpath}: {error}"
            if only is None:
                raise UsageError(where) from None
            notes.append(f"skipped: {where}")
            hunks.remove(error.hunk)


def _draft(texts: list[Texts], only: str | None, name: str | None, summary: str | None) -> Draft:
    try:
        drafted = draft(texts, only, name, summary)
    except SyntaxError as error:
        raise UsageError(
            f"{error.filename}, before or after the diff, isn't Python: {error.msg}, line {error.lineno}"
        ) from None
    if not drafted.fixes:
        wanted = f" that --only {only!r} names" if only else ""
        why = f" ({'; '.join(drafted.left[:2])})" if drafted.left else ""
        raise UsageError(f"the diff has no change{wanted} to undo{why}")
    return drafted


def _written(pr: str, drafted: Draft, found: list[Found], summary: str | None, notes: list[str]) -> dict[str, str]:
    package, entered_by = found[0].package, {}
    if not re.fullmatch(r"[a-z][a-z0-9_]*", package):
        raise UsageError(f"the package {package!a} can't be named in a toggle file: must be a-z, 0-9 and _")
    for each in found:
        if each.language == "c" and any(each.target in fix.reversals for fix in drafted.fixes):
            if not (entered := origin.loader_of(each)):
                raise UsageError(
                    f"no Python function of {package} names {each.relpath.name}: nobody would load its build"
                )
            entered_by[each.target] = entered
            notes.append(f"check entered_by of {each.relpath}: {entered} is who seems to load its build")
    touched = [
        each.target for each in found if any(each.target in target for fix in drafted.fixes for target in fix.reversals)
    ]
    title = summary or f"What #{pr} changed in {' and '.join(touched)}"
    return {
        "toggle": scaffold.toggle(pr, title, drafted.fixes, package, f"pr_{pr}", entered_by),
        "scenario": scaffold.scenario(pr, drafted.fixes),
        "regression": scaffold.regression(pr, drafted.fixes),
    }


def _checked(pr: str, text: str, found: Found, label: str) -> str:
    """Read the toggle file back, try every reversal on the sources, and return the diffs that they amount to."""
    with tempfile.TemporaryDirectory(prefix="unfix-new-") as scratch:
        Path(scratch, f"{pr}.yaml").write_text(text, encoding="utf-8", errors="surrogateescape")
        catalogue = fixes.load(scratch)
    if bad := rotted(check(catalogue.fixes, found.package, [Source(label, found.root)])):
        raise RottedError(bad[0].state.message, fix=bad[0].fix, target=found.package)
    shown = []
    for fix in catalogue.fixes:
        plan = overlay.plan(fix.reversals_for(found.package), [found.root])
        shown.append(f"# {fix.id}: {fix.summary}\n{overlay.diff(plan)}")
    return "\n".join(shown)


@contextmanager
def _all_or_none(paths: Iterable[Path]) -> Iterator[None]:
    """Remove what was written where not all of it could be."""
    try:
        yield
    except (UnfixError, OSError, KeyboardInterrupt) as error:
        for path in paths:
            path.unlink(missing_ok=True)
        raise error if not isinstance(error, OSError) else InfraError(f"can't write: {error.strerror}") from None
