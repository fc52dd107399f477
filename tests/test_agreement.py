"""The red zone, the guard page and the reference answer as arithmetic says, and a broken one of them is found out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from harness import fixes
from harness.company import Company

ROOT = Path(__file__).parents[1]
NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def agreement() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import agreement

        yield agreement
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def company() -> Iterator[Company]:
    company = Company("cpu", 1)
    yield company
    company.close()


def tallied(agreement: ModuleType, company: Company, cases: list[Any], guards: tuple[str, ...] = ()) -> Any:
    tally = agreement.Tally()
    for case, (said, errors) in zip(cases, agreement.answers(company, cases, guards), strict=True):
        tally.add(case, said, errors)
    return tally


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NO_CUDA)])
def test_forty_cases_are_as_foretold(
    agreement: ModuleType, company: Company, catalogue: fixes.Catalogue, device: str
) -> None:
    company = company if device == "cpu" else Company(device, 1)
    cases = agreement.scenario_cases(company, device, 16, 11) + agreement.touch_cases(device, 24, 11)
    tally = tallied(agreement, company, cases, tuple(fix.guard for fix in catalogue if fix.guard))
    assert tally.failures == [] and tally.cases.total() == 40 and tally.cases["touch"] == 24
    assert tally.agree.total() == 40 and len(tally.agree) > 2 and tally.disagree


GUARD = (
    "import mmap\nfrom harness.memory import GuardPage\nparts = GuardPage._touched\nGuardPage._touched = lambda *of: "
)
PARTS = "for start, stop in parts(*of)]\n"
# what replaces a part of a detector or of the reference -> whose answers are wrong then
BROKEN = {
    "a red zone compares too little": (
        "from harness.memory import RedZone\n"
        "def near(zone):\n"
        "    return replace(zone, data=zone.data[:64] if zone.side == 'after' else zone.data[-64:])\n"
        "RedZone.zones = lambda self: [near(zone) for zone in self._zones]\n",
        "red-zone",
    ),
    "a red zone compares one side": (
        "from harness.memory import RedZone\nRedZone.zones = lambda self: self._zones[1::2]\n",
        "red-zone",
    ),
    "a guard page is mapped one page too far": (f"{GUARD}[(start, stop + mmap.PAGESIZE) {PARTS}", "guard-page"),
    "a guard page is mapped one page too early": (f"{GUARD}[(start - mmap.PAGESIZE, stop) {PARTS}", "guard-page"),
    "a reference compares one buffer": (
        "whole = agreement.compared\nagreement.compared = lambda touch, buffers, out: whole(touch, buffers[:1], out)\n",
        "reference",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_detector_does_not_agree(agreement: ModuleType, company: Company, tmp_path: Path, fault: str) -> None:
    patch, whose = BROKEN[fault]
    module = f"broken_{list(BROKEN).index(fault)}"
    head, tail = "from dataclasses import replace\nimport agreement\n", "touched = agreement.touched\n"
    (tmp_path / f"{module}.py").write_text(head + patch + tail)
    cases = agreement.touch_cases("cpu", 24, 11, entry=f"{module}:touched", ahead=(str(tmp_path),))
    failures = tallied(agreement, company, cases).failures
    assert failures
    for failure in failures:
        differs = {name for name in failure["said"] if failure["said"][name] != failure["foretold"][name]}
        assert differs == {whose}, failure


FLIP = {"make": "zeros", "itemsize": 4, "elements": 5, "zone": 512, "how": "torch", "act": "flip"}
# at, unit, count, what else -> what the red zone, the guard page and the reference say, and what explains disagreement
FORETOLD: dict[str, tuple[int, int, int, dict[str, Any], Any, Any, Any, str]] = {
    "one past": (20, 4, 2, {}, [[0, "after", 2, 0, 4]], "fault", None, "not compared"),
    "a byte past": (25, 1, 1, {}, [[0, "after", 1, 4, 4]], "fault", None, "not compared"),
    "one before": (-4, 4, 1, {}, [[0, "before", 1, -4, -4]], None, None, "first page, not compared"),
    "before its first page": (-4080, 4, 1, {}, None, "fault", None, "beyond the zone, not compared"),
    "at the start of its first page": (-4076, 4, 1, {}, None, None, None, ""),
    "inside": (8, 4, 1, {}, None, None, {"a": 8}, "inside the payload"),
    "into a gap": (4, 4, 1, {"make": "strided"}, None, None, None, ""),
    "over the end": (16, 4, 2, {}, [[0, "after", 1, 0, 0]], "fault", {"a": 16}, ""),
    "the zone's last": (528, 4, 2, {}, [[0, "after", 1, 508, 508]], "fault", None, "not compared"),
    "past the zone": (532, 4, 1, {}, None, "fault", None, "beyond the zone, not compared"),
    "the other buffer": (1 << 16, 4, 1, {}, None, "fault", {"b": 0}, "next allocation"),
    "ahead of the other": ((1 << 16) - 4, 4, 1, {}, [[1, "before", 1, -4, -4]], "fault", None, "not compared"),
    "the same": (20, 4, 1, {"act": "same"}, None, "fault", None, "not compared, same value"),
    "a zone's byte": (20, 1, 1, {"act": "put", "put": 0xD2}, None, "fault", None, "not compared, same value"),
    "not that byte": (21, 1, 1, {"act": "put", "put": 0xD2}, [[0, "after", 1, 0, 0]], "fault", None, "not compared"),
    "undone": (20, 4, 1, {"act": "undone"}, None, "fault", None, "not compared, undone"),
    "a read": (20, 4, 1, {"act": "read"}, None, "fault", {"out": 0}, "a read"),
    "a read before": (-4, 4, 1, {"act": "read"}, None, None, {"out": 0}, "a read, first page"),
    "a read unused": (20, 4, 1, {"act": "read unused"}, None, "fault", None, "a read, read for nothing"),
    "a read where it should be": (8, 4, 1, {"act": "read", "wanted": 8}, None, None, None, ""),
    "no elements": (20, 4, 1, {"make": "nothing"}, None, None, None, ""),
}
UNSEEN = ("at the start of its first page", "into a gap")


@pytest.mark.parametrize("name", FORETOLD)
def test_what_is_foretold(agreement: ModuleType, name: str) -> None:
    at, unit, count, more, *said, boundaries = FORETOLD[name]
    foretold = agreement.foretell(agreement.Touch(**{**FLIP, "at": at, "unit": unit, "count": count, **more}), "cpu")
    assert [foretold.said[each] for each in agreement.NAMES] == said
    assert ", ".join(sorted(set().union(*foretold.why.values()))) == boundaries
    assert all(len(names) == 1 for names in foretold.why.values())
    assert bool(foretold.unseen) == (name in UNSEEN)


def test_every_boundary_is_drawn_and_each_is_in_the_docs(agreement: ModuleType) -> None:
    drawn = {
        reason for _, told in islice(agreement.touches(0, "cpu"), 2000) for why in told.why.values() for reason in why
    }
    assert drawn == set(agreement.BOUNDARIES)
    text = (ROOT / "docs" / "detectors.md").read_text()
    for name, sentence in agreement.BOUNDARIES.items():
        assert f"| {name} | {sentence} |" in text, name


SEEN = {"red-zone": "a hit", "guard-page": "fault", "reference": None, "refused": None}
BLIND = {("red-zone", "reference"): {"not compared"}, ("guard-page", "reference"): {"not compared"}}
# what is foretold, with the boundaries -> what is said, and whether that is well
JUDGED = {
    "as foretold": (SEEN, BLIND, SEEN, True),
    "a disagreement that is not foretold": ({**SEEN, "reference": "wrong"}, {}, SEEN, False),
    "a disagreement that does not come": (SEEN, BLIND, {**SEEN, "reference": "wrong"}, False),
    "a disagreement without its boundary": (SEEN, {("guard-page", "reference"): {"not compared"}}, SEEN, False),
    "no boundary": (SEEN, {**BLIND, ("red-zone", "reference"): set()}, SEEN, False),
    "two boundaries": (SEEN, {**BLIND, ("red-zone", "reference"): {"not compared", "undone"}}, SEEN, False),
    "something else is seen": (SEEN, BLIND, {**SEEN, "red-zone": "another hit"}, False),
    "refused": (SEEN, BLIND, {**SEEN, "refused": "error"}, False),
}


@pytest.mark.parametrize("name", JUDGED)
def test_only_what_is_foretold_to_the_letter_passes(agreement: ModuleType, name: str) -> None:
    foretold, why, said, well = JUDGED[name]
    tally = agreement.Tally()
    case = agreement.Case("touch", 1, {}, (None, None), agreement.Foretold(foretold, why))
    tally.add(case, said, "")
    assert (tally.failures == []) == well == (tally.disagree.total() == 2)
