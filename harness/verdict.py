"""A verdict: what the legs of one case together say about one fix.

A fix is proved on a case only where every condition below holds; the first that fails gives the verdict its name.

    infra         something on the machine, not in the code under test, went wrong
    rotted        a reversal does not apply (found while planning: at most the leg with every fix in ran)
    not-reached   a leg did not run the overlay's file, or never entered what was reverted
    regressed     fix in: not the outcome that the input must have
    vacuous       fix out: the same outcome as with the fix in
    unexpected    fix out: another outcome, reason or number of stray elements than declared
    skipped       a device or package that the case needs is not here; never counts as proved
    proved        none of these
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from harness.case import Case
from harness.outcome import Leg

VERDICTS = ("proved", "skipped", "regressed", "vacuous", "unexpected", "not-reached", "rotted", "infra")


@dataclass(frozen=True)
class Expected:
    """What one leg with fixes out must show."""

    outcome: str
    reason: str = ""  # regex, searched in the leg's evidence


@dataclass(frozen=True)
class Verdict:
    kind: str
    reason: str | None  # None only where there is nothing to say
    fix: str  # the fix that this verdict speaks about


def judge(fix: str, case: Case, legs: Sequence[Leg], expected: Sequence[Expected]) -> Verdict:
    """``legs[0]`` is the run with the fix in; ``expected`` belongs to ``legs[1:]``, in order."""

    def say(kind: str, reason: str | None) -> Verdict:
        return Verdict(kind, reason, fix)

    on, off = legs[0], list(zip(legs[1:], expected, strict=True))
    for leg in legs:
        if leg.infra:
            return say("infra", f"{_name(leg)}: {leg.infra}")
    for leg, want in [(on, Expected(case.on)), *off]:
        if leg.outcome == "hung" != want.outcome:
            return say("infra", f"{_name(leg)}: {leg.error}")
    if on.outcome != case.on:
        return say("regressed", f"{_name(on)}: must be {case.on}, is {_what(on)}")
    if (why := case.reason.get(frozenset())) and not re.search(why, on.evidence):
        return say("regressed", f"{_name(on)}: {on.outcome}, but not for the reason /{why}/: {_what(on)}")
    for leg in legs if case.reaches else ():  # the fix in, too, where these sources lack it and it was put in
        if missing := [target for target in leg.targets if target not in leg.reached]:
            return say("not-reached", f"{_name(leg)}: never entered {', '.join(missing)}")
    for leg, want in off:
        if leg.outcome == want.outcome:
            continue
        kind = "vacuous" if leg.outcome == on.outcome else "unexpected"
        return say(kind, f"{_name(leg)}: must be {want.outcome}, is {_what(leg)}")
    if not off:
        return say("vacuous", "no leg with this fix out is declared")
    alone = [leg for leg, _ in off if leg.reverted == (fix,)] or [leg for leg, _ in off]
    if case.tells and all(leg.outcome == on.outcome for leg in alone):  # what others' absence shows is not this fix's
        return say("vacuous", f"fix in and fix out are declared alike, {on.outcome}: that proves nothing")
    for leg, want in off:
        if want.outcome != case.on and want.reason and not re.search(want.reason, leg.evidence):
            return say(
                "unexpected",
                f"{_name(leg)}: {leg.outcome}, but not for the declared reason /{want.reason}/: {_what(leg)}",
            )
        if leg.outcome == "overflow" and (miss := _miscount(case, leg)):
            return say("unexpected", f"{_name(leg)}: {miss}")
    return say("proved", None if case.tells else f"this input cannot tell the fix from its absence: {case.why}")


def _miscount(case: Case, leg: Leg) -> str | None:
    """The sizing formula predicts the stray elements; any other number means that something else wrote."""
    seen = leg.overflow or {}
    if seen.get("lower_bound"):
        return f"at least {seen['observed_elements']} stray elements, to the end of what is watched"
    stray = case.stray_given(leg.facts)
    if stray is None:
        return f"no stray element was predicted, {seen['observed_elements']} were seen"
    if (seen["side"], seen["observed_elements"]) != (stray.side, stray.elements):
        return (
            f"predicted {stray.elements} stray elements {stray.side} the buffer, "
            f"observed {seen['observed_elements']} {seen['side']}"
        )
    return None


def _name(leg: Leg) -> str:
    return f"with {' and '.join(leg.reverted)} out" if leg.reverted else "with every fix in"


def _what(leg: Leg) -> str:
    detail = leg.error
    if leg.overflow:
        detail = f"{leg.overflow['observed_elements']} elements {leg.overflow['side']} a buffer"
    return leg.outcome + (f" ({detail})" if detail else "")
