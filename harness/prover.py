"""The prover: one fix, one case, all its legs, one verdict.

Everything that runs is planned first: a reversal that does not apply is found before any leg starts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from harness import outcome, overlay
from harness.case import Case
from harness.errors import InfraError, RottedError
from harness.fixes import Catalogue, Fix
from harness.outcome import Leg
from harness.reach import Target
from harness.sandbox import Request, Sandbox, installed
from harness.targets import locate
from harness.verdict import Expected, Verdict, judge

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
            "verdict": self.verdict.kind,
            "reason": self.verdict.reason,
            "legs": [leg.as_dict() for leg in self.legs],
        }


class Prover:
    """Proves fixes of one catalogue on one device.

    ``session``: ids of fixes that are out in every leg (``SGLANG_DEBUG_REVERT_PR`` around a whole test run).
    """

    def __init__(
        self,
        catalogue: Catalogue,
        *,
        device: str,
        root: Path,
        target: str = "eagle_kv",
        session: Sequence[str] = (),
        sandbox: Sandbox | None = None,
    ):
        self.catalogue, self.device, self.target, self.session = catalogue, device, target, tuple(session)
        self.source_roots = [root / "kernels"]
        self._path = [str(root), str(root / "kernels")]
        self.sandbox = sandbox or Sandbox(device)
        self._overlays: dict[tuple[str, ...], Path | None] = {}
        self._guards = [fix.guard for fix in catalogue.fixes if fix.guard]

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Versions and device as a leg sees them. Raises InfraError where the device asked for is not there."""
        ending = self.sandbox.run(Request("harness.leg:environment", device=self.device, path=self._path))
        if ending.report is None or ending.report["raised"]:
            raised = (ending.report or {}).get("raised") or {"message": ending.stderr.strip().rpartition("\n")[2]}
            raise InfraError(f"no leg can run on {self.device}: {raised['message']}")
        facts: dict[str, Any] = ending.report["facts"]
        if not facts.pop("usable"):
            raise InfraError(f"--device {self.device} was asked for, but torch {facts['torch']} sees no such device")
        return facts

    def edits(self, reverted: Sequence[str]) -> overlay.Plan:
        """What a selection amounts to, file by file. Raises RottedError where a reversal does not apply."""
        return overlay.plan(self.catalogue.reversals(reverted, self.target), self.source_roots)

    def prove(self, fix_id: str, case: Case) -> Result:
        """Run every leg of a case and judge it. Never raises for what the code under test does."""
        fix = self.catalogue.fix(fix_id)
        if case.on == "guarded" and case.tells and fix.guard:
            # with the fix in, it must be this very guard that stopped it, and not another one
            case = replace(case, reason={frozenset(): fix.guard, **case.reason})
        expected = tuple(self._expected(fix, case, out) for out in fix.legs_out_ids)
        if missing := self._missing(case):
            return self._result(fix_id, case, Verdict("skipped", missing, fix_id))
        selections = [(), *fix.legs_out_ids]
        try:
            for out in selections:
                self._overlay(self._with_session(out))
            _ = self.environment
            legs = tuple(self._leg(case, out) for out in selections)
        except RottedError as error:
            return self._result(fix_id, case, Verdict("rotted", str(error), error.fix or fix_id))
        except InfraError as error:
            return self._result(fix_id, case, Verdict("infra", str(error), fix_id))
        return self._result(fix_id, case, judge(fix_id, case, legs, expected), legs, expected)

    def _result(
        self, fix: str, case: Case, verdict: Verdict, legs: tuple[Leg, ...] = (), expected: tuple[Expected, ...] = ()
    ) -> Result:
        return Result(fix, case, self.target, self.device, verdict, legs, expected)

    def _with_session(self, out: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in self.catalogue.ids if name in {*self.session, *out})

    def _expected(self, fix: Fix, case: Case, out: Sequence[str]) -> Expected:
        declared = fix.legs[fix.legs_out_ids.index(tuple(out))]
        wanted = (declared.outcome_on(self.device) or "clean") if case.tells else case.on
        key = frozenset(out)
        return Expected(case.expect.get(key, wanted), case.reason.get(key, declared.reason or ""))

    def _missing(self, case: Case) -> str | None:
        if self.device != "cuda":
            return f"needs a CUDA device, and this run is on the {self.device}" if case.needs_cuda else None
        for package in case.cuda_packages:
            if not installed(package):
                return f"needs the package {package}, which {sys.executable} does not have (pip install '.[gpu]')"
        return None

    def _overlay(self, reverted: tuple[str, ...]) -> Path | None:
        if reverted not in self._overlays:
            self._overlays[reverted] = overlay.build(self.edits(reverted))
        return self._overlays[reverted]

    def _targets(self, out: Sequence[str], tree: Path | None) -> list[Target]:
        """The places whose entry proves that a leg ran what these fixes changed."""
        targets = []
        for reversal in self.catalogue.reversals(out, self.target) if tree else ():
            place = locate(reversal.target, self.source_roots)
            file = str(tree / place.relpath) if tree else ""
            targets.append(Target(reversal.target, file, place.module or None, place.qualname, reversal.entered_by))
        return targets

    def _leg(self, case: Case, out: tuple[str, ...]) -> Leg:
        reverted = self._with_session(out)
        tree = self._overlay(reverted)
        # what a session takes out need not concern this case: only the leg's own fixes must be reached
        targets = self._targets(out, tree)
        ending = self.sandbox.run(
            Request(
                entry=case.entry.replace("{target}", self.target),
                params=case.params,
                device=self.device,
                path=[str(tree), *self._path] if tree else self._path,
                targets=targets,
                detector=case.detector,
                zone_bytes=case.zone_bytes,
                timeout=LEG_TIMEOUT[self.device],
            )
        )
        return outcome.read(
            ending,
            reverted=reverted,
            guards=self._guards,
            detector=case.detector,
            predicted=case.stray.elements if case.stray else None,
            targets=[target.name for target in targets],
        )
