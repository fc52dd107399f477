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
SEED = 46  # its 24 touches reach both ends of a zone, the pages around a payload, and either buffer
NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def agreement() -> Iterator[ModuleType]:
    before = list(sys.path)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import agreement

        yield agreement
    finally:
        sys.path[:] = before


@pytest.fixture(scope="module")
def model(agreement: ModuleType) -> ModuleType:
    return sys.modules["agreement_model"]


@pytest.fixture(scope="module")
def cases(agreement: ModuleType) -> ModuleType:
    return sys.modules["agreement_cases"]


@pytest.fixture(scope="module")
def companies() -> Iterator[dict[str, Company]]:
    """One for each device; their servers start as they are first used."""
    made = {device: Company(device, 1) for device in ("cpu", "cuda")}
    yield made
    for company in made.values():
        company.close()


def tallied(agreement: ModuleType, company: Company, cases: list[Any], guards: tuple[str, ...] = ()) -> Any:
    tally = agreement.Tally()
    for case, (said, errors) in zip(cases, agreement.answers(company, cases, guards), strict=True):
        tally.add(case, said, errors)
    return tally


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NO_CUDA)])
def test_forty_cases_are_as_foretold(
    agreement: ModuleType, companies: dict[str, Company], catalogue: fixes.Catalogue, device: str
) -> None:
    company = companies[device]
    cases = agreement.scenario_cases(company, device, 16, SEED) + agreement.touch_cases(device, 24, SEED)
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
        "whole = agreement_legs.compared\n"
        "agreement_legs.compared = lambda touch, buffers, out: whole(touch, buffers[:1], out)\n",
        "reference",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_detector_does_not_agree(
    agreement: ModuleType, companies: dict[str, Company], tmp_path: Path, fault: str
) -> None:
    patch, whose = BROKEN[fault]
    module = f"broken_{list(BROKEN).index(fault)}"
    head, tail = "from dataclasses import replace\nimport agreement_legs\n", "touched = agreement_legs.touched\n"
    (tmp_path / f"{module}.py").write_text(head + patch + tail)
    cases = agreement.touch_cases("cpu", 24, SEED, entry=f"{module}:touched", ahead=(str(tmp_path),))
    failures = tallied(agreement, companies["cpu"], cases).failures
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
    "the back zone's last byte": (531, 1, 1, {}, [[0, "after", 1, 508, 508]], "fault", None, "not compared"),
    "the front zone's first": (-512, 1, 1, {}, [[0, "before", 1, -512, -512]], None, None, "first page, not compared"),
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
def test_what_is_foretold(agreement: ModuleType, model: ModuleType, name: str) -> None:
    at, unit, count, more, *said, boundaries = FORETOLD[name]
    foretold = model.foretell(model.Touch(**{**FLIP, "at": at, "unit": unit, "count": count, **more}), "cpu")
    assert [foretold.said[each] for each in agreement.NAMES] == said
    assert ", ".join(sorted(set().union(*foretold.why.values()))) == boundaries
    assert all(len(names) == 1 for names in foretold.why.values())
    assert bool(foretold.unseen) == (name in UNSEEN)


STORE = {"row_bytes": 256, "num_slots": 6, "page_size": 2, "slots": [0, 7]}
BEFORE, AFTER = ["before", 64], ["after", 64]
OUT = {"27486:slot-assert"}
# of a cache of 2048 bytes: slots, what else, what is out -> the red zone, the guard page, how it is refused
STORES: dict[str, tuple[list[int], dict[str, int], set[str], Any, Any, Any]] = {
    "in bounds": ([0, 7], {}, OUT, None, None, None),
    "in the first page": ([-8], {}, OUT, [BEFORE] * 2, None, None),
    "ahead of it": ([-9], {}, OUT, [BEFORE] * 2, "fault", None),
    "right ahead of a whole page": ([-1], {"row_bytes": 512}, OUT, [["before", 128]] * 2, "fault", None),
    "past the end, twice the same": ([8, 8], {}, OUT, [AFTER] * 2, "fault", None),
    "on both sides": ([-1, 8], {}, OUT, [BEFORE, AFTER] * 2, "fault", None),
    "refused by the guard": ([8], {}, set(), None, None, "guarded"),
    "a row of six bytes": ([8], {"row_bytes": 6}, OUT, None, None, "error"),
}


@pytest.mark.parametrize("name", STORES)
def test_what_is_foretold_of_stores(cases: ModuleType, name: str) -> None:
    slots, more, out, red, guard, refused = STORES[name]
    foretold = cases._foretell_store({**STORE, **more, "slots": slots}, out, "cpu")
    assert foretold.said == {"red-zone": red, "guard-page": guard, "reference": None, "refused": refused}


DRAFT = {"backend": "flashinfer", "path": "cuda_graph", "topk": 2, "num_steps": 3, "page_size": 1, "max_bs": 2}
SIZE, BOTH = {"27338:topk-factor"}, {"27338:topk-factor", "27338:capacity-assert"}
# two requests of that length in a context of 8: 4 * (length + 3) elements of 16 without the factor, of 32 with it
DRAFTS: dict[str, tuple[int, set[str], int, str | None]] = {  # length, what is out -> elements that are stray, refusal
    "fits": (1, BOTH, 0, None),
    "one step too far": (2, BOTH, 4, None),
    "refused": (2, SIZE, 0, "guarded"),
    "fits with the factor": (5, set(), 0, None),
    "too long for a right row": (6, {"27338:capacity-assert"}, 4, None),
}


@pytest.mark.parametrize("name", DRAFTS)
def test_what_is_foretold_of_drafts(cases: ModuleType, name: str) -> None:
    length, out, stray, refused = DRAFTS[name]
    foretold = cases._foretell_draft({**DRAFT, "max_context_len": 8, "seq_lens": [length] * 2}, out, "cpu")
    red, fault, wrong = ([["after", stray]], "fault", "wrong") if stray else (None, None, None)
    assert foretold.said == {"red-zone": red, "guard-page": fault, "reference": wrong, "refused": refused}


def test_every_boundary_is_drawn_and_each_is_in_the_docs(agreement: ModuleType, model: ModuleType) -> None:
    drawn = {reason for _, told in islice(model.touches(0, "cpu"), 2000) for why in told.why.values() for reason in why}
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
def test_only_what_is_foretold_to_the_letter_passes(agreement: ModuleType, model: ModuleType, name: str) -> None:
    foretold, why, said, well = JUDGED[name]
    tally = agreement.Tally()
    case = agreement.Case("touch", 1, {}, (None, None), model.Foretold(foretold, why))
    tally.add(case, said, "")
    assert (tally.failures == []) == well == (tally.disagree.total() == 2)
