"""Do the detectors agree? `python benchmarks/agreement.py [--cases 1000] [--seed 0] [--device cuda] [--json FILE]`.

Each random case runs under the red zone and under the guard page, and what it computes is compared with a reference:

    draft, store  shapes of regressions/strategies.py, with the fix or its guard in or out; no rows of gigabytes
    touch         a kernel of agreement_legs.py, in eager torch (CPU) or Triton, that reads or writes a few bytes at a
                  random place: before, after, inside or far from one of two buffers, or in the other one

Plain arithmetic says beforehand what each of the three must see, to the byte: what it answers must be that. Where it
also says that one sees what another can't, it names the one boundary that keeps that other from it, out of BOUNDARIES,
which docs/detectors.md has word for word. So a disagreement that isn't foretold fails, and so does one that is and
doesn't come. (An input for which two boundaries would explain one disagreement is drawn again.)

The reference's answer is that of the run under the red zone, the only one in which a stray write harms nobody: all that
lies around its zones is the case's own. Not drawn: more than FAR bytes off, freed memory, writes that are masked out.

Prints a table, and writes results/agreement-DEVICE.json as it goes. Exit code 1 where anything failed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks")]

import record  # noqa: E402
from agreement_cases import Case, scenario_cases, touch_cases  # noqa: E402
from agreement_model import BOUNDARIES, NAMES, Said, disagreeing  # noqa: E402

from harness import fixes, outcome  # noqa: E402
from harness.company import Company, key  # noqa: E402
from harness.device import resolve_device  # noqa: E402
from harness.errors import InfraError  # noqa: E402
from harness.sandbox import Request  # noqa: E402

AGREE_BLIND = "none sees what is stray"
ROUND = 100  # cases between two writes of the JSON


def answers(company: Company, cases: Sequence[Case], guards: Sequence[str]) -> list[tuple[Said, str]]:
    """What each case's three said, and what its legs raised. Those foretold to end their process run alone."""
    together: list[Request] = []
    alone: list[Request] = []
    for case in cases:
        red, guard = case.legs
        (alone if case.dies else together).append(red)
        (alone if case.dies or case.foretold.faults else together).append(guard)
    ended = company.ahead(together, alone).ended
    found = []
    for case in cases:
        said: Said = {}
        errors: list[str] = []
        refusals: set[str | None] = set()
        for name, request in zip(NAMES, case.legs, strict=False):
            ending = ended[key(request)]
            leg = outcome.read(
                ending, reverted=(), guards=guards, detector=request.detector, predicted=None, targets=()
            )
            if leg.infra:
                raise InfraError(f"{case.kind} {case.number}: {leg.infra}")
            ran = leg.outcome in ("clean", "overflow", "wrong", "crashed")
            refusals.add(None if ran else leg.outcome)
            errors += [f"{name}: {leg.outcome}: {leg.error}"] if not ran or leg.outcome == "crashed" else []
            fault = "fault" if ending.signal in (None, "SIGSEGV") else ending.signal
            saw, computed = _seen(case, ending.report or {})
            said[name] = fault if leg.outcome == "crashed" else saw if name == "red-zone" else None
            said["reference"] = computed if name == "red-zone" else said["reference"]
        said["refused"] = refusals.pop() if len(refusals) == 1 else f"{refusals} by one and the other"
        found.append((said, "; ".join(errors)))
    company.forget()
    return found


def _seen(case: Case, report: dict[str, Any]) -> tuple[Any, Any]:
    """What the detector and the reference answered; None for nothing."""
    if case.kind == "touch":
        facts = report.get("facts") or {}
        return facts.get("hits") or None, facts.get("wrong") or None
    hits = [[hit["side"], hit["elements"]] for hit in report.get("hits", [])]
    return hits or None, "wrong" if report.get("wrong") else None


@dataclass
class Tally:
    """What came of the cases so far."""

    cases: Counter[str] = field(default_factory=Counter)
    agree: Counter[str] = field(default_factory=Counter)
    disagree: Counter[str] = field(default_factory=Counter)  # cases, by "who sees | who doesn't | boundary"
    unseen: Counter[str] = field(default_factory=Counter)  # cases in which all are blind, by `Foretold.unseen`
    failures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, case: Case, said: Said, errors: str) -> None:
        self.cases[case.kind] += 1
        pairs = disagreeing(said)
        foretold = case.foretold
        named = {pair: sorted(names) for pair, names in foretold.why.items()}
        if said != foretold.said or sorted(pairs) != sorted(named) or any(len(names) != 1 for names in named.values()):
            why = {f"{one} | {other}": names for (one, other), names in named.items()}
            case_of = {"kind": case.kind, "number": case.number, "case": case.shown}
            self.failures.append({**case_of, "foretold": foretold.said, "why": why, "said": said, "errors": errors})
        elif pairs:
            self.disagree.update(f"{one} | {other} | {named[one, other][0]}" for one, other in pairs)
            self.agree["disagree, as foretold"] += 1
        elif said["refused"]:
            self.agree["refused before anything was stray"] += 1
        else:
            self.agree[
                "all see it" if said["red-zone"] else AGREE_BLIND if foretold.unseen else "nothing is stray"
            ] += 1
            self.unseen.update([foretold.unseen] if foretold.unseen else [])

    def as_dict(self) -> dict[str, Any]:
        counts = {"cases": self.cases, "agreement": self.agree, "disagreements": self.disagree, "unseen": self.unseen}
        return {**{name: dict(sorted(of.items())) for name, of in counts.items()}, "failures": self.failures}


def table(tally: Tally) -> Iterator[str]:
    yield f"{tally.cases.total()} cases: " + ", ".join(f"{n} {kind}" for kind, n in sorted(tally.cases.items()))
    for what, cases in sorted(tally.agree.items()):
        yield f"{cases:6}  {what}"
    yield f"{'cases':>6}  {'sees it':11} {'does not':11} boundary"
    for pair, cases in sorted(tally.disagree.items()):
        one, other, boundary = pair.split(" | ")
        yield f"{cases:6}  {one:11} {other:11} {boundary}: {BOUNDARIES[boundary]}"
    yield f"{'cases':>6}  seen by none, for: {'; '.join(NAMES)}"
    for reasons, cases in sorted(tally.unseen.items()):
        yield f"{cases:6}  {reasons}"
    yield f"{len(tally.failures)} not as foretold" + "".join(f"\n  {failure}" for failure in tally.failures[:5])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="two of five are of the scenarios (1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    device = resolve_device(asked.device)
    to = asked.json or ROOT / "results" / f"agreement-{device}.json"
    company, began, tally = Company(device, 2), time.monotonic(), Tally()
    try:
        cases = scenario_cases(company, device, 2 * asked.cases // 5, asked.seed)
        cases += touch_cases(device, asked.cases - len(cases), asked.seed)
        random.Random(asked.seed).shuffle(cases)  # so that what stands in the JSON early is of all kinds
        guards = [fix.guard for fix in fixes.load(ROOT / "toggles") if fix.guard]
        for at in range(0, len(cases), ROUND):
            some = cases[at : at + ROUND]
            for case, (said, errors) in zip(some, answers(company, some, guards), strict=True):
                tally.add(case, said, errors)
            seconds = round(time.monotonic() - began, 1)
            record.save(to, device, {"seed": asked.seed, "drawn": len(cases), "seconds": seconds, **tally.as_dict()})
    finally:
        company.close()
    print("\n".join(table(tally)))
    return int(bool(tally.failures))


if __name__ == "__main__":
    sys.exit(main())
