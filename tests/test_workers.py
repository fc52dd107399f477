"""Workers: what each is handed, which GPU it has, which cases come first or together. No GPU: all of it is faked."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from harness import device, workers
from harness.case import Case
from harness.workers import LONG, Workers, spread


def node(name):
    return SimpleNamespace(workerinput={}, gateway=SimpleNamespace(id=name))


def handed(started, names):
    nodes = [node(name) for name in names]
    for each in nodes:
        started.pytest_configure_node(each)
    return nodes


# CUDA_VISIBLE_DEVICES of the caller -> what four workers get, of eight installed GPUs
LISTS = [
    ("3,5", ["3", "5", "3", "5"]),
    ("5,3", ["5", "3", "5", "3"]),
    ("2", ["2", "2", "2", "2"]),
    ("GPU-7,GPU-0", ["GPU-7", "GPU-0", "GPU-7", "GPU-0"]),
    ("MIG-a,MIG-b,MIG-c", ["MIG-a", "MIG-b", "MIG-c", "MIG-a"]),
    (None, ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]),
    ("", [None] * 4),
]


@pytest.mark.parametrize(("listed", "expected"), LISTS)
def test_each_worker_is_handed_one_entry_of_the_caller_s_list(listed, expected, monkeypatch):
    monkeypatch.setattr(device, "uuids", lambda: [f"GPU-{n}" for n in range(8)])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    nodes = handed(Workers("cuda", [], slow=False), ["gw0", "gw1", "gw2", "gw3"])
    assert [each.workerinput.get("unfix_gpu") for each in nodes] == expected


def test_who_takes_the_place_of_a_dead_worker_gets_its_gpu(monkeypatch):
    monkeypatch.setattr(device, "uuids", lambda: ["GPU-0", "GPU-1"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    started = Workers("cuda", [], slow=False)
    _, dead, *_ = handed(started, ["gw0", "gw1", "gw2", "gw3"])
    started.pytest_testnodedown(dead)
    [late] = handed(started, ["gw4"])
    assert late.workerinput["unfix_gpu"] == dead.workerinput["unfix_gpu"] == "0"


def test_a_worker_settles_on_its_gpu_before_anything_asks_cuda(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    workers.settle(SimpleNamespace(workerinput={"unfix_gpu": "5"}))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"
    workers.settle(SimpleNamespace(workerinput={}))  # on a CPU
    workers.settle(SimpleNamespace())  # no worker
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"


def test_a_worker_on_a_cpu_is_handed_no_gpu(monkeypatch):
    monkeypatch.setattr(device, "uuids", lambda: ["GPU-0"])
    [one] = handed(Workers("cpu", ["t.py::a"], slow=False), ["gw0"])
    assert one.workerinput == {"unfix_done": ["t.py::a"]}
    assert workers.done(SimpleNamespace(workerinput=one.workerinput)) == {"t.py::a"}


@pytest.mark.parametrize(("on", "scopes"), [("cpu", 1), ("cuda", 2)])
def test_cases_of_a_slow_code_base_stay_together(on, scopes, monkeypatch):
    class Scheduler:
        def __init__(self, config, log):
            pass

    monkeypatch.setattr("xdist.scheduler.LoadScopeScheduling", Scheduler)
    monkeypatch.setattr(device, "uuids", list)
    assert Workers(on, [], slow=False).pytest_xdist_make_scheduler(None, None) is None
    scheduler = Workers(on, [], slow=True).pytest_xdist_make_scheduler(None, None)
    assert len({scheduler._split_scope(f"t.py::test_a[{case}]") for case in range(50)}) == scopes
    assert scheduler._split_scope("t.py::test_a[1]") != scheduler._split_scope("t.py::test_b[1]")


def test_workers_begin_with_long_cases_and_mix_the_others():
    def item(name, device_bytes):
        case = Case(id=name, entry="m:f", params={}, device_bytes=device_bytes)
        return SimpleNamespace(nodeid=name, callspec=SimpleNamespace(params={"case": case}))

    small = [item(f"f.py::t[{i}]", i) for i in range(40)]
    plain = SimpleNamespace(nodeid="f.py::plain")
    long = [item("long", LONG), item("longest", LONG + 2), item("longer", LONG + 1)]
    names = [each.nodeid for each in spread([*small, plain, *long])]
    assert names[:6:2] == ["longest", "longer", "long"], "two of them would be one worker's"
    assert sorted(names) == sorted(each.nodeid for each in [plain, *small, *long])
    mixed = [int(name[8:-1]) < 20 for name in names if "[" in name]
    assert 4 < sum(mixed[:20]) < 16, "neighbours stay together"
    assert [each.nodeid for each in spread([*long, plain])] == ["longest", "f.py::plain", "longer", "long"]
