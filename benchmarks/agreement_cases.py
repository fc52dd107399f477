"""Random cases with their legs, and what is foretold of each: touches, and shapes of the draft and store scenarios."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agreement_model import NAMES, PAGE, Foretold, disagreeing, touches

from harness import fixes
from harness.company import Company
from harness.errors import InfraError
from harness.prover import Prover
from harness.sandbox import Request
from harness.sweep import draw
from regressions import strategies
from regressions.scenarios import draft

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Case:
    kind: str  # "touch", or the fix
    number: int  # of its kind: the same for a seed
    shown: Any  # JSON-ready
    legs: tuple[Request, Request]  # under the red zone, under the guard page
    foretold: Foretold
    dies: bool = False  # of a guard in a kernel


def touch_cases(
    device: str, count: int, seed: int, *, entry: str = "agreement_legs:touched", ahead: Sequence[str] = ()
) -> list[Case]:
    """``ahead``: in front of the import path of a leg that has another entry."""
    path = (*ahead, str(ROOT / "benchmarks"), str(ROOT), str(ROOT / "kernels"))
    cases = []
    for number, (touch, foretold) in zip(range(count), touches(seed, device), strict=False):
        shown = dataclasses.asdict(touch)
        legs = [Request(entry, {"touch": shown, "detector": each}, device, path) for each in NAMES[:2]]
        cases.append(Case("touch", number, shown, (legs[0], legs[1]), foretold))
    return cases


def scenario_cases(company: Company, device: str, count: int, seed: int) -> list[Case]:
    """That many shapes, no two alike, as many of stores as of drafts, each with a random one of its legs."""

    catalogue = fixes.load(ROOT / "toggles")
    prover = Prover(catalogue, device=device, root=ROOT, servers=company)
    _ = prover.environment  # asked for here, and not as if it were a case's leg
    store = "27486:slot-assert"
    sizes = {store: (count + 1) // 2, **_shared_out(count // 2, list(draft.BACKEND_OF))}
    choose, cases = random.Random(seed), []
    for name, wanted in sizes.items():
        space = strategies.space(name, catalogue.fix(name).scenario, device)
        assert space is not None
        drawn = draw(space.options, 2 * wanted, seed) if wanted else []  # some come twice
        distinct = {json.dumps(options): options for options in drawn}
        for number, options in enumerate(list(distinct.values())[:wanted]):
            case = space.swept(options)
            with company.noting() as noted:
                result = prover.prove(name, case)
            selections = [(), *catalogue.fix(name).legs_out_ids]
            if len(noted) != len(selections):
                raise InfraError(f"{name} on {case.id}: {result.verdict.reason}")
            out, request = choose.choice([*zip(selections, noted, strict=True), (selections[-1], noted[-1])])
            made = _foretell_store if name == store else _foretell_draft
            foretold = made(dict(case.params), set(out), device)
            legs = [dataclasses.replace(request, detector=each, shared=False) for each in NAMES[:2]]
            shown = {"out": list(out), "case": case.id, "params": dict(case.params)}
            dies = space.kills and foretold.said["refused"] == "guarded"
            cases.append(Case(name, number, shown, (legs[0], legs[1]), foretold, dies))
    return cases


def _shared_out(count: int, names: list[str]) -> dict[str, int]:
    return {name: count // len(names) + (at < count % len(names)) for at, name in enumerate(names)}


def _foretell_draft(params: dict[str, Any], out: set[str], device: str) -> Foretold:
    """Rows are adjacent, so of all the last one's excess leaves the buffer; what a row lacks, the reference misses."""

    shape = draft.Shape(**params)
    over = shape.used - (shape.narrow if out & set(draft.SIZE_FIXES) else shape.wide)
    refused = "guarded" if over > 0 and draft.GUARDS[shape.backend] not in out else None
    strays = over > 0 and not refused
    said = {"red-zone": [["after", over]], "guard-page": "fault", "reference": "wrong"}
    return Foretold({name: answer if strays else None for name, answer in said.items()} | {"refused": refused})


def _foretell_store(params: dict[str, Any], out: set[str], device: str) -> Foretold:
    """A row of K and one of V for each slot that is out of bounds; only what is in bounds is compared."""
    row, limit = params["row_bytes"], params["num_slots"] + params["page_size"]
    bad = {slot for slot in params["slots"] if not 0 <= slot < limit}
    refused = "error" if row % 4 else "guarded" if bad and not out else None
    strays = set() if refused else bad
    sides = {"before": sum(slot < 0 for slot in strays), "after": sum(slot >= limit for slot in strays)}
    hits = [[side, rows * row // 4] for side, rows in sides.items() if rows] * 2
    slack = -(limit * row) % PAGE[device]
    faults = any(slot >= limit or slot * row < -slack for slot in strays)
    said = {"red-zone": hits or None, "guard-page": "fault" if faults else None, "reference": None}
    boundary = {"guard-page": "first page", "reference": "not compared"}
    why = {(one, other): {boundary[other]} for one, other in disagreeing(said)}
    return Foretold(said | {"refused": refused}, why)
