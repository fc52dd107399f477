"""What the tests say of a fix: with it out for a whole session, its own must fail and all others must pass.

Each test is heard twice: in the baseline, where nothing is out, and in the session of a fix. What must come of it is
read off the baseline's legs, which have shown and been judged on what the toggle file and the case declare.

    own         the test is about this fix and its input tells; or it declares a leg that changes its outcome when this
                fix is out, too (a size's test sees its guard go)
    neighbour   not its own, but a leg of one of the two fixes has both out: it may fail (where the size is gone, the
                guard refuses what used to fit)
    other       everything else, inputs that can't tell among them

and what did come of it:

    caught      own, and fails: every leg of the session does what is declared for what is out in it
    missed      own, and passes, or fails in another way than declared
    noticed     a neighbour's, and fails as declared
    collateral  any other test that does not pass
    quiet       passes, as it must
    skipped     was skipped in the baseline, too: says nothing
    infra       the machine's fault: says nothing, and nothing is proved

A leg does what is declared if it equals the baseline's leg with the same fixes out; or if the toggle file of the fix
declares such a leg and it has that outcome, for that reason; or if nobody declares one and it is as if the fix were in.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.fixes import Fix

KINDS = ("caught", "missed", "noticed", "collateral", "quiet", "skipped", "infra")
Leg = Mapping[str, Any]  # as the JSON contract has it
Legs = dict[frozenset[str], Leg]  # by the fixes that are out


@dataclass(frozen=True)
class Heard:
    """What one test said in one session."""

    outcome: str  # pytest's: passed, failed or skipped
    why: str = ""  # one line, where it did not pass
    record: Mapping[str, Any] | None = None  # the case that it proved, as the JSON contract has it


@dataclass(frozen=True)
class Cell:
    """What one test's word in the session of one fix amounts to."""

    kind: str
    why: str = ""


@dataclass(frozen=True)
class Row:
    """The session of one fix: a row of the kill matrix."""

    fix: str
    cells: Mapping[str, Cell]  # by test

    def tests(self, *kinds: str) -> list[str]:
        """The tests that came out as one of these kinds."""
        return [test for test, cell in self.cells.items() if cell.kind in kinds]

    @property
    def ok(self) -> bool:
        """Something caught it, and nothing is amiss."""
        return bool(self.tests("caught")) and not self.tests("missed", "collateral", "infra")


def red(tests: Mapping[str, Heard]) -> dict[str, str]:
    """The tests that are not right with nothing out, and why: a session with a fix out would say nothing then."""
    return {
        test: said
        for test, heard in tests.items()
        if (said := _unproved(heard)) or (heard.outcome == "failed" and (said := heard.why or "failed"))
    }


def _unproved(heard: Heard) -> str:
    """A verdict of another kind, which a test that swallows failures may hide."""
    record = heard.record or {"verdict": "proved"}
    return "" if record["verdict"] in ("proved", "skipped") else f"{record['verdict']}: {record['reason']}"


def tellers(fix: str, tests: Mapping[str, Heard]) -> list[str]:
    """The tests that are about a fix, on an input that tells it from its absence."""
    return [
        test for test, heard in tests.items() if heard.record and heard.record["fix"] == fix and heard.record["tells"]
    ]


def row(fix: Fix, device: str, baseline: Mapping[str, Heard], session: Mapping[str, Heard]) -> Row:
    """Judge the session of one fix. Both have heard the same tests."""
    return Row(fix.id, {test: _cell(fix, device, heard, session[test]) for test, heard in baseline.items()})


def _cell(fix: Fix, device: str, before: Heard, after: Heard) -> Cell:
    if before.outcome == "skipped" and after.outcome == "skipped":
        return Cell("skipped")
    own = before.record is not None and _is_own(fix.id, before.record)
    if after.outcome == "passed":
        return Cell("missed", f"passes with {fix.id} out") if own else Cell("quiet")
    why = (after.record or {}).get("reason") or after.why or after.outcome
    if (after.record or {}).get("verdict") == "infra":
        return Cell("infra", why)
    if before.record is None or after.record is None or after.outcome == "skipped":
        return Cell("missed" if own else "collateral", why)
    stray = _stray(fix, device, before.record, after.record)
    if own:
        return Cell("missed", f"fails, but {stray}") if stray else Cell("caught", why)
    if not _together(fix, before.record):
        return Cell("collateral", why)
    return Cell("collateral", f"{why}; {stray}") if stray else Cell("noticed", why)


def _is_own(fix: str, record: Mapping[str, Any]) -> bool:
    if record["fix"] == fix and record["tells"]:
        return True
    legs = _legs(record)
    return any(
        fix not in out and (more := legs.get(out | {fix})) and more["outcome"] != leg["outcome"]
        for out, leg in legs.items()
    )


def _together(fix: Fix, record: Mapping[str, Any]) -> bool:
    declared = [*map(set, fix.legs_out_ids), *_legs(record)]
    return any({fix.id, record["fix"]} <= out for out in declared) and record["fix"] != fix.id


def _stray(fix: Fix, device: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Which leg of the session does something that nobody declares; "" for none."""
    known = _legs(before)
    if before["fix"] == fix.id and before["tells"] and frozenset({fix.id}) not in known:
        return f"no leg with only {fix.id} out is declared"
    for leg in after["legs"]:
        out = frozenset(leg["reverted"])
        if out in known:
            if _what(leg) != _what(known[out]):
                return f"with {' and '.join(sorted(out))} out it is {_say(leg)}; declared and shown: {_say(known[out])}"
        elif not _declares(fix, device, out, leg) and _what(leg) != _what(known.get(out - {fix.id}, {})):
            return f"with {' and '.join(sorted(out))} out it is {_say(leg)}, which nothing declares"
    return "" if after["legs"] else f"no leg ran: {after['reason']}"


def _declares(fix: Fix, device: str, out: frozenset[str], leg: Leg) -> bool:
    for ids, entry in zip(fix.legs_out_ids, fix.legs, strict=True):
        if out == set(ids) and leg["outcome"] == entry.outcome_on(device):
            said = "\n".join([leg.get("error", ""), *leg.get("overflow", {}).get("buffers", ())])
            return re.search(entry.reason or "", said) is not None
    return False


def _legs(record: Mapping[str, Any]) -> Legs:
    return {frozenset(leg["reverted"]): leg for leg in record["legs"]}


def _what(leg: Leg) -> tuple[Any, ...]:
    """What a leg did and why, without what differs from run to run."""
    over = leg.get("overflow") or {}
    counted = [over.get(name) for name in ("side", "predicted_elements", "observed_elements", "buffers")]
    return leg.get("outcome"), leg.get("error", ""), *counted


def _say(leg: Leg) -> str:
    over = leg.get("overflow")
    detail = f"{over['observed_elements']} elements {over['side']} a buffer" if over else leg.get("error")
    return leg["outcome"] + (f" ({detail})" if detail else "")


def by_function(row: Row, *kinds: str) -> dict[str, tuple[int, int]]:
    """For each test function with a case of these kinds: how many of its cases are, and how many it has."""
    all_of = Counter(function(test) for test in row.cells)
    return {name: (n, all_of[name]) for name, n in Counter(map(function, row.tests(*kinds))).items()}


def idle(rows: Sequence[Row]) -> list[str]:
    """The test functions that no fix's absence has made fail."""
    functions = dict.fromkeys(function(test) for row in rows for test in row.cells)
    woken = {function(test) for row in rows for test in row.tests("caught", "noticed", "collateral")}
    skipped = {function(test) for row in rows for test in row.tests("skipped")}
    return [name for name in functions if name not in woken | skipped]


def function(test: str) -> str:
    """A test's name without its case."""
    return test.partition("[")[0]
