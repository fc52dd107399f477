"""Sweeps: shapes are drawn, run and judged, and one that disagrees is shrunk. On a package of its own, and on ours."""

from __future__ import annotations

import inspect
import json
import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import strategies as st

from harness import cli, fixes, rerun
from harness.case import Case, Stray
from harness.company import Company, Ran
from harness.prover import Result
from harness.sweep import Sweeper, Swept, draw
from harness.sweep_cli import concerning, exit_code, lines
from harness.verdict import Verdict
from regressions import strategies
from regressions.scenarios import draft

PACKAGE = """
import ctypes

import torch


def width(n, topk):
    return n * topk


def check(used, have):
    if used > have:
        raise AssertionError(f"buffer too small: {used} of {have}")


def fill(n, topk):
    used = n * topk
    buffer = torch.zeros(width(n, topk), dtype=torch.int32)
    check(used, buffer.numel())
    (ctypes.c_int32 * used).from_address(buffer.data_ptr())[:] = list(range(1, used + 1))
    return int(buffer.sum())
"""
OFF_BY_ONE = ("return int(buffer.sum())", "return int(buffer.sum()) + (topk > 2 and n % 4 == 0)")
LEGS = """
import os, signal

before = []


def fill(params, device):
    from harness.leg import WrongValues
    from tinypkg import work

    got = work.fill(params["n"], params["topk"])
    used = params["n"] * params["topk"]
    if got != used * (used + 1) // 2:
        raise WrongValues(f"sum {got}")


def is_wrong_after_others(params, device):
    from harness.leg import WrongValues

    before.append(params)
    fill(params, device)
    if len(before) > 1 and params["topk"] == 3:
        raise WrongValues("what another left")


def dies_after_others(params, device):
    before.append(params)
    if len(before) > 1 and params["topk"] == 3:
        os.kill(os.getpid(), signal.SIGSEGV)
    fill(params, device)


def starves_after_others(params, device):
    before.append(params)
    if len(before) > 1 and params["topk"] == 3:
        raise MemoryError("no memory")
    fill(params, device)


def starves(params, device):
    raise MemoryError("no memory")
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
"""
SIZE = "1:size"


def tiny(n: int, topk: int, entry: str = "fill", **more: Any) -> Case:
    over = n * topk - n
    return Case(
        f"n{n}-topk{topk}", f"unfix_sweep_legs:{entry}", {"n": n, "topk": topk}, tells=over > 0,
        stray=Stray("after", over), zone_bytes=4 * over + 512, **more,
    )  # fmt: skip


@dataclass(frozen=True)
class Tiny:
    """The shapes of the tiny package."""

    case: Callable[[dict[str, int]], Case] = lambda shape: tiny(**shape)
    kills: bool = False
    fix: str = SIZE
    options: st.SearchStrategy[dict[str, int]] = st.fixed_dictionaries(
        {"n": st.integers(1, 40), "topk": st.integers(1, 5)}
    )

    @property
    def swept(self):
        return self.case


@pytest.fixture(scope="module")
def company():
    company = Company("cpu", 2)
    yield company
    company.close()


@pytest.fixture
def sweep(tmp_path, monkeypatch, company):
    """``sweep(space, old, new)``: 50 shapes of a space, on the tiny package with a piece of its text replaced."""
    monkeypatch.setenv("UNFIX_CACHE", str(tmp_path / "cache"))

    def run(space, old="", new="", seed=1):
        texts = {"tinypkg/__init__.py": "", "tinypkg/work.py": PACKAGE.replace(old, new), "unfix_sweep_legs.py": LEGS}
        for name, text in {
            **{f"kernels/{name}": text for name, text in texts.items()},
            "toggles/1.yaml": TOGGLES,
        }.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        catalogue = fixes.load(tmp_path / "toggles")
        return Sweeper(catalogue, device="cpu", root=tmp_path, company=company).sweep(space, 50, seed)

    return run


def test_every_shape_is_proved_and_few_processes_are_used(sweep):
    swept = sweep(Tiny())
    assert swept.verdicts == Counter(proved=swept.shapes) and 30 < swept.shapes <= 50
    assert 10 < swept.told < swept.shapes
    assert (swept.smallest, swept.disturbed, swept.stopped) == (None, [], None)
    assert swept.ran.together == 3 * swept.shapes and swept.ran.processes < 10 and swept.ran.alone == 0
    assert exit_code([swept]) == 0


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_planted_bug_is_shrunk_to_the_smallest_shape_that_has_it(sweep, seed):
    swept = sweep(Tiny(), *OFF_BY_ONE, seed=seed)
    assert set(swept.verdicts) == {"proved", "regressed"}
    assert swept.smallest.case.params == {"n": 4, "topk": 3}
    assert swept.smallest.verdict.reason == "with every fix in: must be clean, is wrong (sum 79)"
    assert swept.disturbed == [] and exit_code([swept]) == 1
    said = "\n".join(lines(swept, "the command"))
    assert "1:size on n4-topk3 (eagle_kv, cpu)" in said and said.endswith("again: the command")


def test_a_wrong_prediction_is_a_disagreement_too(sweep):
    def off_by_one(shape):
        case = tiny(**shape)
        return replace(case, stray=Stray("after", case.stray.elements + (shape["topk"] == 2 and shape["n"] > 6)))

    swept = sweep(Tiny(off_by_one))
    assert swept.smallest.case.params == {"n": 7, "topk": 2}
    assert "predicted 8 stray elements after the buffer, observed 7 after" in swept.smallest.verdict.reason


def crashes(shape: dict[str, int]) -> Case:
    """Declared to, where it tells; it overflows all the same."""
    return tiny(**shape, expect={frozenset({SIZE, "1:guard"}): "crashed"} if shape["topk"] > 1 else {})


# the space -> how many legs run alone
ALONE: dict[str, tuple[Tiny, Callable[[Swept], int]]] = {
    "in company": (Tiny(), lambda swept: 0),
    "its guard kills": (Tiny(kills=True), lambda swept: swept.told),
    "declared to crash": (Tiny(crashes), lambda swept: swept.verdicts["unexpected"]),
    "no red zone": (Tiny(lambda shape: tiny(**shape, detector="poison")), lambda swept: 3 * swept.shapes),
}


@pytest.mark.parametrize("name", ALONE)
def test_legs_that_end_their_process_or_have_no_red_zone_run_alone(sweep, name):
    space, alone = ALONE[name]
    swept = sweep(space)
    assert swept.ran.alone == alone(swept) and swept.ran.alone + swept.ran.together == 3 * swept.shapes
    assert (name == "in company") == (swept.ran.alone == 0)


@pytest.mark.parametrize("entry", ["is_wrong_after_others", "dies_after_others"])
def test_what_happens_in_company_only_is_a_finding_of_its_own(sweep, entry):
    swept = sweep(Tiny(lambda shape: tiny(**shape, entry=entry)))
    assert swept.smallest is None and swept.disturbed
    assert all(name.endswith("topk3") for name in swept.disturbed)
    assert exit_code([swept]) == 1 and "disturbed by what ran before them" in lines(swept, None)[-1]


def test_what_is_short_of_memory_in_company_only_is_well(sweep):
    swept = sweep(Tiny(lambda shape: tiny(**shape, entry="starves_after_others")))
    assert swept.as_dict()["verdicts"] == {"proved": swept.shapes} and swept.disturbed == []
    assert exit_code([swept]) == 0


# the space, a piece of the package and what replaces it -> verdict, exit code
NOTHING_LEARNT = {
    "infra": ((Tiny(lambda shape: tiny(**shape, entry="starves")),), "infra", 4),
    "rotted": ((Tiny(), "return n * topk", "return topk * n"), "rotted", 3),
}


@pytest.mark.parametrize("name", NOTHING_LEARNT)
def test_where_nothing_is_learnt_the_reason_is_said(sweep, name):
    arguments, verdict, code = NOTHING_LEARNT[name]
    swept = sweep(*arguments)
    assert (swept.stopped.verdict.kind, exit_code([swept])) == (verdict, code)
    [line] = lines(swept, None)
    assert line.startswith(f"1:size: {verdict}: ") and swept.stopped.verdict.reason in line


def test_skipped_shapes_and_shapes_that_cannot_tell_are_not_a_pass(sweep):
    skipped = sweep(Tiny(lambda shape: tiny(**shape, needs_cuda=True)))
    assert skipped.verdicts == Counter(skipped=skipped.shapes) and exit_code([skipped]) == 4
    blind = sweep(Tiny(options=st.fixed_dictionaries({"n": st.integers(1, 40), "topk": st.just(1)})))
    assert blind.verdicts == Counter(proved=blind.shapes) and exit_code([blind]) == 4
    assert lines(blind, None)[-1] == "1:size: no shape tells it from its absence, so nothing was learnt; draw more"


def result(kind: str) -> Result:
    return Result(SIZE, tiny(1, 1), "eagle_kv", "cpu", Verdict(kind, "a reason", SIZE))


EXIT_CODES = [  # of several fixes: what may hide a finding comes first
    ([], 0),
    ([Swept(SIZE, told=1)], 0),
    ([Swept(SIZE, told=1), Swept(SIZE, smallest=result("regressed"))], 1),
    ([Swept(SIZE, told=1, disturbed=["n1-topk1"])], 1),
    ([Swept(SIZE, stopped=result("rotted")), Swept(SIZE, smallest=result("regressed"))], 3),
    ([Swept(SIZE, stopped=result("infra")), Swept(SIZE, stopped=result("rotted"))], 4),
    ([Swept(SIZE), Swept(SIZE, smallest=result("regressed"))], 4),
]


@pytest.mark.parametrize(("found", "code"), EXIT_CODES)
def test_exit_codes(found, code):
    assert exit_code(found) == code


def test_a_sweep_as_json():
    swept = Swept(SIZE, 8, Counter(proved=8), told=3, ran=Ran(together=20, processes=2, alone=4), seconds=0.5)
    assert json.loads(json.dumps(swept.as_dict())) == {
        "fix": SIZE, "shapes": 8, "verdicts": {"proved": 8}, "told": 3, "smallest": None, "disturbed": [],
        "stopped": None, "legs": {"together": 20, "processes": 2, "alone": 4}, "seconds": 0.5,
        "shapes_per_second": 16.0,
    }  # fmt: skip


# fixes that must have a strategy
SPACED = (
    *("27338:topk-factor", "27338:capacity-assert", "27460:topk-factor", "27460:capacity-assert"),
    *("27486:int32-guard", "27486:slot-assert", "27486:draft-tokens-assert"),
    *("own:int32-rows", "own:triton-capacity-assert", "own:aiter-capacity-assert"),
)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("fix", SPACED)
def test_shapes_are_varied_fit_their_zones_and_can_be_shown_again(catalogue, fix, device):
    space = strategies.space(fix, catalogue.fix(fix).scenario, device)
    shapes = draw(space.options, 100, 5)
    cases = [space.swept(shape) for shape in shapes]
    assert {case.tells for case in cases} == {True, False}
    assert len({json.dumps(case.params) for case in cases}) > 60
    takes = inspect.signature(cli.repro).parameters
    for case, whole in zip(cases, map(space.case, shapes), strict=True):
        if case.stray and case.detector == "red-zone" and case.backend in draft.GUARDS:
            assert case.stray.elements * (8 if case.backend == "triton" else 4) < case.zone_bytes, case.id
        assert case.zone_bytes <= 1 << 19
        record = {"fix": fix, "device": device, "target": "eagle_kv", "params": dict(whole.params), "case": whole.id}
        again = rerun.command({**record, "detector": whole.detector}, None, catalogue, takes)
        assert again.startswith(f"unfix repro {fix} "), again


def test_a_seed_draws_the_same_shapes_in_every_process(python):
    draws = (
        "import sys; from regressions import strategies; from harness.sweep import draw; "
        "print(draw(strategies.space('27338:topk-factor', 'draft', 'cpu').options, 40, int(sys.argv[1])))"
    )
    once, again, other = (
        python("-c", draws, seed, PYTHONHASHSEED=hashed, CI=ci).stdout
        for seed, hashed, ci in (("7", "1", ""), ("7", "2", "true"), ("8", "1", ""))
    )
    assert once == again != other and once.count("topk") == 40


def test_only_fixes_of_the_same_scenarios_are_asked_about_a_leg(catalogue):
    near = concerning(catalogue, ["27486:slot-assert"])
    assert near.ids == ("27486:slot-assert",)
    assert {fix.scenario for fix in concerning(catalogue, ["own:int32-rows", "27486:slot-assert"])} == {
        "draft",
        "store",
    }


REFUSED = [
    (("27338", "--examples", "0"), "Invalid value for '--examples'"),
    (("27339",), "SEL: unknown fix '27339', did you mean 27338?"),
    (("0",), "selects no fix"),
    (
        ("26866",),
        "no strategy draws shapes for 26866:accept-grid, 26866:bonus-stride "
        "(there is one for the scenarios draft, multi_layer, store)",
    ),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED)
def test_what_can_t_be_swept_is_one_line(unfix, arguments, said):
    ended = unfix("sweep", *arguments, "--device", "cpu")
    assert ended.returncode == 2 and said in ended.stderr, ended.stderr
    assert ended.stdout == "" and "Traceback" not in ended.stderr


def test_the_command_shrinks_a_bug_in_the_kernel_to_a_command_that_shows_it(unfix, checkout):
    kernel = checkout / "kernels" / "eagle_kv" / "kernel.py"
    right = "page_size=page_size,"  # what the launcher hands on
    assert kernel.read_text().count(right) == 1
    kernel.write_text(kernel.read_text().replace(right, "page_size=page_size + (topk > 1 < page_size),"))
    found = checkout / "found.json"
    options = ("27338:topk-factor", "--device", "cpu", "--examples", "20", "--seed", "1")
    ended = unfix("sweep", *options, "--json", str(found), cwd=checkout)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "unfix: --seed 1 --examples 20 draws the same shapes again" in ended.stderr
    [swept] = json.loads(found.read_text())["fixes"]
    smallest = swept["smallest"]["params"]
    assert smallest == {
        "backend": "flashinfer", "path": "cuda_graph", "topk": 2, "num_steps": 1, "page_size": 2, "max_bs": 1,
        "max_context_len": 1, "seq_lens": [0],
    }  # fmt: skip
    assert f"again: {swept['again']}" in ended.stdout
    again = unfix(*shlex.split(swept["again"])[1:], cwd=checkout)
    assert again.returncode == 1 and "regressed: with every fix in: must be clean, is wrong" in again.stdout
