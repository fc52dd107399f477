"""Extras: what a checkout adds to a night's documents: diffs, commands, and where each fix is registered.

As far as this checkout, and what is installed beside it, has the sources.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness import fixes, output, overlay, rerun, variants
from harness.code_base import resolve
from harness.errors import UnfixError, UsageError
from harness.history import Key, Night
from harness.root import project_root


@dataclass(frozen=True)
class Extras:
    """Keys of diffs: (target, version, fix); a note where there is no diff.

    ``commands``: what shows a case again. ``places``: for each fix its toggle file, as a path relative to the
    checkout's root, and the line that its name is on.
    """

    diffs: Mapping[tuple[str, str, str], str] = field(default_factory=dict)
    notes: Mapping[tuple[str, str, str], str] = field(default_factory=dict)
    commands: Mapping[Key, str] = field(default_factory=dict)
    places: Mapping[str, tuple[str, int]] = field(default_factory=dict)


NOTHING = Extras()


def extras(night: Night, takes: Collection[str]) -> Extras:
    """``takes``: the names of the options that ``unfix repro`` has."""
    try:
        root = project_root()
        catalogue = fixes.load(root / "toggles")
    except UnfixError as error:
        output.note(f"no diffs and no commands: {error}")
        return NOTHING
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
    places = {fix.id: (fix.source.relative_to(root).as_posix(), fix.line) for fix in catalogue}
    return Extras(diffs, notes, commands, places)


def _diff(root: Path, catalogue: fixes.Catalogue, target: str, version: str, fix: str) -> str:
    if fix not in catalogue.ids:
        raise UsageError("this checkout registers no such fix")
    release, _, source = version.partition(" environment, ")
    roots = [resolve(target, root, release or None, source or None).sources]
    return overlay.diff(overlay.plan(variants.choose_all(catalogue, [fix], target, roots), roots))
