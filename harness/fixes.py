"""The catalogue of fixes, read from toggle files.

`python -m harness.fixes schema > toggles/schema.json` writes the JSON Schema that editors check toggle files with.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import trust
from harness.edits import Edit, Reversal
from harness.errors import ToggleError, UsageError
from harness.togglefile import FixEntry, FormEntry, FormsEntry, Kind, LegEntry, ReversalEntry, schema, validate
from harness.yamlfile import Node, read, shown


@dataclass(frozen=True)
class Variant:
    """One way that a code base's sources read, and what turns them. `name` is "" for a plain list of reversals."""

    name: str
    reversals: tuple[Reversal, ...]


@dataclass(frozen=True)
class Fix:
    """One fix of the catalogue. `source` is the toggle file, `line` the line that its name is on."""

    id: str
    pr: str
    name: str
    title: str
    links: tuple[str, ...]
    entry: FixEntry
    source: Path
    line: int

    @property
    def kind(self) -> Kind:
        return self.entry.kind

    @property
    def summary(self) -> str:
        return self.entry.summary

    @property
    def scenario(self) -> str | None:
        return self.entry.scenario

    @property
    def backend(self) -> str | None:
        return self.entry.backend

    @property
    def guard(self) -> str | None:
        return self.entry.guard

    @property
    def legs(self) -> tuple[LegEntry, ...]:
        return tuple(self.entry.legs)

    @property
    def legs_out_ids(self) -> tuple[tuple[str, ...], ...]:
        """For each leg, the full ids of the fixes that are out."""
        return tuple(tuple(_full_id(self.pr, name) for name in leg.out) for leg in self.entry.legs)

    @property
    def code_bases(self) -> tuple[str, ...]:
        """The code bases, such as `eagle_kv` and `sglang`, that it can be undone in."""
        return tuple(self.entry.reversals)

    def variants_for(self, code_base: str) -> tuple[Variant, ...]:
        """The ways that the fix reads there, each with what takes it out; one, without a name, for a plain list."""
        entry = self._reversals(code_base)
        if isinstance(entry, list):
            return (self._variant("", entry),)
        return tuple(self._form(form) for form in entry.variants) if entry else ()

    def unfixed_for(self, code_base: str) -> tuple[Variant, ...]:
        """The ways that code without the fix reads there, each with what puts it in. For a plain list nobody said."""
        entry = self._reversals(code_base)
        return () if entry is None or isinstance(entry, list) else tuple(self._form(form) for form in entry.unfixed)

    def reversals_for(self, code_base: str) -> tuple[Reversal, ...]:
        """How it is undone in a code base where that is said in one way; () if it is said in none.

        Raises UsageError where there are several variants: `harness.variants.choose` looks at the sources.
        """
        variants = self.variants_for(code_base)
        if len(variants) > 1:
            names = ", ".join(variant.name for variant in variants)
            raise UsageError(f"{self.id} has several variants in {code_base} ({names}): choose by its sources")
        return variants[0].reversals if variants else ()

    def _reversals(self, code_base: str) -> list[ReversalEntry] | FormsEntry | None:
        return self.entry.reversals.get(code_base)

    def _form(self, form: FormEntry) -> Variant:
        return self._variant(form.name, form.patches)

    def _variant(self, name: str, patches: Sequence[ReversalEntry]) -> Variant:
        reversals = tuple(
            Reversal(
                self.id,
                entry.target,
                tuple(Edit(edit.match, edit.replacement, edit.prepend, edit.append) for edit in entry.edits),
                entry.entered_by,
            )
            for entry in patches
        )
        return Variant(name, reversals)


@dataclass(frozen=True)
class Catalogue:
    """All fixes, in the order of their PRs and then of their files; `own` comes last."""

    fixes: tuple[Fix, ...]

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(fix.id for fix in self.fixes)

    @property
    def prs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(fix.pr for fix in self.fixes))

    def __iter__(self) -> Iterator[Fix]:
        return iter(self.fixes)

    def __len__(self) -> int:
        return len(self.fixes)

    def fix(self, fix_id: str) -> Fix:
        """The fix with this full id. Raises UsageError, with the nearest id, if there is none."""
        for fix in self.fixes:
            if fix.id == fix_id:
                return fix
        near = difflib.get_close_matches(fix_id, self.ids, 1, 0.3)
        raise UsageError(f"no fix {fix_id[:80]!a}" + (f"; nearest: {near[0]}" if near else ""))

    def reversals(self, ids: Sequence[str], code_base: str) -> tuple[Reversal, ...]:
        """How all these fixes are undone in a code base."""
        return tuple(reversal for fix_id in ids for reversal in self.fix(fix_id).reversals_for(code_base))


def load(directory: Path | str) -> Catalogue:
    """Read every `*.yaml` of a directory. Raises ToggleError: `file:line: dotted.path: what would be right`.

    Raises UsageError where it, or a file in it, is not to be trusted (`harness.trust`).

    Scenarios are looked for in `regressions/scenarios` beside the directory, where there is such a folder.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise UsageError(f"no toggle directory {directory}")
    if misnamed := sorted(directory.glob("*.yml")):
        raise ToggleError(f"{shown(misnamed[0])}:1: isn't read: rename it to {misnamed[0].stem}.yaml")
    trust.check_files(directory, directory.glob("*.yaml"))
    paths = sorted(directory.glob("*.yaml"), key=lambda path: (not path.stem.isdigit(), path.stem.zfill(12)))
    roots = [read(path) for path in paths]
    fixes: list[Fix] = []
    for root in roots:
        file = validate(root)
        pr = str(file.pr)
        for name, entry in file.fixes.items():
            line = root.line("fixes", name)
            fixes.append(Fix(f"{pr}:{name}", pr, name, file.title, tuple(file.links), entry, root.path, line))
    catalogue = Catalogue(tuple(fixes))
    nodes = {root.path: root for root in roots}
    _check_scenarios(catalogue, nodes, directory.parent / "regressions" / "scenarios")
    _check_legs(catalogue, nodes)
    return catalogue


def _full_id(pr: str, name: str) -> str:
    return name if ":" in name else f"{pr}:{name}"


def _check_scenarios(catalogue: Catalogue, roots: dict[Path, Node], folder: Path) -> None:
    if not folder.is_dir():
        return
    known = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    for fix in catalogue:
        if fix.scenario is not None and fix.scenario not in known:
            near = difflib.get_close_matches(fix.scenario, known, 1, 0.3)
            hint = f", did you mean {near[0]}?" if near else ""
            message = f"no {shown(folder / fix.scenario)}.py{hint}"
            raise ToggleError(roots[fix.source].error(("fixes", fix.name, "scenario"), message))


def _check_legs(catalogue: Catalogue, roots: dict[Path, Node]) -> None:
    known = set(catalogue.ids)
    for fix in catalogue:
        seen: dict[frozenset[str], int] = {}
        for index, out in enumerate(fix.legs_out_ids):
            path = ("fixes", fix.name, "legs", index, "out")
            for at, fix_id in enumerate(out):
                if fix_id not in known:
                    near = difflib.get_close_matches(fix_id, catalogue.ids, 1, 0.3)
                    hint = f", did you mean {near[0]}?" if near else ""
                    raise ToggleError(roots[fix.source].error((*path, at), f"no fix {fix_id}{hint}"))
            if len(set(out)) != len(out):
                raise ToggleError(roots[fix.source].error(path, "the same fix twice (name each once)"))
            if fix.id not in out:
                raise ToggleError(roots[fix.source].error(path, f"must have {fix.name}, the fix that it is a leg of"))
            if (first := seen.setdefault(frozenset(out), index)) != index:
                line = roots[fix.source].line("fixes", fix.name, "legs", first, "out")
                raise ToggleError(roots[fix.source].error(path, f"the same fixes as the leg on line {line}"))


if __name__ == "__main__":
    if sys.argv[1:] != ["schema"]:
        sys.exit("usage: python -m harness.fixes schema > toggles/schema.json")
    print(json.dumps(schema(), indent=2))
