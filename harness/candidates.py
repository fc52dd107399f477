"""The fixes that a search may take out of what a command runs, and the command with some of them out.

A trial sees a revert as `unfix exec --revert` shows it: overlays in front of PYTHONPATH. A command with `{revert}` in
its words passes the selection on itself, to a container or another machine whose sources can't be looked at from here.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from harness import execute, overlay, selection
from harness.edits import Reversal
from harness.errors import RottedError, UnfixError, UsageError
from harness.execute import Sight
from harness.fixes import Catalogue, Fix
from harness.variants import NotFixedError, choose

PLACEHOLDER = "{revert}"
_NO_BYTECODE = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")  # then none is beside a file that was imported


@dataclass(frozen=True)
class Candidates:
    """A command, and the fixes that can be out when it runs."""

    command: tuple[str, ...]  # its words
    environment: Mapping[str, str]  # what it runs in, without a variable that takes fixes out
    fixes: tuple[str, ...]  # full ids, in the order of the catalogue
    notes: tuple[str, ...]  # what is left out of the search and why, a line each
    digest: str  # of every source that a fix is taken out of, and of what is written there; "" for `{revert}`
    sight: Sight | None = None  # None for `{revert}`
    reversals: Mapping[str, Mapping[str, tuple[Reversal, ...]]] | None = None  # by code base, then by fix

    def under(self, out: Iterable[str]) -> tuple[tuple[str, ...], dict[str, str]]:
        """The words and the environment of the command with these fixes out."""
        gone = self.ordered(out)
        if self.sight is None:
            return self.words(gone), dict(self.environment)
        return self.command, self.sight.under([tree for tree in map(overlay.build, self._plans(gone)) if tree], gone)

    def forget_imports(self) -> None:
        """Remove what Python compiled in the overlay with all of them out: then `imported` is about later runs."""
        for file in self._compiled():
            file.unlink(missing_ok=True)

    def imported(self) -> bool:
        """Whether a run with all of them out imported a file of its overlay; True where that can't be known."""
        silent = self.sight is None or any(self.environment.get(name) for name in _NO_BYTECODE)
        return silent or any(True for _ in self._compiled())

    def _compiled(self) -> Iterator[Path]:
        for plan in self._plans(self.fixes):
            if tree := overlay.build(plan):
                for file in plan.values():
                    yield from (tree / file.relpath.parent / "__pycache__").glob(f"{file.relpath.stem}.*.pyc")

    def _plans(self, out: Sequence[str]) -> Iterator[overlay.Plan]:
        """What these fixes, in the order of the catalogue, amount to: one plan a code base."""
        if self.sight is None or self.reversals is None:
            return
        for name, taken in self.reversals.items():
            yield overlay.plan([each for fix in out for each in taken.get(fix, ())], self.sight.places[name])

    def words(self, out: Iterable[str]) -> tuple[str, ...]:
        """The command's words, where `{revert}` is the comma list of what is out, and 0 for nothing."""
        if self.sight is not None:
            return self.command
        listed = ",".join(self.ordered(out)) or "0"
        return tuple(word.replace(PLACEHOLDER, listed) for word in self.command)

    def ordered(self, out: Iterable[str]) -> tuple[str, ...]:
        """These fixes in the order of the catalogue."""
        gone = set(out)
        return tuple(fix for fix in self.fixes if fix in gone)


def find(
    command: Sequence[str],
    catalogue: Catalogue,
    ids: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Candidates:
    """The candidates among these fixes, else among all; each goes alone, and all go together.

    A fix that the sources lack is noted and left out. Raises RottedError for one that doesn't apply, UsageError for
    those that can't be out together, UnfixError where none is left, and what `execute.look` raises.
    """
    fixes = [fix for fix in catalogue if not ids or fix.id in ids]
    if any(PLACEHOLDER in word for word in command):
        kept = {name: value for name, value in (environment or os.environ).items() if name not in selection.VARIABLES}
        note = f"{PLACEHOLDER}: the command takes the fixes out itself; whether they apply there isn't known here"
        return Candidates(tuple(command), kept, tuple(fix.id for fix in fixes), (note,), "")
    sight = execute.look(command, fixes, environment=environment)
    reversals, refused = _reversals(sight, fixes)
    kept_ids = tuple(fix.id for fix in fixes if any(fix.id in taken for taken in reversals.values()))
    if not kept_ids:
        raise UnfixError("; ".join([*sight.missing.values(), *(why for whys in refused.values() for why in whys)]))
    notes = list(sight.missing.values())
    if unseen := [fix_id for fix_id, whys in refused.items() if not whys]:
        notes.append(f"left out of the search, since the command sees no code base of theirs: {', '.join(unseen)}")
    for fix_id, whys in refused.items():
        notes += whys if fix_id in kept_ids else [f"left out of the search: {why}" for why in whys]
    digest = hashlib.sha256()
    for name, taken in reversals.items():
        _check_together(taken, _alone(taken, sight.places[name], digest), sight.places[name])
    environment = sight.environment
    return Candidates(tuple(command), environment, kept_ids, tuple(notes), digest.hexdigest(), sight, reversals)


def _reversals(
    sight: Sight, fixes: Sequence[Fix]
) -> tuple[dict[str, dict[str, tuple[Reversal, ...]]], dict[str, list[str]]]:
    """What takes each fix out, by code base; and by fix, why it can't be out (no reason: no code base to look at)."""
    found: dict[str, dict[str, tuple[Reversal, ...]]] = {}
    refused: dict[str, list[str]] = {}
    for fix in fixes:
        if not any(name in sight.places for name in fix.code_bases):
            refused[fix.id] = []  # for want of a code base
        for name in fix.code_bases:
            try:
                if name in sight.places:
                    found.setdefault(name, {})[fix.id] = choose(fix, name, sight.places[name])
            except NotFixedError as error:
                refused.setdefault(fix.id, []).append(str(error))
    return found, refused


def _alone(taken: Mapping[str, tuple[Reversal, ...]], places: Sequence[Path], digest: hashlib._Hash) -> dict[str, set]:
    """The files that each fix is taken out of, which `digest` takes in, too."""
    files = {}
    for fix, reversals in taken.items():
        plan = overlay.plan(reversals, places)
        files[fix] = set(plan)
        for path, edited in sorted(plan.items()):
            for part in (fix.encode(), os.fsencode(path), edited.old, edited.new):
                digest.update(len(part).to_bytes(8, "little") + part)
    return files


def _check_together(
    taken: Mapping[str, tuple[Reversal, ...]], files: Mapping[str, set[Path]], places: Sequence[Path]
) -> None:
    clashes = []
    for one, other in combinations(taken, 2):
        if files[one] & files[other]:
            try:
                overlay.plan([*taken[one], *taken[other]], places)
            except RottedError as error:
                clashes.append(f"{one} and {other} ({error.message})")
    if not clashes:
        try:
            overlay.plan([each for reversals in taken.values() for each in reversals], places)
        except RottedError as error:
            clashes.append(f"{error.fix} ({error.message})")
    if clashes:
        raise UsageError(f"can't be out together: {'; '.join(clashes)}: leave one out with --fixes")
