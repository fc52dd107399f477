"""The prover: one fix, one case, all its legs, one verdict.

Everything that runs is planned first: a reversal that does not apply is found before any leg starts.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from harness import outcome, overlay, sharing
from harness.case import Case
from harness.code_base import CodeBase, eagle_kv
from harness.device import visible
from harness.edits import Reversal
from harness.errors import InfraError, RottedError
from harness.fixes import Catalogue, Fix
from harness.launch import installed
from harness.outcome import Leg
from harness.reach import Target
from harness.sandbox import Request, Servers
from harness.targets import locate
from harness.turns import MUCH, turn
from harness.variants import NotFixedError, State, choose, choose_forward, state
from harness.verdict import Expected, Verdict, judge

_Plan = tuple[tuple[str, ...], "Path | None", list[Target]]
LEG_TIMEOUT = {"cpu": 240.0, "cuda": 480.0}  # seconds: the first leg of a kind pays its JIT build


@dataclass(frozen=True)
class Result:
    """What a case said about a fix, with what is needed to run it again."""

    fix: str
    case: Case
    target: str
    device: str
    verdict: Verdict
    legs: tuple[Leg, ...] = ()
    expected: tuple[Expected, ...] = field(default=())
    fix_in: tuple[Leg, ...] = ()  # where a reversal rotted: the one leg that needs none

    def as_dict(self) -> dict[str, Any]:
        """One entry of ``results`` in the JSON contract (schema version 1)."""
        return {
            "regression": self.case.regression or self.fix.partition(":")[0],
            "fix": self.fix,
            "blames": self.verdict.fix,
            "case": self.case.id,
            "backend": self.case.backend,
            "target": self.target,
            "device": self.device,
            "tells": self.case.tells,
            "params": dict(self.case.params),
            "detector": self.case.detector,
            "zone_bytes": self.case.zone_bytes,
            "on": self.case.on,
            "expected": [want.outcome for want in self.expected],
            "verdict": self.verdict.kind,
            "reason": self.verdict.reason,
            "legs": [leg.as_dict(trace=self.verdict.kind != "proved") for leg in self.legs or self.fix_in],
        }


class Prover:
    """Proves fixes of one catalogue on one code base and one device. A context manager: it holds fork servers.

    ``session``: ids of fixes that are out in every leg (``SGLANG_DEBUG_REVERT_PR`` around a whole test run).
    """

    def __init__(
        self,
        catalogue: Catalogue,
        *,
        device: str,
        root: Path,
        target: CodeBase | None = None,
        session: Sequence[str] = (),
        servers: Servers | None = None,
    ):
        self.catalogue, self.device, self.root, self.session = catalogue, device, root, tuple(session)
        self.code_base = target or eagle_kv(root)
        self.target = self.code_base.name
        self.source_roots = [self.code_base.sources]
        self.path = [str(root), str(root / "kernels"), *self.code_base.path]
        self.servers = servers or Servers(device, self.code_base.preload)
        self._overlays: dict[tuple[tuple[str, ...], tuple[str, ...]], Path | None] = {}
        self._states: dict[str, State] = {}
        self._guards = [fix.guard for fix in catalogue.fixes if fix.guard]

    def __enter__(self) -> Prover:
        return self

    def __exit__(self, *_: object) -> None:
        self.servers.close()

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Versions and device as a leg sees them. Raises InfraError where the device asked for is not there."""
        request = Request("harness.leg:environment", device=self.device, path=self.path, shared=True)
        ending = self.servers.run(None, request)
        if ending.report is None or ending.report["raised"]:
            raised = (ending.report or {}).get("raised") or {"message": ending.stderr.strip().rpartition("\n")[2]}
            raise InfraError(f"no leg can run on {self.device}: {raised['message']}")
        facts: dict[str, Any] = ending.report["facts"]
        if not facts.pop("usable"):
            raise InfraError(f"--device {self.device} was asked for, but torch {facts['torch']} sees no such device")
        return {**facts, "target": self.target, "target_version": self.code_base.version}

    @cached_property
    def _gpu(self) -> str:
        """The GPU that legs run on: the first that is visible."""
        return next(iter(visible()), "") if self.device == "cuda" else ""

    def edits(self, reverted: Sequence[str], supplied: Sequence[str] = ()) -> overlay.Plan:
        """What a selection amounts to, file by file. Raises RottedError where a reversal does not apply.

        ``supplied``: fixes that these sources lack and that are put in, so that there is something to prove.
        """
        return overlay.plan(self._reversals([*reverted, *supplied], supplied), self.source_roots)

    def _reversals(self, names: Sequence[str], supplied: Sequence[str]) -> list[Reversal]:
        """Takes a fix out where it is, puts it in where it is supplied, and leaves out one that isn't there anyway."""
        found: list[Reversal] = []
        for name in names:
            fix = self.catalogue.fix(name)
            if name in supplied:
                found += choose_forward(fix, self.target, self.source_roots)
            elif not self._lacks(name):
                found += choose(fix, self.target, self.source_roots)
        return found

    def _lacks(self, name: str) -> bool:
        """These sources never had this fix: what a release lacks is put in for the leg that shows it at work."""
        fix = self.catalogue.fix(name)
        if len(fix.variants_for(self.target)) == 1 and not fix.unfixed_for(self.target):
            return False
        if name not in self._states:
            self._states[name] = state(fix, self.target, self.source_roots)
        return self._states[name].kind == "not fixed"

    def prove(self, fix_id: str, case: Case) -> Result:
        """Run every leg of a case and judge it. Never raises for what the code under test does."""
        fix = self.catalogue.fix(fix_id)
        if case.on == "guarded" and case.tells and fix.guard:
            # with the fix in, it must be this very guard that stopped it, and not another one
            other = case.reason.get(frozenset(), "")
            both = f"(?s)(?=.*(?:{fix.guard}))(?=.*(?:{other}))"
            case = replace(case, reason={**case.reason, frozenset(): both})
        expected = tuple(self._expected(fix, case, out) for out in fix.legs_out_ids)
        if missing := self._missing(fix, case):
            return self._result(fix_id, case, Verdict("skipped", missing, fix_id))
        involved = dict.fromkeys([fix_id, *(name for out in fix.legs_out_ids for name in out)])
        selections = [(), *fix.legs_out_ids]
        try:
            plans = [self._plan(out, list(involved)) for out in selections]
            _ = self.environment
            legs = self._legs(case, plans, self._share(fix, case, expected, plans))
            verdict = judge(fix_id, case, legs, expected)
            if verdict.kind != "proved" and any(leg.shared for leg in legs):
                self.servers.forsake()
                legs = self._legs(case, plans)
                verdict = judge(fix_id, case, legs, expected)
        except RottedError as error:
            rotted = self._result(fix_id, case, Verdict("rotted", str(error), error.fix or fix_id), (), expected)
            return replace(rotted, fix_in=self._with_every_fix_in(case, list(involved)))
        except NotFixedError as error:
            return self._result(fix_id, case, Verdict("skipped", str(error), fix_id))
        except InfraError as error:
            return self._result(fix_id, case, Verdict("infra", str(error), fix_id))
        if verdict.kind not in ("proved", "infra") and (gone := self._gone(fix, case)):
            verdict = Verdict(verdict.kind, f"{verdict.reason}; blamed on a neighbour: {gone}", gone.fix or fix_id)
        return self._result(fix_id, case, verdict, legs, expected)

    def _with_every_fix_in(self, case: Case, involved: Sequence[str]) -> tuple[Leg, ...]:
        """The one leg that tells a fix that is gone from one that was only rewritten; none for an input that can't."""
        try:
            return self._legs(case, [self._plan((), involved)]) if case.tells and not self.session else ()
        except (RottedError, NotFixedError, InfraError):
            return ()

    def _gone(self, fix: Fix, case: Case) -> RottedError | None:
        """A neighbour on the same path that can't be undone, since it isn't there: it is to blame."""
        for other in self.catalogue:
            same_path = other.scenario == fix.scenario and other.backend in (None, case.backend)
            if same_path and self.target in other.code_bases and not self._lacks(other.id):
                try:
                    self.edits([other.id])
                except RottedError as error:
                    return error
                except InfraError:
                    continue  # another package, not installed here
        return None

    def _result(
        self, fix: str, case: Case, verdict: Verdict, legs: tuple[Leg, ...] = (), expected: tuple[Expected, ...] = ()
    ) -> Result:
        return Result(fix, case, self.target, self.device, verdict, legs, expected)

    def _expected(self, fix: Fix, case: Case, out: tuple[str, ...]) -> Expected:
        declared = fix.legs[fix.legs_out_ids.index(tuple(out))]
        if case.tells and out == (fix.id,) and self.target in case.elsewhere:
            return Expected(*case.elsewhere[self.target])
        wanted = declared.outcome_on(self.device) if case.tells else case.on
        key = frozenset(out)
        return Expected(case.expect.get(key, wanted), case.reason.get(key, declared.reason or ""))

    def _missing(self, fix: Fix, case: Case) -> str | None:
        for out in (fix.id, *(name for leg in fix.legs_out_ids for name in leg)):
            if self.target not in self.catalogue.fix(out).code_bases:
                return f"{out} can't be undone in {self.target}: its toggle file has no reversal there"
        if why := case.cannot.get(self.target) or case.cannot.get(f"{self.target} on {self.device}"):
            return why
        if self.device != "cuda":
            return f"needs a CUDA device, and this run is on the {self.device}" if case.needs_cuda else None
        for package in case.cuda_packages:
            if not installed(package, self.path):
                return f"needs the package {package}, which {sys.executable} does not have (pip install '.[gpu]')"
        return None

    def _plan(self, out: Sequence[str], involved: Sequence[str]) -> _Plan:
        """The fixes that are out in a leg, its overlay, and the places whose entry proves that it ran that."""
        reverted = tuple(name for name in self.catalogue.ids if name in {*self.session, *out})
        supplied = tuple(name for name in involved if name not in reverted and self._lacks(name))
        key = reverted, supplied
        if key not in self._overlays:
            self._overlays[key] = overlay.build(self.edits(reverted, supplied))
        tree = self._overlays[key]
        if tree is None:
            return reverted, None, []
        targets = []
        # what a session takes out need not concern this case: only the leg's own fixes must be reached
        for reversal in self._reversals([*out, *supplied], supplied):
            place = locate(reversal.target, self.source_roots)
            file = str(tree / place.relpath)
            targets.append(Target(reversal.target, file, place.module or None, place.qualname, reversal.entered_by))
        return reverted, tree, targets

    def _share(self, fix: Fix, case: Case, expected: Sequence[Expected], plans: Sequence[_Plan]) -> tuple[bool, ...]:
        """For each leg, whether it may run where others did."""
        if str(self.code_base.sources) not in self.path:  # no leg imports it anew
            return (False,) * len(plans)
        kill = sharing.guards_kill(self.catalogue, fix.scenario, self.target)
        wanted = [case.on, *(want.outcome for want in expected)]
        return tuple(sharing.harmless(case, want, guards_kill=kill) for want in wanted)

    def _legs(self, case: Case, plans: Sequence[_Plan], share: Sequence[bool] = ()) -> tuple[Leg, ...]:
        """``share``: for each, whether it may run where others did; none may without."""
        legs = tuple(
            self._leg(case, plan, shared) for plan, shared in zip(plans, share or [False] * len(plans), strict=True)
        )
        self.servers.settle()  # before anything is believed
        return legs

    def _leg(self, case: Case, plan: _Plan, shared: bool = False) -> Leg:
        reverted, tree, targets = plan
        request = Request(
            entry=case.entry.replace("{target}", self.target),
            params=case.params,
            device=self.device,
            path=[str(tree), *self.path] if tree else self.path,
            targets=targets,
            detector=case.detector,
            zone_bytes=case.zone_bytes,
            timeout=LEG_TIMEOUT[self.device],
            shared=shared,
        )
        with turn(self._gpu, case.device_bytes) if self._gpu else contextlib.nullcontext():
            ending = self.servers.run(tree, request)
            if case.device_bytes >= MUCH:
                self.servers.settle()  # its memory is free before the next leg asks for as much
        stray = case.stray_given((ending.report or {}).get("facts", {}))
        return outcome.read(
            ending,
            reverted=reverted,
            guards=self._guards,
            detector=case.detector,
            predicted=stray.elements if stray else None,
            targets=[target.name for target in targets],
        )
