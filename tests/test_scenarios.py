"""The scenarios' predictions against brute force: the kernel's writes as a set of indices, from the layout alone.

Nothing here calls the code under test, nor the formulas that the scenarios use.
"""

from __future__ import annotations

import contextlib
import importlib
import re

import pytest
import torch

from harness.case import Case, Stray
from harness.errors import UsageError
from harness.leg import WrongValues
from regressions import draft_tables, test_26340, test_27486, test_own
from regressions.scenarios import compare, draft, draft_loop, multi_layer, store
from regressions.tables import shapes

SIZES = {"flashinfer": "27338:topk-factor", "flashinfer_mla": "27460:topk-factor"}


def writes(step: int, seq_lens: list[int], topk: int) -> set[int]:
    """Offsets within row ``step`` that the kernel writes, program by program."""
    n, indices = step + 1, set()
    for seq, length in enumerate(seq_lens):
        for branch in range(topk):
            start = sum(seq_lens[:seq]) * topk + seq * topk * n + branch * (length + n)
            indices |= set(range(start, start + length))  # the prefix
            indices |= set(range(start + length, start + length + n))  # the draft slots
    return indices


def stray(width: int, params: dict) -> set[int]:
    """Flat indices, over all rows, that leave a buffer of num_steps rows of ``width``."""
    num_steps = params["num_steps"]
    flat = {
        step * width + index for step in range(num_steps) for index in writes(step, params["seq_lens"], params["topk"])
    }
    return {index for index in flat if not 0 <= index < num_steps * width}


def widths(params: dict) -> tuple[int, int]:
    """A row with and without the topk factor."""
    requests = params["max_bs"] if params["path"] == "cuda_graph" else len(params["seq_lens"])
    return requests * params["topk"] * params["max_context_len"], params["max_bs"] * params["max_context_len"]


def fits(width: int, params: dict) -> bool:
    return len(writes(params["num_steps"] - 1, params["seq_lens"], params["topk"])) <= width


def test_every_write_of_a_row_is_written_once():
    for lens in ([3], [0, 5], [2, 6, 4]):
        for topk in (1, 2, 4):
            indices = writes(2, lens, topk)
            assert indices == set(range(topk * (sum(lens) + 3 * len(lens))))


@pytest.mark.parametrize("backend", SIZES)
def test_size_cases(backend):
    cases = draft_tables.size_cases(SIZES[backend])("cpu")
    told = 0
    for case in cases:
        wide, narrow = widths(case.params)
        outside = stray(narrow, case.params)
        assert case.on == ("clean" if fits(wide, case.params) else "guarded"), case.id
        assert case.tells == (bool(outside) and case.on == "clean"), case.id
        assert case.stray == (Stray("after", len(outside)) if outside else None), case.id
        assert case.backend == backend and case.zone_bytes > 4 * len(outside)
        told += case.tells
    assert 10 < told < len(cases)


@pytest.mark.parametrize(("backend", "guard"), draft.GUARDS.items())
def test_wall_cases(backend, guard):
    cases = draft_tables.wall_cases(guard)("cpu")
    for case in cases:
        wide, _ = widths(case.params)
        outside = stray(wide, case.params)
        assert case.tells == bool(outside), case.id
        assert case.on == ("guarded" if outside else "clean"), case.id
        assert case.stray == (Stray("after", len(outside)) if outside else None), case.id
        assert case.zone_bytes > len(outside) * (8 if backend == "triton" else 4)
    assert {case.tells for case in cases} == {True, False}
    assert {case.params["path"] for case in cases} == set(draft.PATHS)


def test_the_victim_cases():
    for shape in shapes(test_26340.CPU):
        case = draft_loop.case("cpu", **shape)
        params = {**case.params, "path": "cuda_graph"}
        assert case.tells == bool(stray(widths(params)[1], params)), case.id
        assert fits(widths(params)[0], params), case.id
        assert case.detector == "victim"


SHAPE = ("topk", "num_steps", "max_bs", "max_context_len", "seq_lens")
# cases.md by its numbers: options, on, telling, stray elements
LITERALS = {
    1: ("27338:topk-factor", (2, 2, 1, 8, [3]), "clean", True, 2),
    2: ("27338:topk-factor", (1, 2, 1, 8, [3]), "clean", False, None),
    3: ("27338:topk-factor", (8, 5, 8, 4096, [1500] * 7), "clean", True, 51512),
    "4, fits": ("own:triton-capacity-assert", (2, 3, 1, 8, [5]), "clean", False, None),
    "4, wall": ("own:triton-capacity-assert", (2, 3, 1, 8, [6]), "guarded", True, 2),
    "4, FlashInfer": ("27338:capacity-assert", (2, 3, 1, 8, [6]), "guarded", True, 2),
    5: ("own:int32-rows", (2, 5, 2, 150_000_000, [100, 100]), "clean", True, None),
    "5, one step less": ("own:int32-rows", (2, 4, 2, 150_000_000, [100, 100]), "clean", False, None),
    "6, 2**31": ("27486:int32-guard", (8, 2, 2, 1 << 27, [5, 3]), "guarded", True, None),
    "6, 2**31 - 1": ("27486:int32-guard", (1, 2, 1, 2**31 - 1, [5]), "clean", False, None),
    9: ("27460:topk-factor", (8, 5, 8, 4096, [1500] * 7), "clean", True, 51512),
}


@pytest.mark.parametrize("name", LITERALS)
def test_known_numbers(name):
    fix, shape, on, tells, elements = LITERALS[name]
    case = draft.case(fix, **dict(zip(SHAPE, shape, strict=True)))
    assert (case.on, case.tells) == (on, tells)
    assert case.stray == (Stray("after", elements) if elements else None)


def test_the_sentences_name_the_known_numbers():
    whys = {name: draft.case(row[0], **dict(zip(SHAPE, row[1], strict=True))).why for name, row in LITERALS.items()}
    assert "5 of 8 elements fit" in whys[2] and "topk factor, too, which is 1 here" in whys[2]
    assert "16 of 16 elements fit" in whys["4, fits"]
    past = draft.case("27338:topk-factor", topk=2, num_steps=3, max_bs=1, max_context_len=8, seq_lens=[6])
    assert (past.on, past.tells) == ("guarded", False) and "18 elements" in past.why and "has 16" in past.why
    assert "element 1800000000, below the int32 limit" in whys["5, one step less"]
    assert "element 2400000000, past the int32 limit" in whys[5]
    assert "10 elements are needed, and a row without the topk factor has 8" in whys[1]
    assert "18 elements are needed, and the row has 16" in whys["4, wall"]
    assert "2147483648 elements reaches" in whys["6, 2**31"] and "2147483647 elements is within" in whys["6, 2**31 - 1"]


def test_wide_rows_wrap_where_brute_force_says_so():
    for case in test_own.wide_rows("cpu"):
        wide, _ = widths(case.params)
        starts = [step * wide for step in range(case.params["num_steps"])]
        assert case.tells == any(start >= 2**31 for start in starts), case.id
        assert wide < 2**31, "27486's guard would refuse it"


@pytest.mark.parametrize("wide", [2**30, 2**30 + 1, 2**31 - 2**20, 2**31 - 2**19, 2**31 - 1, 600_000_000, 3 * 2**29])
@pytest.mark.parametrize("num_steps", [2, 3, 4, 5, 9])
def test_a_wrapped_row_is_only_claimed_to_crash_where_it_surely_does(wide, num_steps):
    shape = {"topk": 1, "num_steps": num_steps, "max_bs": 1, "max_context_len": wide, "seq_lens": [7]}
    starts = [step * wide for step in range(num_steps)]
    # of an int32: the low 32 bits, the highest of them the sign
    wrapped = [(start & 0xFFFFFFFF) - ((start & 0x80000000) << 1) for start in starts]
    if starts[-1] < 2**31:
        assert not draft.case("own:int32-rows", **shape).tells
    elif any(start * 4 <= -(2**21) for start in wrapped):
        assert draft.case("own:int32-rows", **shape).tells
    else:
        with pytest.raises(UsageError, match="guard page cannot tell from the buffer"):
            draft.case("own:int32-rows", **shape)


def test_an_empty_batch_or_one_that_is_refused_never_reaches_the_kernel():
    shape = {"topk": 2, "num_steps": 5, "max_bs": 2, "max_context_len": 150_000_000}
    empty = draft.case("own:int32-rows", seq_lens=[], **shape)
    assert (empty.on, empty.tells, empty.reaches) == ("clean", False, False) and "empty batch" in empty.why
    past = draft.case("own:int32-rows", seq_lens=[150_000_000, 150_000_000], **shape)
    assert (past.on, past.tells, past.reaches) == ("guarded", False, False)
    assert draft.case("own:int32-rows", seq_lens=[100], **shape).reaches


EAGLE_KV_SAYS = "EAGLE draft kv_indices row too small: need 18, row has 16"
SGLANG_SAYS = "EAGLE draft kv_indices row (size 16) too small"
WIDTH_SAYS = "kv_indices row of 2147483648 elements reaches the int32 limit 2147483648"
# blind cases: a fix and a batch past its row -> what must have refused it, what must not
BLIND = {
    "27338:topk-factor": ({"topk": 2, "num_steps": 3, "max_bs": 1, "max_context_len": 8, "seq_lens": [6]}, False),
    "27460:topk-factor": ({"topk": 2, "num_steps": 3, "max_bs": 1, "max_context_len": 8, "seq_lens": [6]}, False),
    "own:int32-rows": ({"topk": 2, "num_steps": 3, "max_bs": 1, "max_context_len": 8, "seq_lens": [6]}, False),
    "27486:int32-guard": ({"topk": 2, "num_steps": 3, "max_bs": 1, "max_context_len": 8, "seq_lens": [6]}, False),
    "27486:int32-guard, wide": (
        {"topk": 2, "num_steps": 3, "max_bs": 1, "max_context_len": 2**30, "seq_lens": [2**30]},
        True,
    ),
}


@pytest.mark.parametrize("name", BLIND)
def test_a_blind_refusal_must_come_from_the_right_guard(name):
    shape, by_width = BLIND[name]
    case = draft.case(name.partition(",")[0], **shape)
    assert (case.on, case.tells) == ("guarded", False)
    said = {text: bool(re.search(case.reason[frozenset()], text)) for text in (EAGLE_KV_SAYS, SGLANG_SAYS, WIDTH_SAYS)}
    assert said == {EAGLE_KV_SAYS: not by_width, SGLANG_SAYS: not by_width, WIDTH_SAYS: by_width}


def test_eager_rows_are_of_the_live_batch():
    """A row sized for max_bs would have room, so the batch past its own row tells the two sizes apart."""
    for backend, guard in draft.GUARDS.items():
        fewer = [
            case
            for case in draft_tables.wall_cases(guard)("cpu")
            if case.params["path"] == "eager"
            and case.tells
            and fits(widths({**case.params, "path": "cuda_graph"})[0], case.params)
        ]
        assert fewer, backend


def test_int32_widths():
    for case in test_27486.widths("cpu"):
        wide, _ = widths(case.params)
        assert (case.on == "guarded") == (wide >= 2**31), case.id
    refused = [case.params for case in test_27486.widths("cpu") if case.on == "guarded" and not case.needs_cuda]
    # 2**31 reached without topk to multiply, and with one live request of one
    assert any(p["topk"] == 1 for p in refused) and any(p["topk"] > 1 and p["max_bs"] == 1 for p in refused)
    [full] = [case for case in test_27486.widths("cuda") if case.needs_cuda]
    used = full.params["topk"] * sum(length + full.params["num_steps"] for length in full.params["seq_lens"])
    assert used >= 2**31 and set(full.expect.values()) == {"wrong"}


def store_writes(params: dict) -> tuple[set[int], int]:
    """Flat int32 elements of one cache that are written, and how many it has."""
    elements = params["row_bytes"] // 4
    flat = {slot * elements + i for slot in params["slots"] for i in range(elements)}
    return flat, (params["num_slots"] + params["page_size"]) * elements


def test_store_cases():
    cases, seen = test_27486.slots("cpu"), set()
    for case in cases:
        if max([0, *map(abs, case.params["slots"])]) >= 2**31:  # far: unmapped, nothing to count
            assert case.on == "guarded" and case.stray is None and set(case.expect.values()) == {"crashed"}
            continue
        flat, size = store_writes(case.params)
        before, after = {index for index in flat if index < 0}, {index for index in flat if index >= size}
        refused = case.params["row_bytes"] % 4 != 0
        assert case.on == ("error" if refused else "guarded" if before | after else "clean"), case.id
        assert case.tells == (bool(before | after) and not refused), case.id
        side = "/".join(name for name, indices in (("after", after), ("before", before)) if indices)
        want = Stray(side, 2 * len(before | after)) if before | after else None  # K and V
        assert case.stray == want, case.id
        joint = {at for index in flat for at in (index, size + index) if not 0 <= at < 2 * size}
        assert case.stray_in == ({store.JOINT: Stray(side, len(joint))} if want else {}), case.id
        seen.add(side)
    assert seen == {"", "before", "after"}


SLOTS = {  # cases.md 10 and 11, size_limit 8
    "padding and the last": ([0, 7], "clean", None),
    "a slot twice": ([3, 3], "clean", None),
    "before": ([-1], "guarded", Stray("before", 128)),
    "size_limit": ([8], "guarded", Stray("after", 128)),
    "size_limit + 1": ([9], "guarded", Stray("after", 128)),
    "both sides": ([-1, 8], "guarded", Stray("after/before", 256)),
    "a bad slot twice": ([8, 8], "guarded", Stray("after", 128)),
    "2**31": ([2**31], "guarded", None),
    "2**40": ([2**40], "guarded", None),
}


@pytest.mark.parametrize("name", SLOTS)
def test_known_slots(name):
    slots, on, outside = SLOTS[name]
    case = store.case("27486:slot-assert", slots=slots)
    assert (case.on, case.stray, case.tells) == (on, outside, on == "guarded")


# slots of rows (1, 2), (3, 4), (5, 6); what three slots hold; those that may be left out -> whether that is right
STORED = [
    ((0, 1, 2), [[1, 2], [3, 4], [5, 6]], (), True),
    ((0, 1, 2), [[1, 2], [3, 4], [5, 7]], (), False),
    ((0, 1), [[1, 2], [3, 4], [0, 0]], (), True),
    ((0, 1), [[1, 2], [3, 4], [0, 6]], (), False),
    ((0, 1), [[1, 2], [0, 0], [0, 0]], (), False),
    ((0, 1), [[1, 2], [0, 0], [0, 0]], (1,), True),
    ((0, 1), [[1, 2], [0, 4], [0, 0]], (1,), False),
    ((2, 2), [[0, 0], [0, 0], [3, 4]], (), True),
    ((2, 2), [[0, 0], [0, 0], [1, 4]], (), True),  # on a GPU
    ((2, 2), [[0, 0], [0, 0], [1, 3]], (), False),
    ((2, 2), [[0, 0], [0, 0], [1, 0]], (), False),
]


@pytest.mark.parametrize(("slots", "cache", "skipped", "right"), STORED)
def test_stored_rows(slots, cache, skipped, right):
    source = torch.tensor([[1, 2], [3, 4], [5, 6]])[: len(slots)]
    with contextlib.nullcontext() if right else pytest.raises(WrongValues):
        compare.stored("k_cache", torch.tensor(cache), source, slots, skipped)


CLOSE = [
    (torch.float16, 2.015, True),
    (torch.float16, 2.05, False),
    (torch.float32, 2.0001, True),
    (torch.float32, 2.001, False),
]


@pytest.mark.parametrize(("dtype", "got", "right"), CLOSE)
def test_attention_within_its_tolerance(dtype, got, right):
    said = r"attention of step 3: off by up to 0\.\d+, tolerance \S+ \+ \S+ of it"
    with contextlib.nullcontext() if right else pytest.raises(WrongValues, match=said):
        compare.close("attention of step 3", torch.tensor([1.0, got]).to(dtype), torch.tensor([1.0, 2.0]), dtype)


def test_a_bad_slot_past_the_first_block_of_rows():
    late = [case for case in test_27486.slots("cpu") if len(case.params["slots"]) > 8]
    assert {case.params["slots"][-1] for case in late} == {-1, 8}
    assert all(0 <= slot < 8 for case in late for slot in case.params["slots"][:8])


def test_a_store_that_must_crash_says_where():
    for options in ({"slots": [2**40]}, {"slots": [8], "detector": "guard-page"}, {"slots": [-(2**20)]}):
        detector = {"detector": "guard-page"} if options["slots"][0] < 0 else {}
        case = store.case("27486:slot-assert", **{**options, **detector})
        [(out, outcome)] = case.expect.items()
        assert outcome == "crashed" and case.stray is None
        assert re.search(case.reason[out], 'File "<unknown>", line 0, in __tvm_ffi_store_cache')
        assert re.search(case.reason[out], "CUDA error: an illegal memory access was encountered")
        assert not re.search(case.reason[out], "Assertion `slot >= 0 && slot < params.size_limit' failed.")


def test_a_row_that_is_refused_never_crashes():
    for slots in ([2**40], [2**62], [-1], [1 << 20]):
        for detector in store.DETECTORS:
            case = store.case("27486:slot-assert", slots=slots, row_bytes=6, detector=detector)
            assert (case.on, case.expect, case.stray, case.zone_bytes) == ("error", {}, None, 1 << 12)


def test_guard_pages_need_the_driver_bindings():
    for case in (draft.case("27338:topk-factor", detector="guard-page"), draft.case("own:int32-rows")):
        assert case.cuda_packages == ("flashinfer", "cuda.bindings")
    assert draft.case("own:triton-capacity-assert", detector="guard-page").cuda_packages == ("cuda.bindings",)
    assert draft.case("own:triton-capacity-assert").cuda_packages == ()
    assert store.case("27486:slot-assert", slots=[8], detector="guard-page").cuda_packages == ("cuda.bindings",)
    assert store.case("27486:slot-assert").cuda_packages == ()


def test_what_sglang_cannot_run():
    assert "sglang" in draft.case("27338:topk-factor", num_steps=1, seq_lens=[7]).cannot
    assert "sglang" in draft.case("27338:topk-factor", seq_lens=[]).cannot
    assert not draft.case("27338:topk-factor").cannot
    assert set(store.case("27486:slot-assert").cannot) == {"sglang on cpu"}
    assert set(store.case("27486:slot-assert", row_bytes=6).cannot) == {"sglang on cpu", "sglang"}
    assert set(store.case("27486:slot-assert", slots=[]).cannot) == {"sglang on cpu", "sglang"}
    assert all("sglang" in case.cannot for case in test_26340.rounds("cpu"))
    assert not multi_layer.case("27486:draft-tokens-assert").cannot


def test_the_declared_buffers_are_those_of_both_paths_and_of_sglang(catalogue):
    [leg] = catalogue.fix("27486:slot-assert").legs
    assert re.search(leg.reason, "'label': 'k_cache = torch.zeros((rows, elements), dtype=dtype, device=device)'")
    assert re.search(leg.reason, "'label': 'self.v_buffer = torch.zeros(shape, dtype=dtype, device=device)'")
    # one element of a list display: the line has no name
    assert re.search(leg.reason, "'label': 'torch.zeros(', 'site': '/x/sglang/srt/mem_cache/memory_pool.py:1055'")
    assert not re.search(leg.reason, "'label': 'kv_indices = torch.zeros(', 'site': '/x/eagle_kv/backends/base.py:91'")


def test_the_victim_of_a_gpu_is_the_embedding_gather():
    [reason] = [draft_loop.case("cuda", **shape).reason for shape in shapes(test_26340.CPU) if shape["topk"] == 2]
    [regex] = reason.values()
    assert re.search(
        regex, 'Assertion `ind >=0 && ind < ind_dim_size && "vectorized gather kernel index out of bounds"`'
    )
    assert re.search(regex, "Indexing.cu:1289: Assertion `srcIndex < srcSelectDimSize` failed.")
    assert not re.search(
        regex, 'IndexKernelUtils.cu: Assertion `-sizes[i] <= index && index < sizes[i] && "index out of bounds"`'
    )


def test_a_victim_case_is_named_by_its_lengths():
    shape = {"topk": 2, "num_steps": 3, "max_bs": 4, "max_context_len": 64}
    lens = ([50, 40], [40, 50], [50, 50], [50], [50, 50, 40], [5, 50], [50, 5], [25, 25], [2, 25])
    ids = {draft_loop.case("cpu", seq_lens=seq_lens, **shape).id for seq_lens in lens}
    assert len(ids) == len(lens)
    assert any(name.endswith("-lens2x50+40") for name in ids)


@pytest.mark.parametrize(("steps", "tokens", "on"), [(3, 4, "clean"), (3, 8, "guarded"), (1, 2, "clean")])
def test_known_configs(steps, tokens, on):
    case = multi_layer.case("27486:draft-tokens-assert", num_steps=steps, num_draft_tokens=tokens)
    assert (case.on, case.tells) == (on, on == "guarded")


def test_a_refused_config_names_both_numbers():
    regex = multi_layer.case("27486:draft-tokens-assert").reason[frozenset()]
    assert re.search(regex, "speculative_num_draft_tokens=8 must equal speculative_num_steps + 1 = 4")
    assert re.search(regex, "requires speculative_num_draft_tokens == speculative_num_steps + 1, got 8 and 3")
    assert not re.search(regex, "speculative_num_draft_tokens=8 must equal speculative_num_steps + 1 = 5")
    assert not re.search(regex, "requires speculative_num_draft_tokens == speculative_num_steps + 1, got 8 and 4")


def test_configs_are_wrong_on_both_sides():
    """num_steps - 1 and num_steps + 2 too: a check that lets one of them through is none."""
    refused = {
        case.params["num_draft_tokens"] - case.params["num_steps"]
        for case in test_27486.configs("cpu")
        if case.on == "guarded"
    }
    assert {-1, 0, 2} <= refused


DRAFT, STORE = ("27338:topk-factor", draft.case), ("27486:slot-assert", store.case)
# options that make no case -> the sentence that says so
REFUSED = {
    "topk 0": (DRAFT, {"topk": 0}, "topk 0: must be at least 1"),
    "another backend": (DRAFT, {"backend": "aiter"}, "is about flashinfer"),
    "an unknown backend": (("27486:int32-guard", draft.case), {"backend": "nope"}, "backend 'nope'"),
    "an eager size fix": (DRAFT, {"path": "eager"}, "must be cuda_graph"),
    "an unknown path": (("27338:capacity-assert", draft.case), {"path": "nope"}, "must be eager or cuda_graph"),
    "lengths and requests": (DRAFT, {"num_seqs": 2, "seq_lens": [1]}, "one length a request"),
    "too many requests": (DRAFT, {"max_bs": 1, "seq_lens": [1, 1]}, "holds at most max_bs"),
    "past the context": (DRAFT, {"seq_lens": [9]}, "seq_len 9: must be 0 to max_context_len"),
    "a negative length": (DRAFT, {"seq_lens": [-1]}, "seq_len -1"),
    "a row past int32": (DRAFT, {"topk": 8, "max_bs": 4, "max_context_len": 1 << 26}, "refused by 27486:int32-guard"),
    "a detector": (DRAFT, {"detector": "victim"}, "red-zone or guard-page"),
    "an unknown option": (DRAFT, {"slots": [1]}, "slots: no option of a draft case"),
    "a fix of another scenario": (("27486:slot-assert", draft.case), {}, "is not about draft kv_indices"),
    "a slot past its type": (STORE, {"slots": [2**31], "index_bytes": 4}, "index_bytes"),
    "a slot neither near nor far": (STORE, {"slots": [1 << 20]}, "guard-page"),
    "a store detector": (STORE, {"detector": "victim"}, "detector 'victim': must be red-zone or guard-page"),
    "an odd row": (STORE, {"row_bytes": 7}, "row_bytes 7: must be even"),
    "just before a guard page's payload": (
        STORE,
        {"slots": [-1], "detector": "guard-page"},
        "a guard page cannot see the bytes right before a payload",
    ),
    "a page before, less a row": (STORE, {"slots": [-8191], "detector": "guard-page"}, "2096896 bytes before"),
    "past a guard page": (STORE, {"slots": [2**26 + 7], "detector": "guard-page"}, "past a guard page's 17179869184"),
    "past a guard page, in a red zone": (STORE, {"slots": [2**27]}, "take one from 68719476736 bytes on"),
    "a slot that wraps": (STORE, {"slots": [2**54]}, "above -2**62 and below 2**62"),
    "a slot that wraps downwards": (STORE, {"slots": [-(2**54)]}, "may wrap in 64 bits"),
    "fewer than no requests": (DRAFT, {"num_seqs": -1}, "num_seqs -1: must be at least 0"),
    "a red zone for rows": (
        ("own:int32-rows", draft.case),
        {"num_steps": 5, "max_context_len": 2**29, "detector": "red-zone"},
        "use guard-page",
    ),
    "an unknown store path": (STORE, {"path": "nope"}, "store_cache or pool"),
    "no steps": (("27486:draft-tokens-assert", multi_layer.case), {"num_steps": 0}, "num_steps 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_make_no_case_are_one_line(name):
    (fix, build), options, part = REFUSED[name]
    with pytest.raises(UsageError) as caught:
        build(fix, **options)
    assert part in str(caught.value) and "\n" not in str(caught.value)


def test_every_fix_has_a_telling_case_by_default(catalogue):
    for fix in catalogue:
        case = importlib.import_module(f"regressions.scenarios.{fix.scenario}").case(fix.id)
        assert isinstance(case, Case) and case.tells, fix.id


def test_ids_are_unique():
    tables = [draft_tables.size_cases(fix) for fix in SIZES.values()]
    tables += [draft_tables.wall_cases(fix) for fix in draft.GUARDS.values()]
    tables += [test_27486.widths, test_27486.slots, test_27486.configs, test_own.wide_rows, test_26340.rounds]
    for build in tables:
        for device in ("cpu", "cuda"):
            ids = [case.id for case in build(device)]
            assert len(set(ids)) == len(ids)


TABLE = """
a seq_lens path
1 3,2x5    eager   # a comment
2 -        x
# nothing
3 2^31,0   y
"""


def test_tables():
    assert list(shapes(TABLE)) == [
        {"a": 1, "seq_lens": [3, 5, 5], "path": "eager"},
        {"a": 2, "seq_lens": [], "path": "x"},
        {"a": 3, "seq_lens": [2**31, 0], "path": "y"},
    ]
    with pytest.raises(ValueError, match="a row of 2 values under 3 columns: 1 2"):
        list(shapes("a b c\n1 2"))
