"""The prover, from toggle files to a verdict, on a package of its own with real overlays and real legs."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import fixes
from harness.case import Case, Stray
from harness.errors import InfraError, RottedError
from harness.prover import Prover
from harness.sandbox import Request, Sandbox, Servers
from harness.turns import MUCH

PACKAGE = """
import ctypes

import torch


def width(n, topk):
    return n * topk


def check(used, have):
    if used > have:
        raise AssertionError(f"buffer too small: {used} of {have}")


def unused():
    return 1


def spare(n):
    return n + 0


def fill(n, topk):
    used = n * topk
    buffer = torch.zeros(width(n, topk), dtype=torch.int32)
    check(used, buffer.numel())
    (ctypes.c_int32 * used).from_address(buffer.data_ptr())[:] = list(range(1, used + 1))
    return spare(int(buffer.sum()))
"""
LEGS = """
import os, signal, sys, time

def fill(params, device):
    from harness.leg import WrongValues
    from tinypkg import work
    got = work.fill(params["n"], params["topk"])
    used = params["n"] * params["topk"]
    if got != used * (used + 1) // 2: raise WrongValues(f"sum {got}")
    return {"sum": got}

def kills(params, device): os.kill(os.getppid(), signal.SIGKILL)
def pid(params, device): return {"pid": os.getpid()}
def starves(params, device): raise MemoryError("no memory")

def is_disturbed(params, device):
    # in a process in which it ran before, and then only, it does as it is told
    before, sys.unfix_ran = getattr(sys, "unfix_ran", False), True
    if before and params["how"] == "dies": os.kill(os.getpid(), signal.SIGSEGV)
    if before and params["how"] == "is wrong": params = {**params, "n": 1}
    return fill(params, device)

def lingers(params, device):
    exits, os._exit = os._exit, lambda code: (time.sleep(0.5), exits(code))
    before = open(params["note"]).read().split() if os.path.exists(params["note"]) else []
    with open(params["note"], "a") as note: print(os.getpid(), file=note)
    return {**fill(params, device), "alone": not any(os.path.exists(f"/proc/{pid}") for pid in before)}

def dies_late(params, device):
    os._exit = lambda code: os.kill(os.getpid(), signal.SIGSEGV)
    return fill(params, device)
"""
TOGGLES = """
pr: 1
title: a title
fixes:
  size:
    kind: size
    summary: one sentence
    scenario: tiny
    legs:
      - {out: [size], outcome: guarded, reason: buffer too small}
      - {out: [size, guard], outcome: overflow, reason: torch.zeros}
    reversals:
      eagle_kv: [{target: tinypkg.work.width, edits: [{match: return n * topk, replacement: return n}]}]
  guard:
    kind: guard
    summary: one sentence
    guard: buffer too small
    reversals:
      eagle_kv: [{target: tinypkg.work.fill, edits: [{match: "check(used, buffer.numel())", replacement: ""}]}]
  unused:
    kind: arithmetic
    summary: one sentence
    scenario: tiny
    legs: [{out: [unused], outcome: wrong}]
    reversals:
      eagle_kv: [{target: tinypkg.work.unused, edits: [{match: return 1, replacement: return 2}]}]
  spare:
    kind: arithmetic
    summary: one sentence
    scenario: tiny
    legs: [{out: [spare], outcome: wrong}]
    reversals:
      eagle_kv: [{target: tinypkg.work.spare, edits: [{match: return n + 0, replacement: return n}]}]
  gpu-only:
    kind: arithmetic
    summary: one sentence
    scenario: tiny
    legs: [{out: [gpu-only], outcome: {cpu: clean, cuda: wrong}}]
    reversals:
      eagle_kv: [{target: tinypkg.work.spare, edits: [{match: return n + 0, replacement: return n}]}]
  elsewhere:
    kind: arithmetic
    summary: one sentence
    scenario: tiny
    legs: [{out: [elsewhere], outcome: wrong}]
    reversals:
      sglang: [{target: sglang.nothing, edits: [{match: a, replacement: b}]}]
"""


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("UNFIX_CACHE", str(tmp_path / "cache"))
    for name, text in {
        "kernels/tinypkg/__init__.py": "",
        "kernels/tinypkg/work.py": PACKAGE,
        "unfix_test_tiny_legs.py": LEGS,
        "toggles/1.yaml": TOGGLES,
    }.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "project"


@pytest.fixture
def prover(project, sandbox):
    return make(project, sandbox)


def make(project, sandbox, **more):
    more = {"device": "cpu", **more}
    return Prover(fixes.load(project / "toggles"), root=project, servers=Servers.around(sandbox), **more)


def case(n=2, topk=3, entry="fill", **more):
    over = max(0, n * topk - n)
    known = {"tells": over > 0, "stray": Stray("after", over), "why": "topk is 1"}
    return Case(
        **{"id": f"n{n}-topk{topk}", "entry": f"unfix_test_tiny_legs:{entry}", "params": {"n": n, "topk": topk}},
        **{**known, **more},
    )


def outcomes(result):
    return [(leg.reverted, leg.outcome) for leg in result.legs]


SIZE, GUARD = "1:size", "1:guard"


def test_a_fix_is_proved(prover):
    result = prover.prove(SIZE, case())
    assert (result.verdict.kind, result.verdict.reason) == ("proved", None)
    assert outcomes(result) == [((), "clean"), ((SIZE,), "guarded"), ((SIZE, GUARD), "overflow")]
    over = result.legs[2].overflow
    assert (over["side"], over["observed_elements"], over["predicted_elements"]) == ("after", 4, 4)
    assert (over["first_offset_bytes"], over["last_offset_bytes"]) == (0, 12)
    assert [set(leg.reached) for leg in result.legs] == [set(leg.targets) for leg in result.legs]
    assert [leg["shared"] for leg in result.as_dict()["legs"]] == [True] * 3


@pytest.mark.parametrize("how", ["dies", "is wrong"])
def test_what_is_not_as_declared_in_company_runs_again_alone(prover, sandbox, project, how):
    def company():
        return sandbox.run(Request("unfix_test_tiny_legs:pid", path=[str(project)]), shared=True).report["facts"]["pid"]

    before = company()
    wanted = case(entry="is_disturbed")
    wanted.params["how"] = how
    result = prover.prove(SIZE, wanted)
    assert result.verdict.kind == "proved"
    assert [leg.get("shared", False) for leg in result.as_dict()["legs"]] == [False] * 3
    assert company() != before
    assert [leg.shared for leg in prover.prove(SIZE, case()).legs] == [True] * 3


def test_a_finding_is_a_leg_s_that_ran_alone(prover):
    result = prover.prove(SIZE, case(stray=Stray("after", 3)))
    assert result.verdict.kind == "unexpected" and not any(leg.shared for leg in result.legs)


def test_an_input_that_cannot_tell_says_so(prover):
    result = prover.prove(SIZE, case(topk=1))
    assert [outcome for _, outcome in outcomes(result)] == ["clean"] * 3
    assert result.verdict.kind == "proved" and result.verdict.reason.endswith("topk is 1")
    assert result.as_dict()["tells"] is False


@pytest.mark.parametrize("stray", [Stray("after", 3), Stray("before", 4), None])
def test_a_wrong_prediction_is_unexpected(prover, stray):
    assert prover.prove(SIZE, case(stray=stray)).verdict.kind == "unexpected"


def test_a_case_may_declare_another_outcome_and_reason(prover):
    both = frozenset({SIZE, GUARD})
    assert prover.prove(SIZE, case(expect={both: "crashed"})).verdict.kind == "unexpected"
    result = prover.prove(SIZE, case(reason={both: "another buffer"}))
    assert result.verdict.kind == "unexpected" and "/another buffer/" in result.verdict.reason


# fix -> verdict, a part of its reason
VERDICTS = {
    "1:unused": ("not-reached", "never entered tinypkg.work.unused"),
    "1:spare": ("vacuous", "must be wrong, is clean"),
    "1:gpu-only": ("vacuous", ""),  # expects nothing of a CPU
    "1:elsewhere": ("skipped", "eagle_kv"),  # nothing can be undone here
    "1:guard": ("vacuous", ""),  # declares no leg at all
}


@pytest.mark.parametrize("fix", VERDICTS)
def test_what_proves_nothing(prover, fix):
    result = prover.prove(fix, case())
    kind, part = VERDICTS[fix]
    assert (result.verdict.kind, result.verdict.fix) == (kind, fix)
    assert part in result.verdict.reason


@pytest.mark.parametrize("fix", ["1:elsewhere", "1:guard"])
def test_an_input_that_cannot_tell_is_no_way_around(prover, fix):
    assert prover.prove(fix, case(topk=1)).verdict.kind == VERDICTS[fix][0]


# what was done to the source -> which reversal is gone, a part of the reason
ROTTED = {
    "return n * topk": ("return topk * n", SIZE, "return n * topk"),
    "check(used, buffer.numel())": ("pass", GUARD, "check(used, buffer.numel())"),
    "def width(": ("def row_width(", SIZE, "has no width"),
    "    check(used, buffer.numel())\n": ("    check(used, buffer.numel())\n" * 2, GUARD, "appears 2 times"),
}


@pytest.mark.parametrize("old", ROTTED)
def test_rotted_blames_the_fix_whose_reversal_rotted(project, sandbox, old):
    new, fix, part = ROTTED[old]
    source = project / "kernels/tinypkg/work.py"
    source.write_text(source.read_text().replace(old, new))
    prover = make(project, sandbox)
    result = prover.prove(SIZE, case())
    assert (result.verdict.kind, result.verdict.fix, result.legs) == ("rotted", fix, ())
    assert part in result.verdict.reason
    # the one leg that can run: it says whether the fix that the case is about is still at work
    [leg] = result.as_dict()["legs"]
    assert (leg["reverted"], leg["outcome"]) == ([], "error" if old == "def width(" else "clean")
    assert prover.prove(SIZE, case(topk=1)).as_dict()["legs"] == []  # an input that can't tell says nothing either way
    assert (result.as_dict()["fix"], result.as_dict()["blames"]) == (SIZE, fix)
    with pytest.raises(RottedError, match=fix):
        prover.edits([SIZE, GUARD])


def test_a_finding_next_to_a_fix_that_is_gone_blames_the_one_that_is_gone(project, sandbox):
    source = project / "kernels/tinypkg/work.py"
    source.write_text(source.read_text().replace("return n * topk", "return n"))
    result = make(project, sandbox).prove("1:spare", case())
    assert (result.verdict.kind, result.verdict.fix) == ("regressed", SIZE)
    assert "must be clean, is guarded" in result.verdict.reason and "blamed on a neighbour" in result.verdict.reason
    assert [leg.outcome for leg in result.legs] == ["guarded", "guarded"]


def test_a_real_regression_is_the_fix_s_own(project, sandbox):
    source = project / "kernels/tinypkg/work.py"
    source.write_text(source.read_text().replace("list(range(1, used + 1))", "list(range(used))"))
    result = make(project, sandbox).prove(SIZE, case())
    assert (result.verdict.kind, result.verdict.fix) == ("regressed", SIZE)
    assert "must be clean, is wrong (sum 15)" in result.verdict.reason


def test_a_session_s_revert_is_in_every_leg(project, sandbox):
    prover = make(project, sandbox, session=(SIZE,))
    result = prover.prove(SIZE, case())
    assert outcomes(result) == [((SIZE,), "guarded"), ((SIZE,), "guarded"), ((SIZE, GUARD), "overflow")]
    assert result.verdict.kind == "regressed" and f"with {SIZE} out" in result.verdict.reason
    assert prover.prove(SIZE, case(topk=1)).verdict.kind == "proved"
    other = prover.prove("1:spare", case())
    assert [leg.reverted for leg in other.legs] == [(SIZE,), (SIZE, "1:spare")]
    assert other.verdict.kind == "regressed" and SIZE in other.verdict.reason


def test_what_is_not_here_is_skipped(project, sandbox, prover):
    result = prover.prove(SIZE, case(needs_cuda=True))
    assert result.verdict.kind == "skipped" and "CUDA" in result.verdict.reason
    on_gpu = make(project, sandbox, device="cuda")
    result = on_gpu.prove(SIZE, case(cuda_packages=("no_such_package_here",)))
    assert result.verdict.kind == "skipped" and "no_such_package_here" in result.verdict.reason
    assert result.legs == ()


def test_a_machine_that_gives_no_memory_is_infra(prover):
    result = prover.prove(SIZE, case(entry="starves", reaches=False))
    assert result.verdict.kind == "infra" and "no memory" in result.verdict.reason


def test_a_lost_server_is_infra_and_the_next_case_runs(project):
    with Sandbox("cpu") as own:
        prover = make(project, own)
        result = prover.prove(SIZE, case(entry="kills", reaches=False))
        assert (result.verdict.kind, result.legs) == ("infra", ())
        assert "fork server was lost" in result.verdict.reason
        assert prover.prove(SIZE, case()).verdict.kind == "proved"


def test_a_leg_whose_process_dies_after_its_report_is_not_believed(prover, monkeypatch):
    monkeypatch.setenv("UNFIX_SANDBOX", "isolated")
    result = prover.prove(SIZE, case(entry="dies_late"))
    assert result.verdict.kind == "infra" and "SIGSEGV" in result.verdict.reason
    assert prover.prove(SIZE, case()).verdict.kind == "proved"


@pytest.mark.parametrize("device_bytes", [0, MUCH])
def test_a_leg_that_held_much_memory_is_gone_before_the_next(prover, tmp_path, monkeypatch, device_bytes):
    monkeypatch.setenv("UNFIX_SANDBOX", "isolated")
    wanted = case(entry="lingers", device_bytes=device_bytes, tells=False)
    wanted.params["note"] = str(tmp_path / "note")
    legs = prover.prove("1:unused", wanted).legs
    assert [leg.facts["alone"] for leg in legs] == [True, bool(device_bytes)]


def test_the_environment_is_a_leg_s(prover):
    facts = prover.environment
    assert (facts["device"], facts["cuda"]) == ("cpu", None)
    assert all(facts[name] for name in ("python", "torch", "triton"))


def test_without_a_gpu_no_leg_runs_on_one(project, sandbox):
    prover = make(project, sandbox, device="cuda")
    with pytest.raises(InfraError, match="cuda"):
        _ = prover.environment
    result = prover.prove(SIZE, case())
    assert (result.verdict.kind, result.legs) == ("infra", ())
