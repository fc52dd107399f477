"""Self-tests of the memory detectors: each injects a fault inside its own allocation and must see it."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.ending import Ending
from harness.memory import (
    DETECTORS,
    Hit,
    NoDetector,
    Poison,
    RedZone,
    Victim,
    Watch,
    folds,
    guard_page,
    touches,
    unwatched,
)
from harness.memory.guard_page import GuardPage
from harness.memory.scrub import scrub
from harness.memory.sparse import LEAST
from harness.memory.watch import Zone, _capturing, _is_plain
from harness.sandbox import Request, Sandbox

ROOT = Path(__file__).parent.parent
NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=NO_CUDA)]
DTYPES = [torch.bool, torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.int32, torch.float32, torch.int64]
DTYPES += [torch.float64, torch.complex128, torch.float8_e4m3fn]
ZONE = 4096


def poke(tensor: torch.Tensor, at: int, values: list[int]) -> None:
    """Write bytes at byte offset ``at`` from the payload's start, which may lie outside the payload."""
    with torch._C.DisableTorchFunction():  # its own tensors are not the detector's
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        start = tensor.storage_offset() * tensor.element_size() + at
        whole[start : start + len(values)] = torch.tensor(values, dtype=torch.uint8, device=tensor.device)


def peek(tensor: torch.Tensor, at: int, count: int) -> list[int]:
    with torch._C.DisableTorchFunction():
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        start = tensor.storage_offset() * tensor.element_size() + at
    return whole[start : start + count].tolist()


def only(hits: list[Hit]) -> Hit:
    assert len(hits) == 1, hits
    return hits[0]


# --- factories -------------------------------------------------------------------------------------------------------

SOURCE = torch.arange(6, dtype=torch.int16).view(2, 3)
FACTORIES = {
    "zeros": lambda **kw: torch.zeros(2, 3, **kw),
    "ones": lambda **kw: torch.ones((2, 3), dtype=torch.bool, **kw),
    "full": lambda **kw: torch.full((2, 3), 7, **kw),
    "full by name": lambda **kw: torch.full(size=(2,), fill_value=2.5, dtype=torch.float16, **kw),
    "full of -0.0": lambda **kw: torch.full((2,), -0.0, **kw),
    "0-dim": lambda **kw: torch.zeros((), dtype=torch.int64, **kw),
    "zeros_like of a transpose": lambda **kw: torch.zeros_like(SOURCE.t(), **kw),
    "ones_like": lambda **kw: torch.ones_like(SOURCE, **kw),
    "full_like": lambda **kw: torch.full_like(SOURCE, 4, **kw),
    "new_zeros": lambda **kw: SOURCE.new_zeros(2, 2, **kw),
    "new_ones": lambda **kw: SOURCE.new_ones((2, 2), **kw),
    "new_full": lambda **kw: SOURCE.new_full((2, 2), 5, **kw),
    "new_tensor": lambda **kw: SOURCE.new_tensor([1, 2], **kw),
    "tensor": lambda **kw: torch.tensor([[1.5, 2.5]], **kw),
    "as_tensor of a list": lambda **kw: torch.as_tensor([1, 2], **kw),
    "scalar_tensor": lambda **kw: torch.scalar_tensor(3, **kw),
    "arange": lambda **kw: torch.arange(5, **kw),
    "linspace": lambda **kw: torch.linspace(0, 1, 5, **kw),
    "eye": lambda **kw: torch.eye(3, **kw),
    "rand": lambda **kw: torch.rand(3, **kw),
    "randn": lambda **kw: torch.randn(3, **kw),
    "randint": lambda **kw: torch.randint(0, 9, (4,), **kw),
    "randperm": lambda **kw: torch.randperm(7, **kw),
    "requires_grad": lambda **kw: torch.ones(3, requires_grad=True, **kw),
    "channels_last": lambda **kw: torch.zeros_like(torch.rand(2, 3, 4, 5), memory_format=torch.channels_last, **kw),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("detector", ["red-zone", "poison", "victim", "guard-page"])
@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES.keys())
def test_a_redirected_factory_makes_what_torch_makes(factory, detector: str, device: str) -> None:
    torch.manual_seed(0)
    plain = factory(device=device)
    torch.manual_seed(0)
    with DETECTORS[detector](zone_bytes=ZONE) as watch:
        watched = factory(device=device)
        assert watch.allocation_of(watched) is not None
        assert watch.check() == []
    assert torch.equal(watched, plain)
    assert torch.equal(watched.signbit(), plain.signbit())
    for name in ("shape", "dtype", "device", "requires_grad", "is_leaf", "layout"):
        assert getattr(watched, name) == getattr(plain, name), name
    assert watched.stride() == plain.stride()


@pytest.mark.parametrize("device", DEVICES)
def test_empty_factories_give_shape_and_strides(device: str) -> None:
    with RedZone(ZONE) as watch:
        made = [
            torch.empty(2, 3, dtype=torch.float16, device=device),
            torch.empty_like(SOURCE.t(), device=device),
            torch.empty_strided((2, 3), (1, 5), device=device),
            torch.empty_permuted((2, 3), (1, 0), device=device),
            SOURCE.new_empty((4,), device=device),
            SOURCE.new_empty_strided((2,), (3,), device=device),
        ]
    assert [t.stride() for t in made] == [(3, 1), (1, 3), (1, 5), (1, 2), (1,), (3,)]
    assert [a.nbytes for a in watch.allocations] == [12, 12, 12 * 4, 24, 8, 8]


class Wrapped(torch.Tensor):
    """A tensor's subclass: what is made like one of it is none of ours."""


def test_what_is_passed_through_is_not_watched() -> None:
    wrapped = SOURCE.clone().as_subclass(Wrapped)
    with RedZone(ZONE) as watch:
        made = [
            torch.empty(0),
            torch.zeros(3, 0),
            torch.arange(0),
            torch.empty(3, device="meta"),
            torch.arange(3, device="meta"),
            torch.zeros(3, layout=torch.sparse_coo),
            torch.zeros_like(wrapped),
            torch.zeros_like(input=wrapped),
            torch.full_like(wrapped, 4),
        ]
        out = torch.ones(2)
        torch.zeros(2, out=out)
        array = torch.ones(3).numpy()
        aliases = [torch.as_tensor(array), torch.as_tensor(data=array)]
        array[0] = 9
    assert [each.device.type for each in made[3:5]] == ["meta", "meta"]
    assert made[5].layout == torch.sparse_coo
    assert [type(each) for each in made[-3:]] == [Wrapped] * 3
    assert [alias[0] for alias in aliases] == [9, 9]
    assert out.tolist() == [0, 0]
    assert [a.label for a in watch.allocations] == [
        "out = torch.ones(2)",
        "array = torch.ones(3).numpy()",
    ]


@pytest.mark.parametrize(
    ("more", "plain"),
    [({}, True), ({"pin_memory": False, "out": None, "names": None}, True), ({"pin_memory": True}, False),
     ({"names": ("rows",)}, False), ({"out": torch.ones(3)}, False)],
)  # fmt: skip
def test_what_is_pinned_named_or_given_is_none_of_ours(more, plain) -> None:
    assert _is_plain((3,), more) is plain


@pytest.mark.parametrize("detector", [name for name in DETECTORS if name != "none"])
def test_what_a_scenario_compares_with_is_not_watched(detector: str) -> None:
    @unwatched()
    def reference() -> torch.Tensor:
        return torch.arange(3)

    with DETECTORS[detector](zone_bytes=ZONE) as watch:
        assert reference().tolist() == [0, 1, 2] and not watch.allocations
        torch.arange(3)
    assert len(watch.allocations) == 1, "it goes on watching"


def test_arguments_may_be_named() -> None:
    with torch.device("meta"), RedZone(ZONE) as watch:
        like, full = torch.ones_like(input=SOURCE), torch.full_like(SOURCE, 4)
    with watch:
        data = torch.as_tensor(data=[1, 2])
    assert (like.tolist(), data.tolist()) == ([[1, 1, 1]] * 2, [1, 2]), "as its source, not by default, on the CPU"
    assert full.tolist() == [[4, 4, 4]] * 2
    assert [a.shape for a in watch.allocations] == [(2, 3), (2, 3), (2,)]


def test_a_record_names_the_line_that_allocated() -> None:
    with RedZone(ZONE) as watch:
        kv_indices = torch.zeros(3, 5, dtype=torch.int32)
        weight = torch.nn.Linear(4, 2).weight
    record = watch.allocation_of(kv_indices[2])
    assert record is not None
    assert record.label == "kv_indices = torch.zeros(3, 5, dtype=torch.int32)"
    assert record.site.startswith(f"{__file__}:")
    assert (record.shape, record.dtype, record.nbytes) == ((3, 5), torch.int32, 60)
    linear = watch.allocation_of(weight)
    assert linear is not None and linear.label == "weight = torch.nn.Linear(4, 2).weight"
    assert watch.allocation_of(SOURCE) is None
    with torch._C.DisableTorchFunction():
        behind = torch.as_strided(kv_indices, (1,), (1,), kv_indices.storage_offset() + 15)
    assert watch.allocation_of(behind) is None, "the first element past it is not its own"


def test_a_default_device_is_followed() -> None:
    with RedZone(ZONE) as watch, torch.device("meta"):
        assert torch.zeros(3).device.type == "meta"
    with torch.device("meta"), RedZone(ZONE) as outer:
        assert torch.zeros(3).device.type == "meta"
    assert watch.allocations == outer.allocations == []


def test_the_registry_and_the_detector_that_watches_nothing() -> None:
    assert set(DETECTORS) == {"red-zone", "guard-page", "poison", "victim", "none"}
    with DETECTORS["none"](zone_bytes=ZONE) as watch:
        assert torch.zeros(3).storage_offset() == 0
        assert watch.check() == []
    assert isinstance(watch, NoDetector) and watch.allocations == []
    with pytest.raises(NotImplementedError):
        Watch(ZONE).place(4, 4, torch.device("cpu"))
    with pytest.raises(ValueError, match="zone_bytes is 0: must be positive"):
        RedZone(0)
    assert [RedZone(asked).zone_bytes for asked in (1, 512, 513, 4096)] == [512, 512, 1024, 4096]
    assert {DETECTORS[name]().zone_bytes for name in DETECTORS} == {64 << 10}


# --- red zone and victim gaps: the same faults, seen alike -----------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("detector", [RedZone, partial(Victim, chunk_bytes=1 << 16)], ids=["red-zone", "victim"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("side", ["before", "after"])
def test_one_stray_element(side: str, dtype: torch.dtype, detector: Callable[[int], Watch], device: str) -> None:
    item = dtype.itemsize
    with detector(ZONE) as watch:
        payload = torch.zeros(5, dtype=dtype, device=device)
        at = -item if side == "before" else 5 * item
        old = peek(payload, at, item)
        poke(payload, at, [1] * item)
        hit = only(watch.check())
        assert watch.check() == [], "a reported hit is armed again"
        poke(payload, at, [1] * item)
        assert only(watch.check()) == hit
    offset = -item if side == "before" else 0
    assert (hit.side, hit.elements, hit.first_offset_bytes, hit.last_offset_bytes) == (side, 1, offset, offset)
    signed = dtype.is_signed
    as_int = [int.from_bytes(bytes(cell), sys.byteorder, signed=signed) for cell in (old, [1] * item)]
    assert hit.values == ((offset, *as_int),)
    assert (hit.allocation, hit.detector) == (watch.allocation_of(payload), watch.name)
    assert payload.view(torch.uint8).count_nonzero() == 0, "arming again left the payload alone"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (1000,)])
def test_an_overflow_is_counted_in_elements(shape: tuple[int, ...], device: str) -> None:
    with RedZone(ZONE) as watch:
        payload = torch.zeros(shape, dtype=torch.int32, device=device)
        poke(payload, payload.nbytes, [0] * 40)
        poke(payload, payload.nbytes + 80, [1])
        poke(payload, -12, [9] * 5)
    before, after = watch.check()
    assert (before.side, before.elements) == ("before", 2)
    assert (before.first_offset_bytes, before.last_offset_bytes) == (-12, -8)
    assert (after.side, after.elements) == ("after", 11)
    assert (after.first_offset_bytes, after.last_offset_bytes) == (0, 80)
    assert [offset for offset, _, _ in after.values] == [0, 4, 8, 12]
    assert not before.lower_bound and not after.lower_bound


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("byte", range(8))
def test_a_partly_written_element_counts_as_one(byte: int, device: str) -> None:
    with RedZone(ZONE) as watch:
        payload = torch.zeros(4, dtype=torch.int64, device=device)
        poke(payload, payload.nbytes + 16 + byte, [0])
    hit = only(watch.check())
    assert (hit.elements, hit.first_offset_bytes, hit.last_offset_bytes) == (1, 16, 16)


@pytest.mark.parametrize("device", DEVICES)
def test_the_far_ends_of_both_zones_are_watched_and_marked_as_lower_bounds(device: str) -> None:
    with RedZone(ZONE) as watch:
        payload = torch.zeros(3, dtype=torch.int16, device=device)
        front = payload.storage_offset() * 2
        poke(payload, -front, [0])
        poke(payload, payload.nbytes + ZONE - 1, [0])
    before, after = watch.check()
    assert (before.elements, before.first_offset_bytes, before.lower_bound) == (1, -front, True)
    assert front >= ZONE
    assert (after.elements, after.last_offset_bytes, after.lower_bound) == (1, ZONE - 2, True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x01, 0x7F, 0xB7, 0x4E, 0xD2, 0x6B])
def test_no_memset_of_two_bytes_or_more_hides(fill: int, device: str) -> None:
    with RedZone(ZONE) as watch:
        payload = torch.zeros(3, dtype=torch.bool, device=device)  # an odd end: the back zone starts on an odd address
        poke(payload, 3, [fill] * 2)
        poke(payload, -2, [fill] * 2)
    assert {hit.side for hit in watch.check()} == {"before", "after"}


@pytest.mark.parametrize("device", DEVICES)
def test_the_boundary_same_value_and_undone_writes_are_not_seen(device: str) -> None:
    with RedZone(ZONE) as watch:
        payload = torch.zeros(4, dtype=torch.int32, device=device)
        held = peek(payload, payload.nbytes, 8)
        poke(payload, payload.nbytes, held)
        assert watch.check() == []
        poke(payload, payload.nbytes, [0] * 8)
        poke(payload, payload.nbytes, held)
        assert watch.check() == []
        poke(payload, payload.nbytes, [held[0], 0])
        assert only(watch.check()).elements == 1


@pytest.mark.parametrize("device", DEVICES)
def test_a_non_contiguous_payload_ends_at_its_last_element(device: str) -> None:
    with RedZone(ZONE) as watch:
        payload = torch.empty_strided((2, 3), (1, 5), dtype=torch.int32, device=device)
        span = (1 + 1 + 2 * 5) * 4
        payload.fill_(7)
        poke(payload, span - 8, [1])  # a hole inside the span belongs to the payload
        assert watch.check() == []
        poke(payload, span, [1])
    assert only(watch.check()).first_offset_bytes == 0


@pytest.mark.parametrize("device", DEVICES)
def test_the_payload_is_aligned_and_an_overrun_outlives_its_tensor(device: str) -> None:
    with RedZone(ZONE) as watch:
        for count in (1, 3, 700):
            payload = torch.ones(count, dtype=torch.uint8, device=device)
            assert payload.data_ptr() % 512 == 0
        poke(payload, 700, [0])
        del payload
    assert only(watch.check()).allocation.shape == (700,)


@pytest.mark.parametrize(("side", "even", "odd"), [("before", 0xB7, 0x4E), ("after", 0xD2, 0x6B)])
@pytest.mark.parametrize(("start", "length"), [(0, 4), (0, 3), (1, 4), (1, 3), (2, 1)])
def test_a_zone_goes_by_its_place_in_the_storage(start: int, length: int, side: str, even: int, odd: int) -> None:
    whole = torch.zeros(8, dtype=torch.uint8)
    zone = Zone(whole[start : start + length], side, SimpleNamespace(dtype=torch.uint8)).arm()
    here = range(start, start + length)
    assert whole.tolist() == [(odd if at % 2 else even) if at in here else 0 for at in range(8)]
    assert not zone.is_changed()
    for at in range(length):
        zone.data[at] += 1
        assert zone.is_changed() and zone.changed().nonzero().tolist() == [[at]]
        zone.arm()


def test_a_hit_says_more_only_where_it_is_told() -> None:
    hit = Hit("after", 1, 0, 0, None, "red-zone")
    assert (hit.values, hit.lower_bound) == ((), False)


def test_a_hit_is_json_ready() -> None:
    with RedZone(ZONE) as watch:
        payload = torch.zeros(2, 2, dtype=torch.float16)
        poke(payload, 8, [0, 0])
    allocation = watch.allocations[0]
    assert json.loads(json.dumps(only(watch.check()).as_dict())) == {
        "side": "after", "elements": 1, "first_offset_bytes": 0, "last_offset_bytes": 0, "lower_bound": False,
        "values": [{"offset_bytes": 0, "old": 0x6BD2, "new": 0}],
        "allocation": {
            "label": "payload = torch.zeros(2, 2, dtype=torch.float16)", "site": allocation.site, "shape": [2, 2],
            "nbytes": 8, "dtype": "float16", "device": "cpu",
        },
        "detector": "red-zone",
    }  # fmt: skip


class Asked(Watch):
    """Says which device it was asked for, and gives nothing."""

    name = "asked"

    def place(self, nbytes: int, itemsize: int, device: torch.device) -> tuple[torch.Tensor, bool]:
        raise LookupError(str(device))


@pytest.mark.parametrize(
    ("device", "given"), [("cuda", "cuda:3"), ("cuda:1", "cuda:1"), (torch.device("cuda", 0), "cuda:0")], ids=str
)
def test_a_gpu_without_a_number_is_the_current_one(monkeypatch, device: Any, given: str) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with Asked(), pytest.raises(LookupError, match=f"^{given}$"):
        torch.zeros(3, device=device)


@pytest.mark.parametrize("detector", ["red-zone", "victim", "poison", "guard-page", "none"])
def test_a_check_waits_for_all_gpus_before_it_looks_and_after(monkeypatch, detector: str) -> None:
    """Else what a kernel has yet to write, and the error that it ends with, would be seen by nobody."""
    waited: list[int | str] = []

    def zones(_: Watch) -> list[Zone]:
        waited.append("looks")
        return []

    monkeypatch.setattr(DETECTORS[detector], "zones", zones)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    assert DETECTORS[detector](zone_bytes=ZONE).check() == []
    assert waited == [0, 1, "looks", 0, 1]


def test_memory_on_the_cpu_is_watched_while_a_gpu_is_capturing(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with RedZone(ZONE) as watch:
        made = [torch.ones(3), torch.arange(3)]
    assert [watch.allocation_of(each) is not None for each in made] == [True, True]
    assert [_capturing(torch.device(name)) for name in ("cpu", "cuda")] == [False, True]


@NO_CUDA
def test_allocations_of_a_capture_are_left_to_the_graph_pool() -> None:
    with RedZone(ZONE) as watch:
        static = torch.zeros(8, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = torch.ones(8, device="cuda") + static
        static.fill_(2)
        graph.replay()
        assert watch.check() == []
    assert result.tolist() == [3.0] * 8
    assert len(watch.allocations) == 1


# --- poison: reads that show ------------------------------------------------------------------------------------------


def read_outside(payload: torch.Tensor, at: int) -> torch.Tensor:
    """What a kernel finds ``at`` elements from the payload's start: a read, and nothing else."""
    with torch._C.DisableTorchFunction():
        return torch.as_strided(payload, (1,), (1,), payload.storage_offset() + at).clone()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("at", [-1, 5], ids=["one-before", "one-past"])
def test_a_stray_read_takes_poison_and_shows(at: int, dtype: torch.dtype, device: str) -> None:
    with Poison(ZONE) as watch:
        payload = torch.zeros(5, dtype=dtype, device=device)
        taken = read_outside(payload, at)
        assert watch.check() == [], "reading is not writing"
    value = taken.to(torch.complex128 if dtype.is_complex else torch.float64).cpu()
    if dtype.is_floating_point or dtype.is_complex:
        assert value.isnan().all(), "NaN, so that every sum with it is NaN"
    else:
        assert value.item() == 1, "an index that leads somewhere wrong, not one that flies far"
    assert read_outside(payload, 4).cpu().view(torch.uint8).count_nonzero() == 0, "inside, nothing is poisoned"


@pytest.mark.parametrize("device", DEVICES)
def test_a_read_through_a_stray_index_is_a_wrong_value(device: str) -> None:
    with Poison(ZONE):
        index = torch.tensor([2, 0, 3], device=device)
        values = torch.tensor([10, 11, 12, 13], device=device)
    whole = torch.as_strided(index, (4,), (1,), index.storage_offset())  # one program too many
    assert values[whole].tolist() == [12, 10, 13, 11]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_ends_of_both_poisoned_zones_are_watched_and_armed_again(dtype: torch.dtype, device: str) -> None:
    item = dtype.itemsize
    with Poison(ZONE) as watch:
        payload = torch.zeros(3, dtype=dtype, device=device)
        front = payload.storage_offset() * item
        poke(payload, -front, [0] * item)
        poke(payload, payload.nbytes + ZONE - item, [0] * item)
        before, after = watch.check()
        assert (before.elements, before.first_offset_bytes, before.lower_bound) == (1, -front, True)
        assert (after.elements, after.last_offset_bytes, after.lower_bound) == (1, ZONE - item, True)
        assert {hit.detector for hit in (before, after)} == {"poison"}
        assert after.values[0][2] == 0
        assert watch.check() == []


@pytest.mark.parametrize("device", DEVICES)
def test_the_boundary_of_poison_a_masked_read_and_a_write_of_the_same(device: str) -> None:
    with Poison(ZONE) as watch:
        payload = torch.zeros(4, dtype=torch.int32, device=device)
        assert (read_outside(payload, 4) * 0).item() == 0, "what masks the value hides the read"
        poke(payload, payload.nbytes, [1, 0, 0, 0])
        assert watch.check() == []


# --- victim ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_the_next_allocation_is_the_victim(device: str) -> None:
    with Victim(ZONE) as watch:
        buffer = torch.zeros(128, dtype=torch.int32, device=device)  # 512 B: no gap
        tokens = torch.full((4,), 3, dtype=torch.int64, device=device)
        assert tokens.data_ptr() == buffer.data_ptr() + 512
        poke(buffer, 512, [1, 0, 0, 0, 9, 0, 0, 0])  # two stray int32 make one int64
        assert watch.check() == [], "a neighbour's payload is not a gap"
        neighbour = watch.neighbour(buffer[5:])
        assert neighbour is not None
        assert neighbour.view(torch.int64).tolist() == tokens.tolist() == [1 + (9 << 32), 3, 3, 3]
        assert watch.neighbour(tokens) is None
        with pytest.raises(ValueError, match="no allocation of this arena"):
            watch.neighbour(SOURCE)


@pytest.mark.parametrize(("asked", "given"), [(511, None), (512, 512), (513, 1024), (4096, 4096)])
def test_a_chunk_is_512_bytes_or_more(asked: int, given: int | None) -> None:
    if given:
        assert Victim(ZONE, chunk_bytes=asked).chunk_bytes == given
    else:
        with pytest.raises(ValueError, match=f"chunk_bytes is {asked}: must be at least 512"):
            Victim(ZONE, chunk_bytes=asked)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 3, 100, 511, 513])
def test_a_gap_is_the_rest_up_to_512_bytes(count: int, device: str) -> None:
    with Victim(ZONE) as watch:
        first = torch.zeros(count, dtype=torch.uint8, device=device)
        second = torch.zeros(count, dtype=torch.uint8, device=device)
        gap = -count % 512
        assert second.data_ptr() - first.data_ptr() == count + gap
        poke(first, count, [0] * gap)
        hit = only(watch.check())
        assert (hit.elements, hit.first_offset_bytes, hit.last_offset_bytes) == (gap, 0, gap - 1)
        assert hit.lower_bound, "it may have gone on into the neighbour"
        assert hit.allocation == watch.allocation_of(first)


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_end_in_zones_and_a_large_request_gets_its_own(device: str) -> None:
    with Victim(ZONE, chunk_bytes=1024) as watch:
        first = torch.zeros(600, dtype=torch.uint8, device=device)
        large = torch.zeros(5000, dtype=torch.uint8, device=device)
        second = torch.zeros(600, dtype=torch.uint8, device=device)  # does not fit the first chunk's rest
        assert [watch.neighbour(t) for t in (first, large, second)] == [None] * 3
        for tensor in (first, large, second):
            assert tensor.data_ptr() % 512 == 0
            poke(tensor, -ZONE, [0])
        poke(large, 5120 + ZONE - 1, [0])
    assert [(h.side, h.allocation.shape, h.lower_bound) for h in watch.check()] == [
        ("before", (600,), True),
        ("before", (5000,), True),
        ("after", (5000,), True),
        ("before", (600,), True),
    ]


def test_each_gap_of_a_chunk_is_watched_whatever_came_after() -> None:
    with Victim(ZONE, chunk_bytes=2048) as watch:
        tensors = [torch.zeros(500, dtype=torch.uint8) for _ in range(4)]  # they fill it
        assert [watch.neighbour(tensor) is None for tensor in tensors] == [False, False, False, True]
        for tensor in tensors:
            poke(tensor, 500, [0])
        hits = watch.check()
    assert [(hit.side, hit.allocation) for hit in hits] == [
        ("after", watch.allocation_of(tensor)) for tensor in tensors
    ]


def test_what_takes_a_whole_chunk_has_no_neighbours_and_leaves_none() -> None:
    with Victim(ZONE, chunk_bytes=1024) as watch:
        tensors = [torch.zeros(nbytes, dtype=torch.uint8) for nbytes in (512, 1024, 512)]
        assert [watch.neighbour(tensor) for tensor in tensors] == [None] * 3


# --- memory in which others were before ------------------------------------------------------------------------------

EMPTIES = {
    "empty": lambda device: torch.empty(3, 5, device=device),
    "empty_like of a transpose": lambda device: torch.empty_like(torch.zeros(3, 5, device=device).t()),
    "empty_strided": lambda device: torch.empty_strided((3, 2), (5, 2), device=device),
    "new_empty": lambda device: torch.zeros(1, device=device).new_empty((2, 2), dtype=torch.bool),
    "requires_grad": lambda device: torch.empty(4, requires_grad=True, device=device),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("detector", ["red-zone", "victim"])
@pytest.mark.parametrize("factory", EMPTIES.values(), ids=EMPTIES.keys())
def test_what_a_factory_leaves_as_it_is_is_filled_where_others_were(monkeypatch, factory, detector, device) -> None:
    monkeypatch.setattr(Watch, "fresh", 0xA5)
    with DETECTORS[detector](zone_bytes=ZONE) as watch:
        made = factory(device)
        hits = watch.check()
    assert set(made.detach().contiguous().view(torch.uint8).flatten().tolist()) == {0xA5} and hits == []
    with DETECTORS[detector](zone_bytes=ZONE):
        assert torch.zeros(3, device=device).tolist() == [0, 0, 0] and torch.tensor([7], device=device).tolist() == [7]


def test_pages_in_which_nobody_was_are_left_as_they_are(monkeypatch) -> None:
    """They hold zeros, and to fill them would take all the memory that a large payload doesn't touch."""
    monkeypatch.setattr(Watch, "fresh", 0xA5)
    with GuardPage():
        assert torch.empty(3, dtype=torch.uint8).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("guarded", "allocated", "sizes", "done"),
    [
        pytest.param(0, (0, 512), (100,), ("wait", "free"), id="still in use"),
        pytest.param(20, (0, 512), (100,), ("wait", "free"), id="guarded and still in use"),
        pytest.param(0, (0, 0), (), ("wait", "free", "wait"), id="nothing kept"),
        pytest.param(0, (0, 0), (100, (1 << 30) - 100), ("wait", "free", "fill", "fill", "wait"), id="all may stay"),
        pytest.param(0, (0, 0), (1 << 30, 1), ("wait", "free", "fill", "fill", "wait", "empty"), id="more than may"),
    ],
)
def test_scrub_fills_all_that_an_allocator_keeps_or_nothing(monkeypatch, guarded, allocated, sizes, done) -> None:
    """A GPU's allocator is played here; in test_resident.py it is a real one."""
    steps: list[str] = []
    filled: list[tuple[int, int, str, int]] = []

    class Kept:
        def __init__(self, whole: Any, device: torch.device) -> None:
            told = whole.__cuda_array_interface__
            self._what = (told["data"][0], *told["shape"], str(device))

        def fill_(self, byte: int) -> None:
            steps.append("fill")
            filled.append((*self._what, byte))

    segments = [{"address": 4096 * at, "total_size": size, "device": at} for at, size in enumerate(sizes)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: steps.append("wait"))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: steps.append("free"), raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(allocated))
    monkeypatch.setattr(torch.cuda, "memory_allocated", allocated.__getitem__)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: steps.append("empty"))
    monkeypatch.setattr(torch, "as_tensor", Kept)
    monkeypatch.setattr("harness.memory.scrub.unmap_retired", lambda: guarded)
    assert scrub(0xA5) == guarded + sum(allocated)
    assert tuple(steps) == done
    assert filled == [(4096 * at, size, f"cuda:{at}", 0xA5) for at, size in enumerate(sizes) if "fill" in done]


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_what_a_capture_allocates_is_filled_and_not_watched(monkeypatch) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    monkeypatch.setattr(Watch, "fresh", 0xA5)
    monkeypatch.setattr("harness.memory.watch._capturing", lambda device: True)
    with RedZone(ZONE) as watch:
        empty, ones, three = torch.empty(3, dtype=torch.uint8), torch.ones(3), torch.arange(3)
        nothing, sparse = torch.empty(0), torch.empty(3, layout=torch.sparse_coo)
        assert torch.empty_like(quantized).is_quantized
    assert empty.tolist() == [0xA5] * 3 and ones.tolist() == [1] * 3 and three.tolist() == [0, 1, 2]
    assert nothing.numel() == 0 and sparse.layout == torch.sparse_coo
    assert watch.allocations == []


def test_without_a_context_there_is_nothing_to_scrub(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.delattr(torch.cuda, "synchronize")
    assert scrub(0xA5) == 0


# --- guard page ------------------------------------------------------------------------------------------------------

STRAY = """
import ctypes, torch
from harness.memory.guard_page import GuardPage
with GuardPage() as watch:
    payload = torch.zeros({count}, dtype=torch.int32)
    payload.fill_(1)
    assert watch.check() == []
    print("armed", flush=True)
    address = payload.data_ptr() + {offset}
    {access}
    watch.check()
    print("survived", flush=True)
"""
WRITE, READ = "ctypes.memset(address, 1, 1)", "ctypes.string_at(address, 1)"


@pytest.fixture
def alone(sandbox: Sandbox, tmp_path: Path) -> Callable[[str], Ending]:
    """``alone(code)``: how a process that runs it ends, where there is no GPU."""
    (tmp_path / "unfix_alone.py").write_text("def leg(params, device): exec(params['code'], {})")
    return lambda code: sandbox.run(Request("unfix_alone:leg", {"code": code}, path=[str(tmp_path)]))


@pytest.mark.parametrize(
    ("count", "offset", "access"),
    [
        pytest.param(5, 20, WRITE, id="one-past"),
        pytest.param(5, 20, READ, id="one-past-read"),
        pytest.param(1024, 4096 + (1 << 33), WRITE, id="8-GiB-past"),
        pytest.param(1024, -1, WRITE, id="one-before-a-whole-page"),
        pytest.param(1024, -1, READ, id="one-before-a-whole-page-read"),
        pytest.param(5, -(1 << 33), WRITE, id="int32-wrap-around"),
    ],
)
def test_a_stray_access_is_a_segfault(count: int, offset: int, access: str, alone) -> None:
    done = alone(STRAY.format(count=count, offset=offset, access=access))
    assert (done.signal, done.stdout) == ("SIGSEGV", "armed\n"), done.stderr


def test_the_last_byte_of_the_payload_is_no_fault(alone) -> None:
    done = alone(STRAY.format(count=5, offset=19, access=WRITE))
    assert (done.signal, done.stdout) == (None, "armed\nsurvived\n"), done.stderr


@NO_CUDA
@pytest.mark.parametrize("access", ["tl.store(out + at, 1)", "tl.store(out, tl.load(out + at))"], ids=["write", "read"])
@pytest.mark.parametrize("count", [5, 1024])
def test_a_stray_cuda_kernel_is_an_illegal_access(count: int, access: str, tmp_path: Path) -> None:
    code = f"""
import torch, triton, triton.language as tl
from harness.memory.guard_page import GuardPage

@triton.jit
def touch(out, at):
    {access}

with GuardPage() as watch:
    payload = torch.zeros({count}, dtype=torch.int32, device="cuda")
    touch[(1,)](payload, {count - 1})
    assert watch.check() == []
    print("armed", flush=True)
    touch[(1,)](payload, {count})
    watch.check()
"""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    script = tmp_path / "stray.py"  # triton reads a kernel's source from its file
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout == "armed\n", done.stderr
    assert "illegal memory access" in done.stderr


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 3, 8, 5000])
def test_a_guarded_payload_is_flush_and_aligned(count: int, dtype: torch.dtype, device: str) -> None:
    with GuardPage(front_bytes=4096, back_bytes=4096) as watch:
        payload = torch.ones(count, dtype=dtype, device=device)
        assert (payload.data_ptr() + payload.nbytes) % 4096 == 0
        assert payload.data_ptr() % dtype.itemsize == 0
        assert payload.data_ptr() % min(16, payload.nbytes & -payload.nbytes) == 0
        assert payload.view(torch.uint8).count_nonzero() > 0
        assert watch.check() == []


def test_alignment_can_be_bought_with_slack() -> None:
    with GuardPage(align=16):
        payload = torch.zeros(5, dtype=torch.int32)
    assert payload.data_ptr() % 16 == 0
    assert (payload.data_ptr() + payload.nbytes) % 4096 == 4096 - 12
    for wrong in (12, 0, -1):
        with pytest.raises(ValueError, match=f"align is {wrong}: must be a power of two"):
            GuardPage(align=wrong)


def test_a_sparse_12_gb_buffer_costs_only_what_is_touched() -> None:
    with GuardPage():
        buffer = torch.zeros(5, 600_000_000, dtype=torch.int32)
        resident = int(Path("/proc/self/statm").read_text().split()[1])
        buffer[:, :100] = 7
        grown = int(Path("/proc/self/statm").read_text().split()[1]) - resident
    assert buffer[4, 99] == 7 and buffer[4, -1] == 0
    assert grown < 1000


SPARSE = """
import torch
from harness.memory import GuardPage, folds, touches
nbytes = 5 * 600_000_000 * 4
with GuardPage() as watch:
    touches(nbytes, [(row * 2_400_000_000, row * 2_400_000_000 + 400) for row in range(5)])
    rows = torch.zeros(5, 600_000_000, dtype=torch.int32, device="{device}")
    assert rows[:, :100].count_nonzero() == 0
    rows[:, :100] = 7
    assert watch.check() == [] and (rows[:, :100] == 7).all()
    print("armed", flush=True)
    {access}
    watch.check()
    print("survived", flush=True)
"""
ACCESSES = {
    "in a span": "rows[4, 99].fill_(8)",
    "a write between": "rows[4, 5_000_000].fill_(8)",
    "a read between": "rows[0, 300_000_000].item()",
    "the last element": "rows[4, 599_999_999].fill_(8)",
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("access", ACCESSES)
def test_a_sparse_payload_faults_outside_of_what_is_touched(access: str, device: str, alone) -> None:
    code = SPARSE.format(access=ACCESSES[access], device=device)
    if device == "cpu":
        done = alone(code)
        assert done.signal == (None if access == "in a span" else "SIGSEGV"), done.stderr
    else:
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout == ("armed\nsurvived\n" if access == "in a span" else "armed\n"), done.stderr


def test_only_a_payload_of_that_very_size_is_sparse_and_only_a_large_one() -> None:
    large = LEAST + 4096
    with GuardPage(front_bytes=4096, back_bytes=4096) as watch:
        for nbytes in (large, 8192):
            touches(nbytes, [(0, 4096)])
        torch.zeros(large + 1, dtype=torch.uint8).fill_(1)
        torch.zeros(8192, dtype=torch.uint8).fill_(1)
        assert list(watch.sparse) == [large]
    with RedZone() as zone:
        touches(large, [(0, 4096)])
        torch.zeros(large, dtype=torch.uint8).fill_(1)
        assert zone.check() == []


@NO_CUDA
def test_sparse_and_folded_payloads_take_little_device_memory() -> None:
    free = torch.cuda.mem_get_info()[0]
    with GuardPage() as watch:
        touches(12_000_000_000, [(row * 2_400_000_000, row * 2_400_000_000 + 400) for row in range(5)])
        folds(8 << 30)
        rows = torch.zeros(5, 600_000_000, dtype=torch.int32, device="cuda")
        folded = torch.empty(1 << 31, dtype=torch.int32, device="cuda")
        folded.fill_(3)
        assert int(folded[-1]) == int(folded[0]) == 3 and int(rows[4, 99]) == 0
        assert free - torch.cuda.mem_get_info()[0] < 64 << 20
        del rows, folded
        assert watch.check() == []
    assert torch.cuda.mem_get_info()[0] >= free - (4 << 20)


def test_a_dead_payload_is_unmapped() -> None:
    with GuardPage():
        payload = torch.zeros(5, dtype=torch.int32)
        base = payload.data_ptr() & -4096
        view = payload[1:]
        del payload
        assert mapped(base), "a view keeps the storage"
        del view
    assert not mapped(base)


def mapped(address: int) -> bool:
    libc = ctypes.CDLL(None)
    vector = ctypes.create_string_buffer(1)
    return libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(4096), vector) == 0


def test_a_guard_is_as_large_as_a_zone_at_least() -> None:
    watch = GuardPage(1 << 20, front_bytes=4096, back_bytes=1 << 21)
    assert (watch.front_bytes, watch.back_bytes) == (1 << 20, 1 << 21)
    assert (GuardPage().front_bytes, GuardPage().back_bytes) == (16 << 30, 16 << 30)


def test_no_address_space_for_a_guard_is_one_clear_line() -> None:
    with (
        GuardPage(front_bytes=1 << 50),
        pytest.raises(MemoryError, match=r"^guard page: no \d+ bytes of address space to reserve \(errno 12\)$"),
    ):
        torch.zeros(3)


def test_a_payload_that_cannot_be_mapped_gives_its_guards_back(monkeypatch) -> None:
    libc, freed = guard_page._libc(), []

    def munmap(base: int, total: int) -> int:
        freed.append(total)
        return libc.munmap(base, total)

    played = SimpleNamespace(mmap=libc.mmap, mprotect=lambda *_: -1, munmap=munmap)
    monkeypatch.setattr(guard_page, "_libc", lambda: played)
    refused = pytest.raises(MemoryError, match="^guard page: cannot map 4096 payload bytes")
    with GuardPage(4096, front_bytes=8192, back_bytes=4096) as watch, refused:
        torch.zeros(3)
    assert freed == [8192 + 4096 + 4096] and watch.allocations == []
    answers = iter([0, -1])
    played.mprotect = lambda *_: next(answers)
    with GuardPage(4096, front_bytes=8192, back_bytes=4096) as watch, refused:
        watch.sparse[12288] = ((0, 1), (8192, 8193))
        torch.zeros(12288, dtype=torch.uint8)


def test_what_no_tensor_holds_any_more_is_unmapped_at_a_check(monkeypatch) -> None:
    unmapped: list[str] = []
    monkeypatch.setattr(guard_page, "_RETIRED", [lambda: unmapped.append("one"), lambda: unmapped.append("two")])
    assert GuardPage().check() == []
    assert sorted(unmapped) == ["one", "two"] and guard_page._RETIRED == []
    monkeypatch.setattr(guard_page, "_MAPPED", {4096: 20, 8192: 300})
    assert guard_page.unmap_retired() == 320


def test_only_a_sparse_payload_is_known_to_hold_zeros_on_cuda(monkeypatch) -> None:
    monkeypatch.setattr(GuardPage, "_map_cuda", lambda self, nbytes, spaced, device: (nbytes, spaced, device))
    watch, device = GuardPage(align=16), torch.device("cuda", 0)
    watch.sparse[20] = None
    assert [watch.place(nbytes, 4, device) for nbytes in (20, 24)] == [
        ((20, 32, device), True),
        ((24, 32, device), False),
    ]


def test_a_payload_can_be_used_as_long_as_python_runs() -> None:
    code = """
import atexit
atexit.register(lambda: print(int(kept.sum())))
import torch
from harness.memory import GuardPage
with GuardPage():
    kept = torch.ones(3)
"""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout == "3\n", done.stderr


@pytest.mark.parametrize(
    ("spans", "mapped"),
    [
        pytest.param(None, [(0, 112)], id="all of it"),
        pytest.param([], [(0, 16)], id="its first byte alone"),
        pytest.param([(11, 12)], [(0, 16)], id="up to the end of a page"),
        pytest.param([(11, 13)], [(0, 32)], id="over it"),
        pytest.param([(12, 13)], [(0, 32)], id="the next page"),
        pytest.param([(28, 44)], [(0, 16), (32, 48)], id="a page of the middle"),
        pytest.param([(27, 45)], [(0, 64)], id="a byte more at both ends"),
        pytest.param([(99, 100), (40, 41)], [(0, 16), (32, 48), (96, 112)], id="in any order"),
        pytest.param([(30, 70), (34, 35), (60, 62)], [(0, 16), (32, 80)], id="within another"),
    ],
)
def test_what_is_touched_is_mapped_in_whole_pages_and_nothing_else_is(spans, mapped) -> None:
    """A payload of 100 bytes, 4 bytes into the first of its pages of 16."""
    watch = GuardPage()
    if spans is not None:
        watch.sparse[100] = tuple(spans)
    assert watch._touched(100, 4, 16) == mapped


@pytest.mark.parametrize("start", [0, 15])
def test_a_payload_s_first_byte_is_mapped_wherever_it_is_in_its_page(start: int) -> None:
    watch = GuardPage()
    watch.sparse[100] = ()
    assert watch._touched(100, start, 16) == [(0, 16)]


def test_what_torch_and_the_driver_are_told_and_say() -> None:
    told = {"shape": (20,), "typestr": "|u1", "data": (4096, False), "strides": None, "version": 3}
    assert guard_page._CudaBytes(4096, 20).__cuda_array_interface__ == told
    assert guard_page._driven((0, "a handle", "more")) == "a handle" and guard_page._driven((0,)) is None
    with pytest.raises(RuntimeError, match="^guard page: the CUDA driver refused: 2$"):
        guard_page._driven((2,))


def test_cuda_without_its_bindings_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ImportError, match="^the guard page on CUDA needs cuda.bindings: pip install cuda-bindings$"):
        GuardPage().place(4, 4, torch.device("cuda", 0))
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver="the driver"))
    assert guard_page._cuda_driver() == "the driver"
