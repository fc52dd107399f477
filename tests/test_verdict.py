"""Verdicts from made-up legs: every verdict and every precedence is a row."""

from __future__ import annotations

import pytest

from harness.case import Case, Stray
from harness.outcome import Leg
from harness.verdict import VERDICTS, Expected, judge

FIX = "1:size"


def leg(outcome, *out, stray=None, side="after", end=False, **more):
    overflow = {"side": side, "observed_elements": stray, "lower_bound": end} if stray is not None else None
    return Leg(reverted=out, outcome=outcome, seconds=0.1, overflow=overflow, **more)


def case(**more):
    return Case(**{"id": "c", "entry": "m:f", "params": {}, "stray": Stray("after", 2), **more})


ON = leg("clean")
GUARDED = leg("guarded", FIX, evidence="row too small: 10 of 8", error="AssertionError: row too small")
OVER = leg("overflow", FIX, "1:guard", stray=2, evidence="self.kv_indices")
WANT = (Expected("guarded", "too small"), Expected("overflow", "kv_indices"))
BLIND = case(tells=False, why="it fits both ways", stray=None)
REFUSED = case(on="guarded", reason={frozenset(): "=8 .*= 4"})
TARGET = {"targets": ("pkg.f", "pkg.g")}

# legs, what they must show, the case -> verdict, a part of the reason
ROWS = {
    "as declared": ([ON, GUARDED, OVER], WANT, case(), "proved", ""),
    "cannot tell": ([ON, leg("clean", FIX)], [Expected("clean")], BLIND, "proved", "cannot tell"),
    "cannot tell, and yet it does": (
        [ON, leg("guarded", FIX)],
        *([Expected("clean")], BLIND, "unexpected", "must be clean, is guarded"),
    ),
    "refused, with the right numbers": (
        [leg("guarded", evidence="got =8 for = 4"), leg("error", FIX)],
        *([Expected("error")], REFUSED, "proved", ""),
    ),
    "refused, with wrong numbers": (
        [leg("guarded", evidence="got =8 for = 5"), leg("error", FIX)],
        *([Expected("error")], REFUSED, "regressed", "not for the reason"),
    ),
    "fix in: overflow": (
        [leg("overflow", stray=2), GUARDED, OVER],
        *(WANT, case(), "regressed", "must be clean, is overflow (2 elements after a buffer)"),
    ),
    "fix in: wrong": ([leg("wrong", error="x[0]"), GUARDED, OVER], WANT, case(), "regressed", "wrong (x[0])"),
    "fix in: no guard": (
        [leg("clean"), leg("overflow", FIX, stray=2)],
        *([Expected("overflow")], case(on="guarded"), "regressed", "must be guarded, is clean"),
    ),
    "first leg out as fix in": ([ON, leg("clean", FIX), OVER], WANT, case(), "vacuous", "must be guarded, is clean"),
    "last leg out as fix in": ([ON, GUARDED, leg("clean", FIX)], WANT, case(), "vacuous", "must be overflow"),
    "another outcome": ([ON, GUARDED, leg("crashed", FIX)], WANT, case(), "unexpected", "must be overflow, is crashed"),
    "another reason": (
        [ON, leg("guarded", FIX, evidence="out of slots"), OVER],
        *(WANT, case(), "unexpected", "declared reason /too small/"),
    ),
    "another buffer": (
        [ON, GUARDED, leg("overflow", FIX, stray=2, evidence="self.other")],
        *(WANT, case(), "unexpected", "declared reason /kv_indices/"),
    ),
    "too few elements": (
        [ON, GUARDED, leg("overflow", FIX, stray=1, evidence="kv_indices")],
        *(WANT, case(), "unexpected", "predicted 2 stray elements after the buffer, observed 1 after"),
    ),
    "the other side": (
        [ON, GUARDED, leg("overflow", FIX, stray=2, side="before", evidence="kv_indices")],
        *(WANT, case(), "unexpected", "observed 2 before"),
    ),
    "another layout, with its own number": (
        [ON, GUARDED, leg("overflow", FIX, stray=1, evidence="kv_indices", facts={"layout": "joint"})],
        *(WANT, case(stray_in={"joint": Stray("after", 1)}), "proved", ""),
    ),
    "another layout, with the number of the first": (
        [ON, GUARDED, leg("overflow", FIX, stray=2, evidence="kv_indices", facts={"layout": "joint"})],
        *(WANT, case(stray_in={"joint": Stray("after", 1)}), "unexpected", "predicted 1 stray"),
    ),
    "the right number, to the end of what is watched": (
        [ON, GUARDED, leg("overflow", FIX, stray=2, end=True, evidence="kv_indices")],
        *(WANT, case(), "unexpected", "at least 2 stray elements"),
    ),
    "no number predicted": ([ON, GUARDED, OVER], WANT, case(stray=None), "unexpected", "2 were seen"),
    "never entered": (
        [ON, leg("guarded", FIX, reached=("pkg.f",), **TARGET), OVER],
        *(WANT, case(), "not-reached", "never entered pkg.g"),
    ),
    "entered all": (
        [ON, leg("guarded", FIX, evidence="too small", reached=("pkg.g", "pkg.f"), **TARGET), OVER],
        *(WANT, case(), "proved", ""),
    ),
    "need not be entered": (
        [leg("error"), leg("error", FIX, **TARGET)],
        *([Expected("error")], case(on="error", reaches=False, tells=False, why="refused"), "proved", "cannot tell"),
    ),
    "the machine, fix in": ([leg("error", infra="no memory"), GUARDED, OVER], WANT, case(), "infra", "every fix in"),
    "the machine, fix out": (
        [ON, GUARDED, leg("error", FIX, "1:guard", infra="no memory")],
        *(WANT, case(), "infra", "1:size and 1:guard out: no memory"),
    ),
    "too slow": ([ON, leg("hung", FIX, error="did not end"), OVER], WANT, case(), "infra", "did not end"),
    "slow as declared": ([ON, leg("hung", FIX)], [Expected("hung")], case(stray=None), "proved", ""),
    # which comes first
    "infra before not-reached": (
        [ON, leg("error", FIX, infra="lost", **TARGET), OVER],
        *(WANT, case(), "infra", "lost"),
    ),
    "infra before regressed": (
        [leg("wrong"), leg("error", FIX, infra="lost"), OVER],
        *(WANT, case(), "infra", "lost"),
    ),
    "not-reached before vacuous": ([ON, leg("clean", FIX, **TARGET), OVER], WANT, case(), "not-reached", "pkg.f"),
    "regressed before not-reached": (
        [leg("wrong"), leg("clean", FIX, **TARGET), OVER],
        WANT,
        case(),
        "regressed",
        "",
    ),
    "regressed before vacuous": ([leg("wrong"), leg("wrong", FIX), OVER], WANT, case(), "regressed", "must be clean"),
    "its own absence in another's only": (
        [ON, leg("overflow", FIX, "1:guard", stray=2)],
        *([Expected("overflow")], case(), "proved", ""),
    ),
    # a declaration that asks for no difference proves nothing, whoever wrote it
    "no leg declared": ([ON], [], case(), "vacuous", "no leg with this fix out is declared"),
    "what another's absence shows": (
        [ON, leg("clean", FIX), leg("overflow", "1:guard", stray=2)],
        *([Expected("clean"), Expected("overflow")], case(), "vacuous", "declared alike, clean"),
    ),
    "declared equal": ([ON, leg("clean", FIX)], [Expected("clean")], case(), "vacuous", "clean"),
    "declared equal, both guarded": (
        [leg("guarded", evidence="=8 = 4"), leg("guarded", FIX)],
        *([Expected("guarded")], REFUSED, "vacuous", "guarded"),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_verdict(name):
    legs, expected, its_case, kind, part = ROWS[name]
    verdict = judge(FIX, its_case, legs, expected)
    assert (verdict.kind, verdict.fix) == (kind, FIX)
    assert part in (verdict.reason or "")
    assert (verdict.reason is None) == (kind == "proved" and its_case.tells)


def test_every_verdict_of_a_leg_has_a_row():
    # these two are found while planning: tests/test_prover.py
    assert {row[3] for row in ROWS.values()} == set(VERDICTS) - {"rotted", "skipped"}


def test_a_leg_without_a_declaration_is_an_error():
    with pytest.raises(ValueError):
        judge(FIX, case(), [ON, GUARDED, OVER], WANT[:1])
