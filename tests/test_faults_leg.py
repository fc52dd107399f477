"""Faults of a leg: whatever it does to itself, its report, its signals or its machine is one ending, said in one line.

Nothing of it is believed that its process did not report, nothing of it is left, and the next leg runs. What dies by a
signal, hangs in Python or starts a child is in `test_sandbox.py`; what a leg does to a process that it shares, in
`test_resident.py`; what a GPU does, in `test_faults_gpu.py`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from harness import orphans, outcome
from harness.ending import CAPTURE_BYTES
from harness.errors import InfraError
from harness.sandbox import Request, Sandbox

LEGS = """
import ctypes, json, os, pathlib, resource, signal, sys, threading, time

def nothing(params, device): pass
def server(params, device): return {"pid": os.getppid()}

# ends and hangs
def writes_astray(params, device): ctypes.memset(0xdead0000, 0, 1)
def is_killed(params, device): os.kill(os.getpid(), signal.SIGKILL)
def hangs_in_c(params, device): ctypes.PyDLL(None).pause()  # no other thread of Python's runs
def blocks_signals_and_hangs(params, device):
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ctypes.PyDLL(None).pause()
def blocks_signals(params, device): signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())

# memory
def _limit():
    mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (64 << 20), -1))
def runs_out_of_memory(params, device):
    _limit()
    kept = []
    while True: kept.append(bytearray(1 << 20))
def runs_out_of_torch_s(params, device):
    import torch
    _limit()
    torch.empty(1 << 33)

# what it says
def prints_100_mb(params, device):
    for stream in (1, 2):
        for _ in range(50): os.write(stream, b"#" * (1 << 20))
    os.write(1, b"the end")
def returns_an_object(params, device): return {"x": object()}
def returns_a_circle(params, device):
    circle = {}
    circle["x"] = circle
    return circle
def returns_a_surrogate(params, device): return {"x": chr(0xd800)}

# its report, and how it is told
def closes_all(params, device): os.closerange(3, 4096)
def forges(params, device):
    report = {"raised": None, "wrong": None, "hits": [], "facts": {}, "watched": 1, "seconds": {}}
    pathlib.Path(folder(), "report.json").write_text(json.dumps(report))
    os._exit(0)
def folder(): return os.path.dirname(os.readlink("/proc/self/fd/1"))
def removes_its_folder(params, device):
    import shutil
    shutil.rmtree(folder())
def puts_a_pipe(params, device):
    for name in ("stdout", "reached", "read"):
        path = os.path.join(folder(), name)
        if os.path.lexists(path): os.unlink(path)
        os.mkfifo(path)
def marks_garbage(params, device): pathlib.Path(folder(), "reached").write_bytes(bytes(range(256)) * 100)
def tampers(params, device):
    # with its report, as soon as that is written
    rename = pathlib.Path.rename
    def renamed(part, report):
        rename(part, report)
        if params["how"] in ("deleted", "a folder", "a pipe"): os.unlink(report)
        if params["how"] == "a folder": os.mkdir(report)
        if params["how"] == "a pipe": os.mkfifo(report)
        if params["how"] == "truncated": os.truncate(report, 20)
        if params["how"] == "emptied": os.truncate(report, 0)
        if params["how"] == "garbage": report.write_bytes(bytes(range(256)))
        if params["how"] == "another": report.write_text(report.read_text().replace("RuntimeError", "Nothing"))
    pathlib.Path.rename = renamed
    raise RuntimeError("to be told")

# what it leaves
def _daemon(note):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.fork()
            os.closerange(0, 4096)
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            os.write(os.open(note, os.O_WRONLY | os.O_CREAT | os.O_APPEND), b"%d\\n" % os.getpid())
            while True: signal.pause()
        os._exit(0)
    os.wait()
    while not os.path.exists(note) or open(note).read().count("\\n") < 2: time.sleep(0.01)
def leaves_a_daemon(params, device):
    _daemon(params["note"])
    ends = {"hangs": signal.pause, "vanishes": lambda: os._exit(0), "aborts": os.abort, "ends": lambda: None}
    ends[params["then"]]()
def takes_the_server_along(params, device):
    _daemon(params["note"])
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()
def lingers(params, device):
    # its process ends after its report, when it is told to
    def stay(code):
        while not os.path.exists(params["until"]): time.sleep(0.01)
        exits(code)
    exits, os._exit = os._exit, stay
    return {"pid": os.getpid()}
def has_a_daemon_as_another_ends(params, device):
    _daemon(params["note"])
    open(params["until"], "w").close()
    while os.path.exists(f"/proc/{params['other']}"): time.sleep(0.01)
    pids = open(params["note"]).read().split()
    looks = [all(os.path.exists(f"/proc/{pid}") for pid in pids) for _ in range(10) if not time.sleep(0.02)]
    return {"alive": looks}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("legs")
    (folder / "unfix_fault_legs.py").write_text(LEGS)
    return folder


@pytest.fixture(scope="module")
def own():
    with Sandbox("cpu") as own:
        yield own


@pytest.fixture
def run(own, folder, tmp_path, monkeypatch):
    """Runs a leg, and in the end another; of none there is a process or a file left then."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()

    def run(name, params=None, shared=False, **more):
        return own.run(Request(f"unfix_fault_legs:{name}", params or {}, path=[str(folder)], **more), shared=shared)

    yield run
    server = run("server").report["facts"]["pid"]
    own.settle()
    own.forsake()
    own.settle()
    left = orphans.descendants(server)
    assert len(left) <= 1, "more than a spare"
    assert not any(orphans.children(pid) for pid in left)
    assert os.listdir(tmp_path / "scratch") == []


def judged(ending):
    leg = outcome.read(ending, reverted=(), guards=(), detector="none", predicted=None, targets=())
    assert "\n" not in leg.error
    return leg.outcome, leg.error, bool(leg.infra)


# fault -> outcome, the line that says it, and whether that is the machine's fault: then nothing was learnt
FAULTS = {
    "writes_astray": ("crashed", "SIGSEGV in writes_astray", False),
    "is_killed": ("crashed", "SIGKILL", True),
    "runs_out_of_memory": ("error", "MemoryError: ", True),
    "runs_out_of_torch_s": ("error", "RuntimeError: [enforce fail at ", True),
    "prints_100_mb": ("clean", "", False),
    "blocks_signals": ("clean", "", False),
    "returns_an_object": ("error", "TypeError: Object of type object is not JSON serializable", False),
    "returns_a_circle": ("error", "ValueError: Circular reference detected", False),
    "returns_a_surrogate": ("clean", "", False),
    "marks_garbage": ("clean", "", False),
    "puts_a_pipe": ("clean", "", False),
    "closes_all": ("error", "exit 70 without a report", True),
    "removes_its_folder": ("error", "exit 70 without a report", True),
    "forges": ("error", "exit 0 without a report", True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_fault_is(run, fault):
    kind, line, infra = FAULTS[fault]
    ending = run(fault)
    found, said, is_infra = judged(ending)
    assert (found, is_infra) == (kind, infra) and said.startswith(line)
    if fault == "prints_100_mb":
        assert len(ending.stderr) == CAPTURE_BYTES and len(ending.stdout) == CAPTURE_BYTES
        assert ending.stdout.endswith("#the end")


@pytest.mark.parametrize("fault", ["hangs_in_c", "blocks_signals_and_hangs"])
@pytest.mark.parametrize("shared", [False, True])
def test_what_never_returns_is_stopped(run, fault, shared):
    ending = run(fault, timeout=1, shared=shared)
    assert judged(ending) == ("hung", "did not end within 1 s", False) and ending.signal == "SIGKILL"


@pytest.mark.parametrize("how", ["deleted", "truncated", "emptied", "garbage", "another", "a folder", "a pipe"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_report_that_is_not_what_its_process_wrote_is_none(run, how, shared):
    assert judged(run("tampers", {"how": how}, shared=shared)) == ("error", "exit 0 without a report", True)


def test_one_that_is_left_alone_is_believed(run):
    assert judged(run("tampers", {"how": "not"})) == ("error", "RuntimeError: to be told", False)


def test_a_signal_mask_is_no_other_leg_s(run):
    assert run("blocks_signals", shared=True).left == ("the signal mask",)


# how a leg ends that started a daemon, and whether in a process of its own
DAEMONS = [(then, shared) for then in ("ends", "vanishes", "aborts", "hangs") for shared in (False, True)]


@pytest.mark.parametrize(("then", "shared"), DAEMONS)
def test_a_daemon_ends_with_its_leg(run, own, tmp_path, then, shared):
    params = {"note": str(tmp_path / "daemon"), "then": then}
    ending = run("leaves_a_daemon", params, timeout=2 if then == "hangs" else 60, shared=shared)
    own.settle()
    assert alive(tmp_path / "daemon") == []
    assert ending.shared == shared and ending.left == (("child processes",) if shared and then == "ends" else ())


def test_a_leg_s_daemons_are_its_own_as_long_as_it_runs(run, tmp_path):
    """One leg's end does not take another's along."""
    params = {"note": str(tmp_path / "daemon"), "until": str(tmp_path / "until")}
    other = run("lingers", params).report["facts"]["pid"]
    ending = run("has_a_daemon_as_another_ends", {**params, "other": other})
    assert ending.report["facts"] == {"alive": [True] * 10}


@pytest.mark.parametrize("shared", [False, True])
def test_a_server_that_dies_takes_a_leg_and_its_daemon_along(folder, tmp_path, shared):
    note = tmp_path / "daemon"
    with Sandbox("cpu") as mine:
        request = Request("unfix_fault_legs:takes_the_server_along", {"note": str(note)}, path=[str(folder)])
        with pytest.raises(InfraError, match="fork server was lost while a leg ran"):
            mine.run(request, shared=shared)
        assert mine.run(Request("unfix_fault_legs:nothing", path=[str(folder)])).report is not None
    assert alive(note) == []


def alive(note: Path) -> list[int]:
    """Which of the processes that wrote their numbers there run still; one that waits to be reaped does not."""
    pids = [int(pid) for pid in note.read_text().split()]
    assert len(pids) == 2
    return [pid for pid in pids if (stat := _stat(pid)) and stat not in "ZX"]


def _stat(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
