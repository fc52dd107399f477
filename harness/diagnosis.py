"""A diagnosis: what the findings about one fix amount to, in one word and one sentence.

    gone         its reversal no longer applies, and with every fix in a case of its own does what it must without it
    regressed    its text is there, and with every fix in a case does not do what it must
    stale        its reversal no longer applies, and with every fix in its own cases do what they must
    rotted       its reversal no longer applies, and no leg tells whether the fix still works
    unexpected, vacuous, not-reached, infra    as the verdict of that name
    unproved     no finding, and no case told it from its absence

Only a case about a fix can tell whether that fix is at work; a neighbour's case, which blames it, can't.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Record = Mapping[str, Any]

MEANS = {
    "gone": "The fix is gone: its reversal no longer applies, and with every fix in the bug is back.",
    "regressed": "With every fix in, it does not do what it must: the fix no longer works, or something broke it.",
    "stale": "The fix still works. Its toggle file is stale: the reversal no longer fits the source. Until that is "
    "updated, nothing is proved.",
    "rotted": "The reversal no longer applies, and no leg tells whether the fix still works.",
    "unexpected": "Taken out, it fails in another way than declared.",
    "vacuous": "Taking it out changes nothing: no test would notice if it went.",
    "not-reached": "The reverted code never ran, so that nothing was tried.",
    "infra": "The machine failed, not the code: nothing was learnt.",
    "unproved": "No case told it from its absence.",
}
WORDS = {
    "gone": "Fix gone", "regressed": "Regressed", "stale": "Toggle rotted", "rotted": "Rotted",
    "unexpected": "Unexpected", "vacuous": "Vacuous", "not-reached": "Not reached", "infra": "Nothing learnt",
    "unproved": "Not proved",
}  # fmt: skip
_FINE = ("proved", "skipped")


@dataclass(frozen=True)
class Diagnosis:
    kind: str
    fix: str
    cases: int
    sentence: str
    detail: str  # what the most frequent of its findings says, in one line

    @property
    def word(self) -> str:
        return WORDS.get(self.kind, self.kind.capitalize())

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("kind", "fix", "cases", "sentence", "detail")}


def is_finding(record: Record) -> bool:
    return record["verdict"] not in _FINE


def diagnose(records: Sequence[Record]) -> list[Diagnosis]:
    """One for each fix that is to blame for a finding or was never proved, the worst first."""
    found = [_of(fix, records) for fix in sorted({record["blames"] for record in records if is_finding(record)})]
    blamed = {each.fix for each in found}
    for fix in sorted({record["fix"] for record in records} - blamed):
        own = [record for record in records if record["fix"] == fix]
        if not any(record["verdict"] == "proved" and record["tells"] for record in own):
            if any(is_finding(record) for record in own):
                continue  # a neighbour is to blame
            why = "; ".join(dict.fromkeys(record["reason"] or "" for record in own))
            found.append(Diagnosis("unproved", fix, len(own), MEANS["unproved"], why))
    order = list(MEANS)
    return sorted(found, key=lambda each: (order.index(each.kind) if each.kind in order else len(order), each.fix))


def _of(fix: str, records: Iterable[Record]) -> Diagnosis:
    rows = [record for record in records if is_finding(record) and record["blames"] == fix]
    own = [row for row in rows if row["fix"] == fix]
    kind = _kind(own, {row["verdict"] for row in rows})
    shown = [row for row in own if row["verdict"] == kind] or own or rows
    detail = Counter(row["reason"] or "" for row in shown).most_common(1)[0][0]
    if any(row["verdict"] == "rotted" for row in rows) and (told := _told(own)):
        detail = f"{told}. {detail}"
    return Diagnosis(kind, fix, len(rows), MEANS.get(kind, ""), detail)


def _kind(own: Sequence[Record], verdicts: set[str]) -> str:
    if "rotted" in verdicts:
        seen = {_shows(row) for row in own} - {""}
        return "gone" if "gone" in seen else "stale" if seen == {"stale"} else "rotted"
    return next((kind for kind in MEANS if kind in verdicts), sorted(verdicts)[0])


def _shows(row: Record) -> str:
    """What the leg with every fix in says of a fix whose reversal rotted: ``gone``, ``stale`` or "rotted" for neither.

    "" for an input that can't tell.
    """
    if not row["tells"]:
        return ""
    if "on" not in row or not row["legs"] or row["legs"][0]["reverted"]:
        return "rotted"
    outcome = row["legs"][0]["outcome"]
    return "stale" if outcome == row["on"] else "gone" if outcome in row["expected"] else "rotted"


def _told(rows: Sequence[Record]) -> str:
    """What the cases of a fix whose reversal rotted do with every fix in."""
    said = Counter(
        (row["on"], row["legs"][0]["outcome"]) for row in rows if row["legs"] and row["tells"] and "on" in row
    )
    pairs = [
        f"{n} {is_}" if is_ == must else f"{n} {is_} where {must} is declared" for (must, is_), n in said.most_common()
    ]
    return f"With every fix in: {', '.join(pairs)}" if pairs else ""
