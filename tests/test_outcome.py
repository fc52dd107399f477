"""Outcomes read off made-up endings: no process, every row a claim."""

from __future__ import annotations

from typing import get_args

import pytest

from harness.outcome import Leg, read
from harness.sandbox import Ending
from harness.togglefile import Outcome

GUARD = "row too small"
ALLOCATION = {"label": "self.kv = torch.zeros(", "site": "/a/b/base.py:91", "shape": [2, 8], "dtype": "int32"}


def hit(elements=2, first=0, last=7, side="after"):
    return {
        "side": side, "elements": elements, "first_offset_bytes": first, "last_offset_bytes": last,
        "allocation": ALLOCATION, "values": [1] * min(elements, 8),
    }  # fmt: skip


def ending(
    *,
    raised=None,
    wrong=None,
    hits=(),
    stderr="",
    exit_code=0,
    signal=None,
    timed_out=False,
    died=False,
    trace="",
    **more,
):
    named = {"type": raised[0], "message": raised[1], "trace": trace} if raised else None
    report = {"raised": named, "wrong": wrong, "hits": list(hits), "facts": {"row": 16}, **more}
    code = None if signal else exit_code
    return Ending(None if died or signal else report, ("a.b",), "", stderr, code, signal, timed_out, 1.5)


def leg(end, detector="red-zone", predicted=2):
    return read(end, reverted=["1:x"], guards=[GUARD], detector=detector, predicted=predicted, targets=["a.b"])


FIRED = ("AssertionError", "kv_indices row too small: need 10")
DEVICE = ("AcceleratorError", "CUDA error: device-side assert triggered\nCUDA kernel errors might be late")
ABORT = "x.cuh:9: f: Assertion `row too small' failed.\n"

# what the process left -> outcome, a part of its one line, whether the machine is at fault
ROWS = {
    "nothing at all": (ending(), "clean", "", False),
    "a value that differs": (ending(wrong="kv_indices[0]: 5, reference 6"), "wrong", "reference 6", False),
    "a stray write": (ending(hits=[hit()]), "overflow", "", False),
    "a stray write and a wrong value": (ending(hits=[hit()], wrong="x[0]: 1"), "overflow", "x[0]", False),
    "a stray write, then an error": (ending(hits=[hit()], raised=("ValueError", "later")), "overflow", "later", False),
    "a stray write, then the guard": (ending(hits=[hit()], raised=FIRED), "overflow", "row too small", False),
    "the guard": (ending(raised=FIRED), "guarded", "AssertionError: kv_indices row too small: need 10", False),
    "the guard, in a C++ assert": (ending(signal="SIGABRT", stderr=ABORT), "guarded", "Assertion", False),
    "the guard, in a device assert": (ending(raised=DEVICE, stderr=ABORT), "guarded", "Assertion", False),
    "the guard's words in a clean run's log": (ending(stderr=f"note: {GUARD}"), "clean", "", False),
    "a fault": (ending(signal="SIGSEGV", stderr='  File "/x/own.py", line 3 in fill\n'), "crashed", "in fill", False),
    "an abort by others": (ending(signal="SIGABRT", stderr="double free"), "crashed", "SIGABRT", False),
    "a device error": (ending(raised=DEVICE), "crashed", "device-side assert", False),
    "an illegal access": (ending(raised=("E", "CUDA error: an illegal memory access")), "crashed", "illegal", False),
    "an exception": (ending(raised=("KeyError", "'a'")), "error", "KeyError: 'a'", False),
    "an exception without words": (ending(raised=("ValueError", "")), "error", "ValueError", False),
    "too slow": (ending(signal="SIGKILL", timed_out=True), "hung", "did not end within", False),
    "too slow, with a guard's words": (
        ending(signal="SIGKILL", timed_out=True, stderr=GUARD),
        *("hung", "did not end", False),
    ),
    "killed, as the kernel kills who eats all memory": (ending(signal="SIGKILL"), "crashed", "SIGKILL", True),
    "no report": (ending(died=True, exit_code=70), "error", "exit 70 without a report", True),
    "no report, exit 0": (ending(died=True, exit_code=0), "error", "exit 0 without a report", True),
    "no memory": (ending(raised=("OutOfMemoryError", "CUDA out of memory.")), "error", "out of memory", True),
    "no host memory": (
        ending(raised=("RuntimeError", "[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes")),
        *("error", "can't allocate memory", True),
    ),
    "no room": (ending(raised=("OSError", "[Errno 28] No space left on device")), "error", "No space", True),
    "no package": (ending(raised=("ModuleNotFoundError", "No module named 'x'")), "error", "No module", True),
    "no compiler": (ending(raised=("ToolchainError", "needs a C++ compiler")), "error", "compiler", True),
}


# an error that is the machine's, by its type or by its words; the same with other words is not
MACHINE = [
    ("OutOfMemoryError", ""),
    ("MemoryError", ""),
    ("ToolchainError", ""),
    ("ModuleNotFoundError", ""),
    ("PermissionError", ""),
    ("RuntimeError", "CUDA out of memory. Tried to"),
    ("RuntimeError", "DefaultCPUAllocator: can't allocate memory"),
    ("OSError", "No space left on device"),
    ("RuntimeError", "CUDA_ERROR_OUT_OF_MEMORY"),
    ("RuntimeError", "CUDA error: out of memory"),
    ("RuntimeError", "CUDA error: no kernel image is available"),
    ("RuntimeError", "CUDA error: initialization error"),
    ("RuntimeError", "CUDA error: all CUDA-capable devices are busy or unavailable"),
]


@pytest.mark.parametrize("raised", MACHINE, ids=": ".join)
def test_the_machine_is_at_fault(raised):
    assert leg(ending(raised=raised)).infra == ": ".join(raised)
    assert leg(ending(raised=("IndexError", "out of range"))).infra == ""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGXCPU", "SIGXFSZ"])
def test_a_signal_from_outside_is_the_machine_s(name):
    assert leg(ending(signal=name)).infra == name


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP"])
def test_a_signal_from_inside_is_the_code_s(name):
    assert (leg(ending(signal=name)).outcome, leg(ending(signal=name)).infra) == ("crashed", "")


@pytest.mark.parametrize("name", ROWS)
def test_outcome(name):
    end, outcome, part, infra = ROWS[name]
    got = leg(end)
    assert got.outcome == outcome
    assert part in got.error and "\n" not in got.error
    assert bool(got.infra) == infra


def test_every_outcome_has_a_row():
    assert {row[1] for row in ROWS.values()} == set(get_args(Outcome))


VICTIM = {  # the victim detector is there to show what the stray write leads to
    "nothing raised": (ending(hits=[hit()]), "overflow"),
    "the gather meets it": (ending(hits=[hit()], raised=("IndexError", "index out of range")), "error"),
    "the gather meets it on a GPU": (ending(hits=[hit()], raised=DEVICE), "crashed"),
    "no stray write in a gap": (ending(wrong="drafts differ"), "wrong"),
}


@pytest.mark.parametrize("name", VICTIM)
def test_the_victim_detector_lets_the_consequence_speak(name):
    end, outcome = VICTIM[name]
    assert leg(end, detector="victim").outcome == outcome


@pytest.mark.parametrize(
    ("end", "detector", "outcome"),
    [
        (ending(watched=0), "red-zone", "error"),
        (ending(watched=1), "red-zone", "clean"),
        (ending(watched=0), "none", "clean"),
        (ending(watched=0, wrong="x[0]: 1"), "red-zone", "wrong"),
    ],
)
def test_clean_means_nothing_where_no_allocation_was_watched(end, detector, outcome):
    got = leg(end, detector=detector)
    assert got.outcome == outcome
    assert got.error.startswith("the red-zone detector watched no allocation") == (outcome == "error")


FRAME = '  File "{}", line 3 in {}\n'
OWN, LIBRARY = FRAME.format("/x/own.py", "fill"), FRAME.format("/v/site-packages/torch/x.py", "copy_")
STANDARD = FRAME.format("/usr/lib/python3.11/threading.py", "run")


@pytest.mark.parametrize(
    ("stderr", "name"),
    [
        (LIBRARY + STANDARD + OWN + FRAME.format("/x/own.py", "main"), " in fill"),
        (LIBRARY + STANDARD, " in copy_"),
        (STANDARD + LIBRARY, " in run"),
        ("double free", ""),
    ],
)
def test_a_dying_process_names_the_code_that_called(stderr, name):
    assert leg(ending(signal="SIGSEGV", stderr=stderr)).error == f"SIGSEGV{name}"


def test_an_overflow_as_the_json_contract_has_it():
    over = leg(ending(hits=[{**hit(9, 4, 39), "values": list(range(9)), "lower_bound": True}]), predicted=8).overflow
    assert over == {
        "side": "after", "predicted_elements": 8, "observed_elements": 9, "first_offset_bytes": 4,
        "last_offset_bytes": 39, "detector": "red-zone", "lower_bound": True, "values": list(range(8)),
        "buffers": ["(2, 8) int32 at base.py:91: self.kv = torch.zeros("],
        "hits": [{
            "side": "after", "elements": 9, "first_offset_bytes": 4, "last_offset_bytes": 39,
            "shape": [2, 8], "dtype": "int32",
        }],
    }  # fmt: skip
    assert "lower_bound" not in leg(ending(hits=[hit()])).overflow


def test_hits_are_added_up_over_buffers():
    over = leg(ending(hits=[hit(3, 4, 15), hit(5, 0, 19, "before")]), predicted=8).overflow
    assert over["side"] == "after/before"
    assert (over["observed_elements"], over["predicted_elements"]) == (8, 8)
    assert (over["first_offset_bytes"], over["last_offset_bytes"]) == (0, 19)
    assert over["buffers"][0] == "(2, 8) int32 at base.py:91: self.kv = torch.zeros("
    assert over["values"] == [1] * 8


def test_a_leg_as_the_json_contract_has_it():
    clean = leg(ending()).as_dict()
    assert clean == {"reverted": ["1:x"], "outcome": "clean", "seconds": 1.5, "facts": {"row": 16}}
    stray = leg(ending(hits=[hit()], wrong="x[0]: 1")).as_dict()
    assert stray["error"] == "x[0]: 1" and stray["overflow"]["observed_elements"] == 2
    assert Leg(("1:x",), "clean", 1.5).as_dict() == {"reverted": ["1:x"], "outcome": "clean", "seconds": 1.5}
    assert Leg((), "clean", 1.5, shared=True).as_dict()["shared"] is True


@pytest.mark.parametrize(
    ("end", "trace"),
    [
        (ending(raised=("KeyError", "'a'"), trace="Traceback", stderr="noise"), "Traceback"),
        (ending(signal="SIGSEGV", stderr="y" + "x" * 4000), "x" * 4000),
    ],
)
def test_what_a_leg_printed_as_it_failed_is_kept_for_who_asks(end, trace):
    assert leg(end).as_dict(trace=True)["trace"] == trace
    assert "trace" not in leg(end).as_dict() and "trace" not in leg(ending()).as_dict(trace=True)


def test_the_evidence_holds_all_that_a_reason_is_searched_in():
    evidence = leg(ending(hits=[hit()], wrong="x[0]: 1", stderr="on stderr")).evidence
    assert evidence == f"x[0]: 1\nx[0]: 1\non stderr\n{hit()}"
    evidence = leg(ending(raised=("E", "one\ntwo"), wrong="x[0]: 1", stderr="on stderr")).evidence
    assert evidence == "E: one\none\ntwo\nx[0]: 1\non stderr"
