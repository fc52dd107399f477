"""The scenarios' predictions against brute force: the kernel's writes as a set of indices, from the layout alone.

Nothing here calls the code under test, nor the formulas that the scenarios use.
"""

from __future__ import annotations

import pytest

from harness.case import Case, Stray
from harness.errors import UsageError
from regressions import draft_tables, test_26340, test_27486, test_own
from regressions.scenarios import draft, draft_loop, multi_layer, store
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
    assert "1800000000" in whys["5, one step less"]


def test_wide_rows_wrap_where_brute_force_says_so():
    for case in test_own.wide_rows("cpu"):
        wide, _ = widths(case.params)
        starts = [step * wide for step in range(case.params["num_steps"])]
        assert case.tells == any(start >= 2**31 for start in starts), case.id
        assert wide < 2**31, "27486's guard would refuse it"


def test_int32_widths():
    for case in test_27486.widths("cpu"):
        wide, _ = widths(case.params)
        assert (case.on == "guarded") == (wide >= 2**31), case.id
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


@pytest.mark.parametrize(("steps", "tokens", "on"), [(3, 4, "clean"), (3, 8, "guarded"), (1, 2, "clean")])
def test_known_configs(steps, tokens, on):
    case = multi_layer.case("27486:draft-tokens-assert", num_steps=steps, num_draft_tokens=tokens)
    assert (case.on, case.tells) == (on, on == "guarded")


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
    builders = {"draft": draft.case, "store": store.case, "multi_layer": multi_layer.case}
    for fix in catalogue:
        case = builders[fix.scenario](fix.id)
        assert isinstance(case, Case) and case.tells, fix.id


def test_ids_are_unique():
    tables = [draft_tables.size_cases(fix) for fix in SIZES.values()]
    tables += [draft_tables.wall_cases(fix) for fix in draft.GUARDS.values()]
    tables += [test_27486.widths, test_27486.slots, test_27486.configs, test_own.wide_rows]
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
