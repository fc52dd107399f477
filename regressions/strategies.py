"""Random inputs of the scenarios, by fix: for sweeps and for tests.

A strategy draws the options of a scenario's ``case``, none that the case refuses. Simplest first, which is what a
failing input is shrunk towards: topk 1, one step, pages of one, few and short requests, slots in bounds.

Sizes keep a leg at milliseconds on a GPU, and in Triton's interpreter at some hundred. What is stray fits a red zone of
a few hundred KiB. Only the int32 fixes have rows of gigabytes, a few of them, under a guard page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from harness.case import Case
from regressions.scenarios import draft, multi_layer, store

Options = dict[str, Any]


@dataclass(frozen=True)
class Space:
    """The inputs of one fix, and how a sweep runs them."""

    fix: str
    build: Callable[..., Case]  # the scenario's
    options: st.SearchStrategy[Options]
    entry: str = ""  # of a leg, where the case's own does more than the fix is about
    detector: str = ""  # where the case's own is none
    kills: bool = False  # its guard stands in a kernel, and ends the process that it fires in

    def case(self, options: Options) -> Case:
        """What ``unfix repro`` runs for these options."""
        return self.build(self.fix, **options)

    def swept(self, options: Options) -> Case:
        """The same case as a sweep runs it."""
        case = self.case(options)
        return replace(case, entry=self.entry or case.entry, detector=self.detector or case.detector)


def space(fix: str, scenario: str | None, device: str) -> Space | None:
    """None where there is no strategy for the scenario, see ``SCENARIOS``."""
    make = SCENARIOS.get(scenario or "")
    return make(fix, device) if make else None


@dataclass(frozen=True)
class Most:
    """The largest draft shapes. The interpreter takes some 10 ms for each step of each branch of each request."""

    topk: int
    num_steps: int
    num_seqs: int
    max_context_len: int
    page_sizes: tuple[int, ...]
    wide_in: int  # one shape in so many has a row of gigabytes, where a fix is about those
    wide_steps: int  # the most rows of 2**31 elements


MOST = {"cpu": Most(3, 3, 3, 12, (1, 2, 4), 8, 2), "cuda": Most(8, 8, 8, 1024, (1, 4, 16), 16, 1)}


@st.composite
def draft_shapes(draw: st.DrawFn, device: str, backends: tuple[str, ...], paths: tuple[str, ...]) -> Options:
    """A batch and its buffers, often just as long as a row is.

    A row with the topk factor is full where each request fills its context with its draft tokens; a row without it
    where, on top of that, ``max_bs`` is topk times the batch.
    """
    most = MOST[device]
    topk = draw(st.integers(1, most.topk))
    num_steps = draw(st.integers(1, most.num_steps))
    page_size = draw(st.sampled_from(most.page_sizes))
    context = draw(st.integers(1, most.max_context_len))
    num_seqs = draw(st.sampled_from((*range(1, most.num_seqs + 1), *range(1, most.num_seqs + 1), 0)))
    idle = draw(st.sampled_from((0, 1, 2, num_seqs * (topk - 1))))
    full = max(0, context - num_steps)
    length = draw(st.sampled_from([st.integers(0, context), st.integers(max(0, full - 1), context), st.just(full)]))
    return {
        "backend": draw(st.sampled_from(backends)), "path": draw(st.sampled_from(paths)), "topk": topk,
        "num_steps": num_steps, "page_size": page_size, "max_bs": max(1, num_seqs + idle),
        # drawn last and one by one: what shrinks best
        "max_context_len": context, "seq_lens": [draw(length) for _ in range(num_seqs)],
    }  # fmt: skip


@st.composite
def _wide_shapes(draw: st.DrawFn, backends: tuple[str, ...], steps: range, least: Callable[[int], int]) -> Options:
    """Rows of about ``least(num_steps)`` elements, of which a batch of a few tokens uses the start."""
    topk, requests = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    num_steps = draw(st.sampled_from(steps))
    context = -(-least(num_steps) // (topk * requests)) + draw(st.integers(-2, 1000))
    seq_lens = draw(st.lists(st.integers(0, 3), min_size=requests, max_size=requests))
    return {
        "backend": draw(st.sampled_from(backends)), "path": draw(st.sampled_from(draft.PATHS)), "topk": topk,
        "num_steps": num_steps, "page_size": 1, "max_bs": requests, "max_context_len": context, "seq_lens": seq_lens,
        "detector": "guard-page",
    }  # fmt: skip


def _draft(fix: str, device: str) -> Space:
    most, int32 = MOST[device], ("flashinfer", "flashinfer_mla", "aiter")
    backends = (draft.BACKEND_OF[fix],) if fix in draft.BACKEND_OF else int32
    options = draft_shapes(device, backends, ("cuda_graph",) if fix in draft.SIZE_FIXES else draft.PATHS)
    if fix in (draft.INT32_ROWS, draft.INT32_GUARD):
        if fix == draft.INT32_ROWS:  # the last row is the first to start past 2**31
            wide = _wide_shapes(int32, range(3, 6), lambda steps: -(-draft.INT32_LIMIT // (steps - 1)))
        else:
            wide = _wide_shapes(int32, range(1, most.wide_steps + 1), lambda steps: draft.INT32_LIMIT)
        narrow = options.map(lambda shape: {**shape, "detector": "red-zone"})
        options = st.integers(1, most.wide_in).flatmap(lambda at: wide if at == most.wide_in else narrow)
    return Space(fix, draft.case, options, entry="regressions.scenarios.draft_rows_{target}:run")


@st.composite
def stores(draw: st.DrawFn) -> Options:
    """Slots to store to. Some batches have one or three that are out of bounds, near by on either side."""
    shape: Options = {
        "row_bytes": draw(st.sampled_from((4, 8, 12, 16, 36, 64, 256, 512, 1024, 2048, 4096, 6))),
        "num_slots": draw(st.integers(1, 16)), "page_size": draw(st.sampled_from((1, 2, 4))),
        "index_bytes": draw(st.sampled_from((8, 4))), "strided": draw(st.booleans()),
        "path": draw(st.sampled_from(("store_cache", "pool"))),
    }  # fmt: skip
    limit: int = shape["num_slots"] + shape["page_size"]
    bad = draw(st.sampled_from((0, 0, 0, 0, 0, 0, 0, 1, 3)))
    slots = draw(st.lists(st.integers(0, limit - 1), max_size=24))
    for _ in range(bad):
        far = draw(st.integers(0, 63))
        slots.insert(draw(st.integers(0, len(slots))), draw(st.sampled_from((limit + far, -1 - far))))
    return {"slots": slots, **shape}


def _store(fix: str, device: str) -> Space:
    return Space(fix, store.case, stores(), kills=True)


@st.composite
def multi_layers(draw: st.DrawFn) -> Options:
    """A configuration, every other one as it must be."""
    num_steps = draw(st.integers(1, 8))
    tokens = draw(st.one_of(st.just(num_steps + 1), st.integers(1, 12)))
    return {"num_steps": num_steps, "num_draft_tokens": tokens, "num_seqs": draw(st.integers(1, 8))}


def _multi_layer(fix: str, device: str) -> Space:
    return Space(fix, multi_layer.case, multi_layers(), detector="red-zone")


SCENARIOS: Mapping[str, Callable[[str, str], Space]] = {"draft": _draft, "multi_layer": _multi_layer, "store": _store}
