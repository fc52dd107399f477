"""Legs in company: each is what it would be alone, and what one does to its process costs no other."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path

import pytest

from harness.company import NOT_RUN, Company, key
from harness.errors import InfraError
from harness.reach import Target
from harness.sandbox import Request

ROOT = Path(__file__).parents[1]
LEGS = """
import ctypes, os, signal, sys, time

import torch

before = []


def fill(params, device):
    from harness.leg import WrongValues

    buffer = torch.empty(params["have"], dtype=torch.int32)
    used = params["used"]
    (ctypes.c_int32 * used).from_address(buffer.data_ptr())[:] = range(7, 7 + used)
    if buffer[: params["have"]].tolist() != list(range(7, 7 + params["have"])):
        raise WrongValues(f"it holds {buffer.tolist()}")
    return {"pid": os.getpid()}


def at(params, device):
    before.append(params["n"])
    if params.get("dies") == "always" or (params.get("dies") == "in company" and len(before) > 1):
        os.kill(os.getpid(), signal.SIGSEGV)
    if params.get("hangs"):
        signal.pause()
    if params.get("raises"):
        raise AssertionError("what a guard says")
    return {"pid": os.getpid(), "before": before[:-1]}


def dies_behind_its_report(params, device):
    if params["n"] == 4:
        def timer(*args): os.kill(os.getpid(), signal.SIGSEGV)  # called once more as all have ended
        signal.setitimer = timer
    return at(params, device)


def server_dies(params, device):
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()
"""


@pytest.fixture
def legs(tmp_path):
    """``legs(name, params)``: a request."""
    (tmp_path / "unfix_company_legs.py").write_text(LEGS)

    def request(name, timeout=60.0, targets=(), **params):
        path = [str(tmp_path)]
        return Request(f"unfix_company_legs:{name}", params, "cpu", path, targets, "red-zone", 512, timeout)

    return request


@pytest.fixture(scope="module")
def company():
    company = Company("cpu", 1)
    yield company
    company.close()


def facts(company, requests):
    return [(company.run(None, leg).report or {}).get("facts") for leg in requests]


def seen(ending):
    """What a leg came to, without what differs from process to process."""
    report = ending.report
    hits = [(hit["side"], hit["elements"], hit["values"], hit["allocation"]["shape"]) for hit in report["hits"]]
    return report["wrong"], report["raised"] and report["raised"]["message"], report["watched"], hits


def test_many_legs_share_a_process_and_end_as_they_would_alone(company, legs):
    requests = [
        *(legs("fill", have=have, used=have + over) for have in (1, 5, 300) for over in (0, 1, 9)),
        legs("at", n=0, raises=True),
    ]
    ran = company.ahead(requests, [])
    assert (ran.together, ran.processes, ran.alone, ran.broke) == (10, 1, 0, set())
    shared = [company.run(None, leg) for leg in requests]
    company.forget()
    alone = [company.run(None, leg) for leg in requests]
    assert len({ending.report["facts"].get("pid") for ending in shared[:9]}) == 1
    assert len({ending.report["facts"].get("pid") for ending in alone[:9]}) == 9
    assert list(map(seen, shared)) == list(map(seen, alone))
    assert [sum(hit["elements"] for hit in ending.report["hits"]) for ending in shared[:9]] == [0, 1, 9] * 3


def test_a_leg_that_dies_costs_only_itself(company, legs):
    requests = [legs("at", n=n) for n in range(100, 160)]
    requests[37] = legs("at", n=137, dies="always")
    ran = company.ahead(requests, [])
    assert (ran.together, ran.processes, ran.alone) == (59, 4, 1)  # chunks of 20, of which one was cut in two
    assert ran.broke == {key(requests[37])}
    assert company.run(None, requests[37]).signal == "SIGSEGV"
    found = facts(company, requests)
    assert [at for at, one in enumerate(found) if one is None] == [37]
    before = [len(one["before"]) for one in found if one]
    assert before == [*range(20), *range(17), *range(2), *range(20)]


def test_a_leg_that_hangs_is_ended_and_the_next_ones_run(company, legs):
    requests = [legs("at", n=n) for n in range(3)]
    requests.insert(1, legs("at", n=0, hangs=True, timeout=1.0))
    ran = company.ahead(requests, [])
    assert (ran.together, ran.processes, ran.alone) == (3, 2, 1)
    assert company.run(None, requests[1]).timed_out
    assert [found is None for found in facts(company, requests)] == [False, True, False, False]


def test_the_limit_is_each_leg_s_own_and_not_the_chunk_s(legs, python, tmp_path):
    request = dataclasses.asdict(legs("at", n=0, hangs=True, timeout=0.5))
    (tmp_path / "params.json").write_text(json.dumps({"legs": [request], "log": str(tmp_path / "log")}))
    code = "import json, sys; from harness import sweep_leg; sweep_leg.run(json.load(open('params.json')), 'cpu')"
    assert python("-c", code, cwd=tmp_path, PYTHONPATH=str(ROOT)).returncode == -signal.SIGALRM


def test_memory_that_an_earlier_leg_wrote_right_does_not_make_a_later_one_look_right(company, legs):
    right, idle = legs("fill", have=1000, used=1000), legs("fill", have=1000, used=0)
    company.ahead([right, idle], [])
    ending = company.run(None, right)
    assert ending.report["wrong"] is None
    assert company.run(None, idle).report["wrong"].startswith("it holds [-1515870811, ")


def test_a_write_to_the_far_end_of_its_zone_ends_its_process(company, legs):
    far = legs("fill", have=100, used=100 + 512 // 4)
    others = [legs("fill", have=have, used=have) for have in (200, 300)]
    ran = company.ahead([far, *others], [])
    assert ran.broke == {key(far)} and (ran.together, ran.processes, ran.alone) == (2, 2, 1)
    ending = company.run(None, far)
    assert [hit["lower_bound"] for hit in ending.report["hits"]] == [True]
    assert [company.run(None, leg).report["wrong"] for leg in others] == [None, None]


def test_a_process_that_dies_behind_its_last_leg_is_not_believed_about_that(company, legs):
    requests = [legs("dies_behind_its_report", n=n) for n in range(5)]
    ran = company.ahead(requests, [])
    assert ran.broke == {key(requests[4])} and (ran.together, ran.alone) == (4, 1)


def test_each_leg_has_a_reach_proof_of_its_own(company, legs, tmp_path):
    requests = [legs("at", n=1), legs("at", n=2)]
    target = Target("at", str(tmp_path / "unfix_company_legs.py"), "unfix_company_legs", "at")
    other = Target("fill", str(tmp_path / "unfix_company_legs.py"), "unfix_company_legs", "fill")
    requests = [legs("at", n=1, targets=[target, other]), legs("fill", have=1, used=1, targets=[target, other])]
    company.ahead(requests, [])
    assert [company.run(None, leg).reached for leg in requests] == [("at",), ("fill",)]


def test_legs_of_two_overlays_share_no_process(company, legs, tmp_path):
    ours = legs("at", n=1)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "unfix_company_legs.py").write_text(LEGS.replace('"pid"', '"other"'))
    theirs = Request(ours.entry, ours.params, "cpu", [str(tmp_path / "other")])
    company.ahead([ours, theirs], [])
    assert [set(found) for found in facts(company, [ours, theirs])] == [{"pid", "before"}, {"other", "before"}]


def test_alone_is_alone_from_the_start(company, legs):
    requests = [legs("at", n=n) for n in range(3)]
    ran = company.ahead([], requests)
    assert (ran.together, ran.processes, ran.alone) == (0, 0, 3)
    assert [found["before"] for found in facts(company, requests)] == [[], [], []]


def test_what_is_noted_is_not_run(company, legs):
    leg = legs("at", n=1, dies="always")
    with company.noting() as noted:
        assert company.run(None, leg) is NOT_RUN is company.run(None, leg)
    assert noted == [leg]


def test_a_lost_server_is_said_and_another_started(company, legs):
    with pytest.raises(InfraError, match="fork server was lost"):
        company.ahead([legs("server_dies", n=n) for n in range(2)], [])
    company.ahead([legs("at", n=1)], [])
    assert facts(company, [legs("at", n=1)])[0]["before"] == []
