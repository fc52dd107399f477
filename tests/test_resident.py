"""A resident: legs that share a process, and on a GPU a context. Whatever one does there, the next one is right."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
import os
import signal
from pathlib import Path

import numpy
import pytest
import torch
import triton
from packaging.version import Version

from harness import modules, resident, sharing
from harness.case import Case, Stray
from harness.leftovers import Baseline
from harness.memory import red_zone
from harness.prover import Prover
from harness.reach import Target
from harness.sandbox import Request, Sandbox, Servers

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=NO_CUDA)]

MINE = """
calls = []

def count():
    calls.append(1)
    return len(calls)
"""
LEGS = """
import ctypes, os, random, signal, sys, threading, time

import mine
import numpy
import torch
from harness.leg import WrongValues

def good(params, device):
    print("good's", mine.count()); print("good too", file=sys.stderr)
    buffer = torch.empty(5, dtype=torch.int32)
    (ctypes.c_int32 * (5 + params["over"])).from_address(buffer.data_ptr())[:] = range(5 + params["over"])
    drawn = [torch.rand(1).item(), random.random(), numpy.random.rand()]
    return {"pid": os.getpid(), "calls": mine.count(), "drawn": drawn, "file": mine.__file__}

def nothing(params, device): pass

# faults that end the process
def segfaults(params, device): ctypes.string_at(0)
def aborts(params, device): os.abort()
def vanishes(params, device): os._exit(0)
def hangs(params, device): time.sleep(300)
def is_interrupted(params, device): raise KeyboardInterrupt
def closes_all(params, device): os.closerange(3, 4096)

# what stays behind
def starts_a_thread(params, device): threading.Thread(target=time.sleep, args=(300,), daemon=True).start()
def changes_a_variable(params, device): os.environ["OMP_NUM_THREADS"] = "7"
def changes_its_own_variable(params, device): os.environ["PYTHONPATH"] = "/elsewhere"
def replaces_empty(params, device): torch.empty = torch.zeros
def replaces_a_method(params, device): torch.Tensor.copy_ = lambda *_: None
def replaces_print(params, device): __builtins__["print"] = lambda *_, **__: None
def forks(params, device):
    if os.fork() == 0: time.sleep(300)
def changes_the_folder(params, device): os.chdir("/")
def removes_its_folder(params, device):
    import tempfile
    os.chdir(tempfile.mkdtemp()); os.rmdir(os.getcwd())
def handles_a_signal(params, device): signal.signal(signal.SIGTERM, lambda *_: None)
def sets_a_timer(params, device): signal.setitimer(signal.ITIMER_REAL, 200)
def traces(params, device): sys.setprofile(lambda *_: None)
def changes_the_path(params, device): sys.path.insert(0, "/elsewhere")
def appends_to_the_path(params, device): sys.path.append("/elsewhere")
def closes_stdout(params, device): sys.stdout.close()
def replaces_stdout(params, device): sys.stdout = open(os.devnull, "w")
def changes_the_dtype(params, device): torch.set_default_dtype(torch.float64)
def changes_the_device(params, device): torch.set_default_device("meta")
def turns_gradients_off(params, device): torch.set_grad_enabled(False)
def enters_a_mode(params, device):
    from torch.overrides import BaseTorchFunctionMode
    BaseTorchFunctionMode().__enter__()
def allows_threads(params, device): torch.set_num_threads(2)
def is_less_precise(params, device): torch.set_float32_matmul_precision("medium")
def turns_torch_functions_off(params, device): torch._C.DisableTorchFunction().__enter__()
def replaces_a_detector(params, device):
    from harness.memory import RedZone
    RedZone.zones = lambda self: ()
def replaces_synchronize(params, device): torch.cuda.synchronize = lambda *_: None
def flushes_to_zero(params, device): torch.set_flush_denormal(True)
def makes_warnings_errors(params, device):
    import warnings
    warnings.simplefilter("error")
def lowers_a_limit(params, device):
    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

# what does not matter
def shouts(params, device): print("#" * 10_000_000)
def shouts_in_c(params, device): ctypes.CDLL(None).printf(b"from C")
def draws(params, device): torch.manual_seed(3); random.seed(3); numpy.random.seed(3)
def raises(params, device): raise AssertionError("what a guard says")
def leaves(params, device): sys.exit(3)
def keeps_memory(params, device): sys.unfix_kept = torch.ones(1 << 20)
def is_wrong(params, device): raise WrongValues("x[0]: 1, reference 2")
def puts_a_module_there(params, device):
    module = type(sys)("mine")
    module.count, module.__file__ = (lambda: 0), params.get("file")
    sys.modules["mine"] = module

def right(params, device):
    # some of so many are where an earlier leg's were
    numbers = torch.arange(params["elements"], dtype=torch.int32)
    buffers = [torch.empty(params["elements"], dtype=torch.int32, device=device) for _ in range(200)]
    if params.get("unseen"):  # of no factory that a detector sees
        buffers = [torch.IntTensor(0).resize_(params["elements"]) for _ in range(200)]
    for buffer in buffers if params["writes"] else (): buffer.copy_(numbers)
    if not any(torch.equal(buffer.cpu(), numbers) for buffer in buffers): raise WrongValues("none is right")

def captured(params, device):
    graph, n = torch.cuda.CUDAGraph(), params["elements"]
    numbers = torch.arange(n, dtype=torch.int32, device=device)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        buffer = torch.empty(n, dtype=torch.int32, device=device)
        if params["writes"]: buffer.copy_(numbers)
    graph.replay()
    if buffer.tolist() != list(range(n)): raise WrongValues(f"it holds {buffer[:4].tolist()}")

def keeps_device_memory(params, device): sys.unfix_kept = torch.ones(1 << 20, device=device)
"""
ENDS = {"segfaults": "SIGSEGV", "aborts": "SIGABRT", "vanishes": 0, "hangs": "SIGKILL", "is_interrupted": 70}
ENDS["closes_all"] = 70
LEAVES = {
    "starts_a_thread": "threads",
    "changes_a_variable": "environment variables",
    "changes_its_own_variable": "environment variables",
    "replaces_empty": "another torch.empty",
    "replaces_a_method": "another torch.Tensor.copy_",
    "replaces_print": "another builtins.print",
    "forks": "child processes",
    "changes_the_folder": "the working directory",
    "removes_its_folder": "the working directory",
    "handles_a_signal": "signal handlers",
    "sets_a_timer": "timers",
    "traces": "trace functions",
    "changes_the_path": "the import path",
    "appends_to_the_path": "the import path",
    "closes_stdout": "standard streams",
    "replaces_stdout": "standard streams",
    "changes_the_dtype": "torch's defaults",
    "changes_the_device": "torch's defaults",
    "turns_gradients_off": "torch's modes",
    "enters_a_mode": "torch's modes",
    "allows_threads": "torch's defaults",
    "is_less_precise": "torch's precision",
    "turns_torch_functions_off": "torch's functions",
    "replaces_a_detector": "another red-zone detector.zones",
    "replaces_synchronize": "another torch.cuda.synchronize",
    "flushes_to_zero": "torch's precision",
    "makes_warnings_errors": "warnings that are errors",
    "lowers_a_limit": "limits",
}
HARMLESS = [
    "shouts",
    "shouts_in_c",
    "draws",
    "raises",
    "leaves",
    "keeps_memory",
    "is_wrong",
    "puts_a_module_there",
    "nothing",
    "no_such_entry",
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    """Two overlays, and the legs."""
    made = [tmp_path_factory.mktemp(name) for name in ("one", "two", "legs")]
    for overlay in made[:2]:
        (overlay / "mine.py").write_text(MINE)
    (made[2] / "unfix_resident_legs.py").write_text(LEGS)
    return made


@pytest.fixture
def share(sandbox, folders):
    def share(name, overlay=0, sandbox=sandbox, shared=True, **more):
        path = [str(folders[overlay]), str(folders[2])]
        request = Request(
            f"unfix_resident_legs:{name}", **{"detector": "red-zone", "zone_bytes": 512, **more}, path=path
        )
        return sandbox.run(request, shared=shared)

    return share


def is_right(share, folders, overlay=0, over=2):
    """Run a leg of which everything must be its own. Its process."""
    file = str(folders[overlay] / "mine.py")
    target = Target("mine.count", file, "mine", "count")
    ending = share("good", overlay, params={"over": over}, targets=[target])
    facts = ending.report["facts"]
    assert ending.report["raised"] is None and ending.report["watched"] == 2
    assert (ending.stdout, ending.stderr) == ("good's 1\n", "good too\n")
    assert (ending.reached, facts["file"], facts["calls"]) == (("mine.count",), file, 2)
    assert [hit["elements"] for hit in ending.report["hits"]] == ([over] if over else [])
    assert ending.shared and ending.left == ()
    return facts["pid"], facts["drawn"]


def test_legs_share_a_process_and_nothing_else(share, folders):
    first = is_right(share, folders)
    assert [is_right(share, folders, overlay, over) for overlay, over in ((1, 0), (0, 3), (1, 2))] == [first] * 3


@pytest.mark.parametrize("fault", ENDS)
def test_a_leg_that_ends_its_process_costs_that(share, folders, sandbox, fault):
    before, _ = is_right(share, folders)
    ending = share(fault, timeout=1 if fault == "hangs" else 60)
    assert (ending.signal or ending.exit_code, ending.report, ending.shared) == (ENDS[fault], None, True)
    assert ending.timed_out == (fault == "hangs")
    assert is_right(share, folders)[0] != before
    sandbox.settle()


@pytest.mark.parametrize("fault", LEAVES)
def test_a_process_in_which_a_leg_left_something_is_given_up(share, folders, sandbox, fault):
    before = is_right(share, folders)
    ending = share(fault)
    assert ending.report["raised"] is None and LEAVES[fault] in ending.left and ending.shared
    after = is_right(share, folders)
    assert after[0] != before[0]
    sandbox.settle()


@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_not_matter_costs_nothing(share, folders, name):
    before = is_right(share, folders)
    assert share(name).left == ()
    assert is_right(share, folders) == before


def test_what_c_buffered_is_the_leg_s_that_printed_it(share, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with Sandbox("cpu") as own:
        said = [share(name, sandbox=own).stdout for name in ("nothing", "shouts_in_c", "nothing")]
    assert said == ["", "from C", ""]


def test_a_process_is_given_up_after_many_legs(share, folders, monkeypatch):
    with Sandbox("cpu") as own:
        endings = [share("good", sandbox=own, params={"over": 0}) for _ in range(resident.LEGS + 1)]
    assert len({ending.report["facts"]["pid"] for ending in endings}) == 2
    assert [ending.left for ending in endings if ending.left] == [(f"{resident.LEGS} legs",)]


def test_a_process_that_is_forsaken_runs_no_other_leg(share, folders, sandbox):
    before, _ = is_right(share, folders)
    sandbox.forsake()
    after, _ = is_right(share, folders)
    assert before != after
    sandbox.settle()
    assert not Path(f"/proc/{before}").exists()


def test_one_that_was_killed_between_legs_costs_nothing(share, folders, sandbox):
    before, _ = is_right(share, folders)
    os.kill(before, signal.SIGKILL)
    assert is_right(share, folders)[0] != before


def test_a_leg_beside_it_has_a_process_of_its_own(share, folders):
    before, _ = is_right(share, folders)
    own = share("good", params={"over": 0}, shared=False)
    assert own.report["facts"]["pid"] != before and not own.shared
    assert is_right(share, folders)[0] == before


@pytest.mark.parametrize("detector", sharing.DETECTORS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("elements", [5, 1000])
def test_memory_never_holds_what_an_earlier_leg_computed(share, sandbox, detector, device, elements):
    with contextlib.nullcontext(sandbox) if device == "cpu" else Sandbox(device) as own:
        for writes in (True, False):
            params = {"elements": elements, "writes": writes}
            ending = share("right", sandbox=own, params=params, device=device, detector=detector)
            assert ending.shared and ending.report["raised"] is None
            assert (ending.report["wrong"] is None) == writes, "nothing was written, and it looks right"


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
@pytest.mark.parametrize("elements", [5, 1000])
def test_nor_does_memory_that_no_detector_hands_out(share, elements):
    with Sandbox("cpu") as own:
        for writes in (True, False):
            params = {"elements": elements, "writes": writes, "unseen": True}
            ending = share("right", sandbox=own, params=params)
            assert ending.shared and ending.report["raised"] is None
            assert (ending.report["wrong"] is None) == writes, "nothing was written, and it looks right"


@NO_CUDA
@pytest.mark.parametrize("detector", [*sharing.DETECTORS, "none"])
def test_nor_does_that_of_a_graph(share, detector):
    """With no detector, which fills nothing, it is what the allocator kept that was overwritten."""
    with Sandbox("cuda") as own:
        for writes in (True, True, False, True, False):
            params = {"elements": 1 << 18, "writes": writes}
            ending = share("captured", sandbox=own, params=params, device="cuda", detector=detector)
            assert ending.shared and ending.left == () and ending.report["raised"] is None
            assert (ending.report["wrong"] is None) == writes, "nothing was written, and it looks right"


@NO_CUDA
def test_device_memory_that_a_leg_keeps_is_found(share):
    kept = (4 << 20) + 2 * 512 + red_zone.ALIGNMENT  # a tensor keeps its zones, too: they are one allocation
    with Sandbox("cuda") as own:
        for detector, held in (("none", 4 << 20), ("red-zone", kept), ("guard-page", 4 << 20)):
            ending = share("keeps_device_memory", sandbox=own, device="cuda", detector=detector)
            assert ending.left == (f"{held} bytes of device memory",)
        assert share("right", sandbox=own, params={"elements": 9, "writes": True}, device="cuda").left == ()


@pytest.mark.parametrize("how", ["isolated", "roots", "a slow code base"])
def test_who_doubts_gets_processes_of_their_own(folders, monkeypatch, how):
    preload = ["json"] if how == "a slow code base" else []
    roots = ["/nowhere"] if how == "roots" else []
    if how == "isolated":
        monkeypatch.setenv("UNFIX_SANDBOX", "isolated")
    request = Request("unfix_resident_legs:nothing", path=[str(folders[0]), str(folders[2])], roots=roots, shared=True)
    servers = Servers("cpu", preload)
    assert not servers.run(None, request).shared
    servers.close()


def test_what_is_forgotten_is_forgotten_by_its_package_too(tmp_path, monkeypatch):
    for name in ("unfix_kept/__init__.py", "unfix_kept/gone.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("state = []")
    monkeypatch.syspath_prepend(str(tmp_path))
    gone = importlib.import_module("unfix_kept.gone")
    modules.forget([str(tmp_path)], {"unfix_kept"})
    assert importlib.import_module("unfix_kept") and not hasattr(importlib.import_module("unfix_kept"), "gone")
    assert importlib.import_module("unfix_kept.gone") is not gone
    modules.forget([str(tmp_path)], ())


def test_nothing_done_leaves_nothing():
    baseline = Baseline()
    assert baseline.left(resident.STALE) == baseline.left(resident.STALE) == []


# outcome, what else is said of the leg -> whether it may share
MAY_SHARE = [
    ("clean", {}, True),
    ("clean", {"detector": "victim"}, True),
    ("clean", {"detector": "guard-page"}, True),
    ("clean", {"detector": "poison"}, False),
    ("clean", {"detector": "none"}, False),
    ("clean", {"device_bytes": 2 << 30}, True),
    ("clean", {"device_bytes": (2 << 30) + 1}, False),
    ("clean", {"guards_kill": True}, True),
    ("guarded", {}, True),
    ("guarded", {"detector": "none"}, True),
    ("guarded", {"device_bytes": (2 << 30) + 1}, False),
    ("guarded", {"guards_kill": True}, False),
    ("error", {}, True),
    ("error", {"detector": "none"}, True),
    ("overflow", {}, True),
    ("overflow", {"stray": None}, False),
    ("overflow", {"detector": "victim"}, False),
    ("overflow", {"detector": "guard-page"}, False),
    *((outcome, {}, False) for outcome in ("wrong", "crashed", "hung")),
]


@pytest.mark.parametrize(("outcome", "more", "may"), MAY_SHARE)
def test_which_legs_may_share(outcome, more, may):
    case = Case("id", "entry", {}, stray=Stray("after", 1))
    case = dataclasses.replace(case, **{k: v for k, v in more.items() if k in ("detector", "device_bytes", "stray")})
    assert sharing.harmless(case, outcome, guards_kill=more.get("guards_kill", False)) == may


def test_only_asserts_in_kernels_kill(catalogue):
    scenarios = {fix.scenario for fix in catalogue}
    kill = {name for name in scenarios if sharing.guards_kill(catalogue, name, "eagle_kv")}
    assert kill == {"store"}


def real_cases(catalogue):
    """A few dozen real cases: fix, case."""
    from regressions import draft_tables, test_27486

    sizes = draft_tables.size_cases("27338:topk-factor")("cpu")
    walls = draft_tables.wall_cases("own:aiter-capacity-assert")("cpu")
    stores = [case for case in test_27486.slots("cpu") if case.detector == "red-zone"]
    chosen = [
        ("27338:topk-factor", sizes[:10]),
        ("own:aiter-capacity-assert", walls),
        ("27486:slot-assert", stores[9:15]),
    ]
    return [(fix, case) for fix, cases in chosen for case in cases]


@pytest.mark.skipif(
    Version(triton.__version__) < Version("3.7") and Version(numpy.__version__) >= Version("2.4"),
    reason="the interpreter of Triton 3.6 and older needs NumPy below 2.4",
)
def test_a_verdict_is_the_same_either_way(catalogue, root, sandbox, monkeypatch):
    seen = {}
    for how in ("shared", "isolated"):
        monkeypatch.setenv("UNFIX_SANDBOX", how if how == "isolated" else "")
        prover = Prover(catalogue, device="cpu", root=root, servers=Servers.around(sandbox))
        seen[how] = [prover.prove(fix, case).as_dict() for fix, case in real_cases(catalogue)]
    shared = [leg for result in seen["shared"] for leg in result["legs"] if leg.pop("shared", False)]
    assert len(shared) > 30 and {leg["outcome"] for leg in shared} == {"clean", "guarded", "overflow", "error"}
    for result in (result for results in seen.values() for result in results):
        for leg in result["legs"]:
            del leg["seconds"]
    assert seen["shared"] == seen["isolated"]
    assert {result["verdict"] for result in seen["shared"]} == {"proved"}
