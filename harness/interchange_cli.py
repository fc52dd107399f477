"""`unfix export` and `unfix import`: to and from SGLang's own format. :mod:`harness.interchange` does it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from harness import check, fixes, interchange, output, overlay, selection, togglefile, upstream, variants, yamlfile
from harness.errors import ToggleError, UnfixError, UsageError
from harness.fixes import Variant
from harness.root import project_root
from harness.variants import NotFixedError

Release = Annotated[str | None, typer.Option(metavar="V", help="a published release of SGLang")]
SourceDir = Annotated[str | None, typer.Option("--source", metavar="DIR", help="a checkout of SGLang")]
Selected = Annotated[str, typer.Argument(metavar="SEL", help="27338, 27338:topk-factor, or a comma list")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("export")(export_command)
    app.command("import")(import_command)


def export_command(sel: Selected, release: Release = None, source: SourceDir = None) -> None:
    """The entry that SGLang's own registry needs to take these fixes out of one release.

    Fixes that the release lacks, or that SGLang's patcher can't take out, are named on stderr. Exit code 1 where none
    is left.

    Example: unfix export 27338 --release 0.5.23
    """
    registered = fixes.load(project_root() / "toggles")
    chosen = selection.parse(sel, registered, source="SEL")
    if not chosen:
        raise UsageError(f"SEL {sel!r} selects no fix; known: {', '.join(registered.ids)}")
    roots = [_tree(release, source).root]
    able, refused = [], []
    for fix in chosen:
        try:
            _export(registered, [fix], roots)
            able.append(fix)
        except (NotFixedError, interchange.NotSayableError) as error:
            refused.append(f"{fix}: {str(error).removeprefix(f'{fix} ')}")
    if not able:
        raise UnfixError("; ".join(refused))
    for line in refused:
        output.note(f"left out: {line}")
    print(_export(registered, able, roots), end="")


def _export(registered: fixes.Catalogue, ids: Sequence[str], roots: Sequence[Path]) -> str:
    if unable := selection.able(ids, registered, "sglang")[1]:
        raise interchange.NotSayableError(unable)
    return interchange.export(overlay.plan(variants.choose_all(registered, ids, "sglang", roots), roots))


def import_command(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE] [PR…]", help="their file, without --release; then which of it")
    ] = None,
    release: Release = None,
    source: SourceDir = None,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="write DIR/PR.yaml; without: to stdout")] = None,
) -> None:
    """Toggle files from SGLang's registry: from a release's or a checkout's, or from one entry's YAML in a FILE.

    Each has one fix, `imported`; kind, title and summary are left to fill in. An entry that doesn't apply to its own
    release is imported all the same, and said: exit code 3.

    Example: unfix import --release 0.5.23 25015
    """
    named = list(words or ())
    rotted = False
    if release or source:
        tree = _tree(release, source)
        origin, entries = f"SGLang {tree.name}", _picked(check.registry(tree.root), named, tree.name)
    elif named:
        tree, origin = None, f"`{Path(named[0]).name}`"
        entries = _from_file(named)
    else:
        raise UsageError("name a FILE in SGLang's format, a --release or a --source")
    for at, (pr, entry) in enumerate(entries):
        if isinstance(entry, str):
            raise ToggleError(entry)
        if tree and (here := variants.judge([entry], [], [tree.root])).kind != "fixed":
            rotted = True
            output.note(f"rotted: {pr} in {tree.name}: {here.message or 'reads as if it were out already'}")
        if at and out is None:
            print("---")
        _deliver(pr, interchange.toggle_file(pr, entry.reversals, origin), out)
    raise typer.Exit(3 if rotted else 0)


def _picked(found: list[tuple[str, Variant | str]], prs: Sequence[str], name: str) -> list[tuple[str, Variant | str]]:
    if not found:
        raise UsageError(f"SGLang {name} has no registry of its own: it came with 0.5.13")
    known = [pr for pr, _ in found]
    if unknown := [pr for pr in prs if pr not in known]:
        raise UsageError(f"no entry {unknown[0][:60]!a} in SGLang {name}; it has {', '.join(known)}")
    return [(pr, entry) for pr, entry in found if not prs or pr in prs]


def _from_file(named: Sequence[str]) -> list[tuple[str, Variant | str]]:
    file, prs = Path(named[0]), named[1:]
    if file.suffix == ".py":
        raise UsageError(f"{file} is Python: name the checkout that it is in with --source, or a --release")
    if len(prs) != 1 or not re.fullmatch("[1-9][0-9]{0,8}", prs[0]):
        raise UsageError(f"a YAML names no PR: say `unfix import {file} PR`, one number")
    return [(prs[0], Variant("", interchange.parse(yamlfile.text_of(file), yamlfile.shown(file))))]


def _deliver(pr: str, text: str, out: str | None) -> None:
    if out is None:
        print(text, end="")
        return
    file = Path(out) / f"{pr}.yaml"
    if not file.parent.is_dir():
        raise UsageError(f"--out {out}: no such directory")
    try:
        with open(file, "x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise UsageError(f"{file} is there already: its fixes would be lost") from None
    togglefile.validate(yamlfile.read(file))
    output.note(f"wrote {file}")


def _tree(release: str | None, source: str | None) -> upstream.Source:
    if bool(release) == bool(source):
        raise UsageError("name one of --release V and --source DIR: whose sources it is for")
    return upstream.checkout(source) if source else upstream.release(release or "")
