"""Do the detectors agree? `python benchmarks/agreement.py [--cases 1000] [--seed 0] [--device cuda] [--json FILE]`.

Each random case runs under the red zone and under the guard page, and what it computes is compared with a reference:

    draft, store  shapes of regressions/strategies.py, with the fix or its guard in or out; no rows of gigabytes
    touch         a kernel of this file's own, in eager torch (CPU) or Triton, that reads or writes a few bytes at a
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
import ctypes
import dataclasses
import json
import mmap
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch.overrides import TorchFunctionMode

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks")]

import record  # noqa: E402

from harness import memory, outcome  # noqa: E402
from harness.company import Company, key  # noqa: E402
from harness.device import resolve_device  # noqa: E402
from harness.errors import InfraError  # noqa: E402
from harness.memory.guard_page import _CudaBytes  # noqa: E402
from harness.memory.watch import Zone  # noqa: E402
from harness.sandbox import Request  # noqa: E402

BOUNDARIES = {  # why one does not see what another does
    "a read": "The red zone compares what was written; a read leaves no trace in it.",
    "same value": "A write of the value that stands there changes nothing that could be compared.",
    "undone": "A write that is undone before the check leaves nothing to compare.",
    "beyond the zone": "A write past the zone meets memory that the red zone does not watch.",
    "next allocation": "A write past the zone may land in another payload, and the red zone compares no payload.",
    "inside the payload": "An access inside its own payload meets neither a zone nor a guard.",
    "first page": "Ahead of a payload the rest of its first page is mapped, and the guard page sees nothing there.",
    "not compared": "The reference compares results, and no memory outside of them.",
    "read for nothing": "A stray read whose value is used nowhere, or is the right one, leaves the result right.",
}
NAMES = ("red-zone", "guard-page", "reference")
FAR = {"cpu": 1 << 33, "cuda": 1 << 24}  # bytes on either side of the buffers that are the case's own, at least
PITCH = 1 << 16  # from one buffer of a case to the next, under the red zone
PAGE = {"cpu": mmap.PAGESIZE, "cuda": 1 << 21}  # what a guard page maps at least
UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MAKES: dict[str, Callable[..., torch.Tensor]] = {
    "zeros": lambda count, **kw: torch.zeros(count, **kw),
    "empty": lambda count, **kw: torch.empty(count, **kw),
    "full": lambda count, **kw: torch.full((count,), 7, **kw),
    "tensor": lambda count, **kw: torch.tensor([3] * count, **kw),
    "scalar": lambda count, **kw: torch.zeros((), **kw),
    "strided": lambda count, **kw: torch.empty_strided((count,), (3,), **kw),
}
STALE_VALUES = (0, 1, 255, *(byte for pair in Zone.PATTERNS.values() for byte in pair))  # that a zone may hold, too
AGREE_BLIND = "none sees what is stray"
ROUND = 100  # cases between two writes of the JSON
Said = dict[str, Any]  # what each of NAMES saw, None for nothing; and how the case was "refused", None where it ran


@dataclass(frozen=True)
class Foretold:
    """What the model says of a case."""

    said: Said
    why: dict[tuple[str, str], set[str]] = field(default_factory=dict)  # (who sees, who doesn't) -> boundaries
    unseen: str = ""  # where none sees an access that is stray: what keeps each of them from it

    @property
    def faults(self) -> bool:
        return self.said["guard-page"] is not None


@dataclass(frozen=True)
class Case:
    kind: str  # "touch", or the fix
    number: int  # of its kind: the same for a seed
    shown: Any  # JSON-ready
    legs: tuple[Request, Request]  # under the red zone, under the guard page
    foretold: Foretold
    dies: bool = False  # of a guard in a kernel


# --- a kernel that touches a few bytes, and what arithmetic says of it ------------------------------------------------


@dataclass(frozen=True)
class Touch:
    """Bytes ``at`` to ``at + count * unit`` from the first buffer's start are read, or written in units."""

    make: str  # of MAKES, for both buffers; "nothing": the bytes would be those of a tensor without elements
    itemsize: int
    elements: int
    zone: int
    how: str  # "torch" or "triton"
    act: str  # "put" a byte, "flip", "same", "undone"; "read", or "read unused"
    at: int
    unit: int
    count: int
    put: int = 0  # the byte that each written one becomes
    wanted: int = 0  # where in the first buffer a read should have been

    @property
    def nbytes(self) -> int:
        """Of one buffer, from its first element to its last."""
        return self.itemsize * (3 * self.elements - 2 if self.make == "strided" else self.elements)

    def own(self, offset: int) -> bool:
        """Whether a payload's byte belongs to an element."""
        return self.make != "strided" or offset // self.itemsize % 3 == 0

    def where(self, offset: int) -> tuple[int, str, int]:
        """Of a byte, under the red zone: the buffer it is nearest to, what it is there, and how far from its start."""
        buffer = int(offset >= PITCH // 2)
        offset -= buffer * PITCH
        if 0 <= offset < self.nbytes:
            return buffer, "payload", offset
        side = "before" if offset < 0 else "after"
        near = -self.zone <= offset < self.nbytes + self.zone
        return buffer, side if near else "nobody's", offset

    def held(self, offset: int) -> int:
        """The byte that stands there, under the red zone: all around is zero, buffers are as `first` fills them."""
        buffer, what, offset = self.where(offset)
        return Zone.PATTERNS[what][offset % 2] if what in Zone.PATTERNS else what == "payload" and first(buffer, offset)

    def becomes(self, offset: int) -> int:
        return {"put": self.put, "flip": 255 - self.held(offset)}.get(self.act, self.held(offset))


def first(buffer: int, offset: int) -> int:
    """What a byte of a buffer is before it is touched."""
    return (37 * offset + 101 * buffer + 11) % 256


def foretell(touch: Touch, device: str) -> Foretold:
    slack = -touch.nbytes % PAGE[device]
    bytes_ = [] if touch.make == "nothing" else range(touch.at, touch.at + touch.count * touch.unit)
    blind: dict[str, dict[int, str]] = {name: {} for name in NAMES}  # for each byte that it doesn't see: why
    cells: dict[tuple[int, str], set[int]] = {}  # of a zone: where those elements start that changed
    wrong: dict[str, int] = {}
    for at in bytes_:
        buffer, what, offset = touch.where(at)
        changed = touch.becomes(at) != touch.held(at)
        unchanged = touch.act if touch.act == "undone" else "same value"
        if touch.act.startswith("read"):
            blind["red-zone"][at] = "a read"
            if touch.act == "read" and touch.held(at) != first(0, touch.wanted + at - touch.at):
                wrong.setdefault("out", at - touch.at)
            else:
                blind["reference"][at] = "read for nothing"
        elif what == "payload":
            blind["red-zone"][at] = "next allocation" if buffer else "inside the payload"
            if changed and touch.own(offset):
                wrong.setdefault("ab"[buffer], offset)
            else:
                blind["reference"][at] = unchanged if touch.own(offset) else "not compared"
        else:
            blind["reference"][at] = "not compared"
            if what == "nobody's":
                blind["red-zone"][at] = "beyond the zone"
            elif not changed:
                blind["red-zone"][at] = unchanged
            else:
                origin = 0 if what == "before" else touch.nbytes
                cell = (offset - origin) // touch.itemsize * touch.itemsize
                cells.setdefault((buffer, what), set()).add(cell)
        if -slack <= at < touch.nbytes:
            blind["guard-page"][at] = "inside the payload" if at >= 0 else "first page"
    seen = {name: [at for at in bytes_ if at not in blind[name]] for name in NAMES}
    why = {(one, other): {blind[other][at] for at in seen[one]} for one, other in disagreeing(seen)}
    hits = [[buffer, side, len(at), min(at), max(at)] for (buffer, side), at in cells.items()]
    answers = (sorted(hits, key=lambda hit: (hit[0], hit[1] == "after")), seen["guard-page"] and "fault", wrong)
    stray = bytes_ if not touch.act.startswith("read") or touch.at != touch.wanted else []
    reasons = "; ".join(" and ".join(sorted(set(blind[name].values()))) for name in NAMES)
    said = {name: answer or None for name, answer in zip(NAMES, answers, strict=True)}
    return Foretold(said | {"refused": None}, why, reasons if stray and not any(seen.values()) else "")


def disagreeing(seen: dict[str, Any]) -> list[tuple[str, str]]:
    """(who sees something, who sees nothing)."""
    return [(one, other) for one, other in permutations(NAMES, 2) if seen[one] and not seen[other]]


def touches(seed: int, device: str) -> Iterator[tuple[Touch, Foretold]]:
    for number in range(sys.maxsize):
        draw = random.Random(f"{seed} {number}")
        while True:
            touch = _drawn(draw, device)
            foretold = foretell(touch, device)
            if all(len(names) == 1 for names in foretold.why.values()):
                break
        yield touch, foretold


def _drawn(draw: random.Random, device: str) -> Touch:
    item = draw.choice((1, 2, 4, 8))
    unit = draw.choice([size for size in UNITS if size <= item])
    make = draw.choice((*MAKES, *MAKES, "nothing"))
    elements = 1 if make == "scalar" else draw.choice((1, 2, 3, 5, 8, 100, 4096 // item, 4097 // item + 1))
    zone = draw.choice((512, 1024, 4096))
    how = "triton" if device == "cuda" else draw.choice(("torch", "triton"))
    act = draw.choice(("put", "put", "flip", "flip", "same", "undone", "read", "read unused"))
    blank = Touch(make, item, elements, zone, how, act, 0, unit, 1, draw.choice(STALE_VALUES))
    end = blank.nbytes
    count = draw.randint(1, max(1, min(8, end // unit)))
    far = draw.choice((-1, 1)) << draw.randint(17, FAR[device].bit_length() - 2)
    # a place, and how many units around it
    place, around = draw.choice(
        [(0, 4), (end, 1), (end, 8), (end // 2, end // unit // 2), (end // 2, end // unit // 2), (-zone, 12), (far, 64)]
        + [(end + zone, 12), (-PAGE["cpu"], 2000), (-(-end % PAGE["cpu"]), 4), (PITCH, 12), (PITCH + end, 12)]
        + [(PITCH + end // 2, end // unit // 2), (-end, 64), (2 * zone, 1000), (-64, 40)]
    )
    at = (place // unit + draw.randint(-around, around)) * unit
    wanted = draw.randint(0, max(0, end // unit - count)) * unit
    return dataclasses.replace(blank, at=at, count=count, wanted=wanted)


class Arena(TorchFunctionMode):
    """Opened around a red zone: what that allocates lies PITCH apart, amid FAR bytes of zeros that are nobody's."""

    def __init__(self, device: str):
        super().__init__()
        size = 2 * FAR[device] + 2 * PITCH
        self.next, self.device = FAR[device], device
        if device == "cuda":
            self.whole = torch.zeros(size, dtype=torch.uint8, device=device)
        else:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
            self.whole = torch.frombuffer(mmap.mmap(-1, size, flags), dtype=torch.uint8)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        placed = func is torch.empty and kwargs.get("dtype") is torch.uint8 and args != (0,)
        if not placed or torch.device(kwargs["device"]).type == "meta":
            return func(*args, **kwargs)
        at = self.whole.data_ptr() + self.next
        self.next += PITCH
        return borrowed(at, args[0], torch.uint8, self.device)


def borrowed(address: int, count: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Memory that something else owns, as a storage of its own."""
    if device == "cuda":
        return torch.as_tensor(_CudaBytes(address, count * dtype.itemsize), device=device).view(dtype)
    return torch.frombuffer((ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address), dtype=dtype)


@triton.jit
def touch_kernel(base, at, out, count, put, ACT: tl.constexpr):
    lanes = tl.arange(0, 8)
    live = lanes < count
    here = base + at + lanes
    if ACT == "put":
        tl.store(here, put, mask=live)
    else:
        held = tl.load(here, mask=live)
        if ACT == "read":
            tl.store(out + lanes, held, mask=live)
        elif ACT == "same":
            tl.store(here, held, mask=live)
        else:
            tl.store(here, ~held, mask=live)
            if ACT == "undone":
                tl.store(here, held, mask=live)


def touched(params: dict[str, Any], device: str) -> dict[str, Any]:
    """A leg's entry: make both buffers under a detector, touch, and say what the detector and the reference see."""
    touch = Touch(**params["touch"])
    out = torch.zeros(8, dtype=UNITS[touch.unit], device=device)
    detector = memory.DETECTORS[params["detector"]](zone_bytes=touch.zone)
    with Arena(device) as arena, detector:
        buffers = [_made(touch, buffer, device) for buffer in range(2)]
        if touch.make == "nothing":
            base, count = torch.empty(0, dtype=UNITS[touch.unit], device=device), 0
        else:
            base, count = buffers[0].as_strided((1,), (1,)).view(UNITS[touch.unit]), touch.count
        act = touch.act.partition(" ")[0]
        put = int.from_bytes(bytes([touch.put] * touch.unit), sys.byteorder, signed=touch.unit > 1)
        if touch.how == "triton":
            touch_kernel[(1,)](base, touch.at // touch.unit, out, count, put, ACT=act)
        elif count:
            _in_torch(act, borrowed(base.data_ptr() + touch.at, count, base.dtype, device), out, put)
        hits, wrong = detector.check(), compared(touch, buffers, out)
        if len(detector.allocations) != 2:
            raise AssertionError(f"{params['detector']} watched {len(detector.allocations)} buffers of 2")
    record_of = {id(allocation): at for at, allocation in enumerate(detector.allocations)}
    shown = [
        [record_of[id(hit.allocation)], hit.side, hit.elements, hit.first_offset_bytes, hit.last_offset_bytes]
        for hit in hits
    ]
    return {"hits": shown, "wrong": wrong, "around": arena.next}


def _made(touch: Touch, buffer: int, device: str) -> torch.Tensor:
    dtype = UNITS[touch.itemsize]
    made = MAKES.get(touch.make, MAKES["zeros"])(touch.elements, dtype=dtype, device=device)
    content = bytearray(first(buffer, offset) for offset in range(touch.nbytes))
    _span(touch, made).copy_(torch.frombuffer(content, dtype=dtype))
    return made


def _span(touch: Touch, made: torch.Tensor) -> torch.Tensor:
    return made.as_strided((touch.nbytes // touch.itemsize,), (1,))


def _in_torch(act: str, here: torch.Tensor, out: torch.Tensor, put: int) -> None:
    for at in range(len(here)):
        held = None if act == "put" else here[at].clone()
        if held is None:
            here[at] = put
        elif act == "read":
            out[at] = held
        elif act == "same":
            here[at] = held
        else:
            here[at] = ~held
            if act == "undone":
                here[at] = held


def compared(touch: Touch, buffers: Sequence[torch.Tensor], out: torch.Tensor) -> dict[str, int]:
    """The reference: a buffer's elements are as they were made, a read has what it should. First wrong byte of each."""
    wrong: dict[str, int] = {}
    for buffer, made in enumerate(buffers):
        got = _span(touch, made).cpu().view(torch.uint8).tolist()
        for offset, byte in enumerate(got):
            if touch.own(offset) and byte != first(buffer, offset):
                wrong.setdefault("ab"[buffer], offset)
    if touch.act == "read" and touch.make != "nothing":
        for offset, byte in enumerate(out.cpu().view(torch.uint8).tolist()[: touch.count * touch.unit]):
            if byte != first(0, touch.wanted + offset):
                wrong.setdefault("out", offset)
    return wrong


# --- the scenarios ----------------------------------------------------------------------------------------------------


def scenario_cases(company: Company, device: str, count: int, seed: int) -> list[Case]:
    """That many shapes, no two alike, as many of stores as of drafts, each with a random one of its legs."""
    from harness import fixes  # a leg imports this file, and need not wait for what these import
    from harness.prover import Prover
    from harness.sweep import draw
    from regressions import strategies
    from regressions.scenarios import draft

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
    from regressions.scenarios import draft

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


# --- the run ----------------------------------------------------------------------------------------------------------


def touch_cases(
    device: str, count: int, seed: int, *, entry: str = "agreement:touched", ahead: Sequence[str] = ()
) -> list[Case]:
    """``ahead``: in front of the import path of a leg that has another entry."""
    path = (*ahead, str(ROOT / "benchmarks"), str(ROOT), str(ROOT / "kernels"))
    cases = []
    for number, (touch, foretold) in zip(range(count), touches(seed, device), strict=False):
        shown = dataclasses.asdict(touch)
        legs = [Request(entry, {"touch": shown, "detector": each}, device, path) for each in NAMES[:2]]
        cases.append(Case("touch", number, shown, (legs[0], legs[1]), foretold))
    return cases


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
        from harness import fixes

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
