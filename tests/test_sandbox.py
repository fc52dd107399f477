"""The sandbox: a leg may do anything to itself, and only that leg is lost."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import inline, wire
from harness.ending import CAPTURE_BYTES
from harness.errors import InfraError
from harness.forkserver import IN_A_ROW
from harness.sandbox import Request, Sandbox

LEGS = """
import ctypes, os, signal, subprocess, sys, time

def clean(params, device):
    print("on stdout"); print("on stderr", file=sys.stderr)
    return {"sum": sum(params["numbers"]), "device": device, "pid": os.getpid(), "server": os.getppid()}

def nothing(params, device): pass
def raises(params, device): raise KeyError("the message")
def segfaults(params, device): ctypes.string_at(0)
def aborts(params, device): os.write(2, b"Assertion `x' failed.\\n"); os.abort()
def leaves(params, device): sys.exit(3)
def vanishes(params, device): os._exit(0)
def terminated(params, device): os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)
def is_wrong(params, device):
    from harness.leg import WrongValues
    raise WrongValues("x[0]: 1, reference 2")
def interrupted(params, device): raise KeyboardInterrupt

def child(params):
    started = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(300)"])
    open(params["note"], "w").write(str(started.pid))

def hangs(params, device): child(params); time.sleep(300)
def leaves_a_child(params, device): child(params)
def kills_the_server(params, device): child(params); os.kill(os.getppid(), signal.SIGKILL); time.sleep(params["stay"])
def shouts(params, device): print("#" * (1 << 20) + "the end", file=sys.stderr)
def environment(params, device): return {name: os.environ.get(name) for name in params["names"]}
def interrupts_itself(params, device): os.kill(os.getpid(), signal.SIGINT); time.sleep(60)
def knows(params, device): return {"before": [name for name in params["names"] if name in sys.modules]}
def sees_a_variable(params, device): return {"prepared": getattr(sys, "unfix_prepared", None), "pid": os.getpid()}

def others(params, device):
    # the server's other children, once there is one
    listed = f"/proc/{os.getppid()}/task/{os.getppid()}/children"
    while not (pids := [pid for pid in map(int, open(listed).read().split()) if pid != os.getpid()]): pass
    return {"pid": os.getpid(), "server": os.getppid(), "others": pids}

def leaves_how(params, device):
    # what its process does once its report is written and told of
    def stay(code):
        while not os.path.exists(params["until"]): time.sleep(0.01)
        exits(code)
    def die(code): os.kill(os.getpid(), params["signal"])
    exits, os._exit = os._exit, stay if "until" in params else die
    return {"pid": os.getpid()}

def core_size(params, device):
    import resource
    return {"soft": resource.getrlimit(resource.RLIMIT_CORE)[0]}
def allocates(params, device):
    import torch
    buffers = [torch.zeros(4) for _ in range(params["count"])]
def imports(params, device):
    import mine
    return {"file": mine.__file__}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("legs")
    (folder / "unfix_test_legs.py").write_text(LEGS)
    return folder


@pytest.fixture
def run(sandbox, folder):
    def run(name, params=None, **more):
        return sandbox.run(Request(f"unfix_test_legs:{name}", params or {}, path=[str(folder)], **more))

    return run


def is_gone(pid: int) -> bool:
    """Whether a process ends within a few seconds; a zombie that init has yet to reap has ended."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def is_gone_now(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_a_clean_leg(run):
    ending = run("clean", {"numbers": [1, 2, 3]})
    assert ending.report["raised"] is None and ending.report["hits"] == [] and ending.report["wrong"] is None
    facts = ending.report["facts"]
    assert (facts["sum"], facts["device"]) == (6, "cpu")
    assert facts["pid"] != os.getpid() and facts["server"] != os.getpid()
    assert (ending.stdout, ending.stderr) == ("on stdout\n", "on stderr\n")
    assert (ending.exit_code, ending.signal, ending.timed_out) == (0, None, False)


def test_legs_share_the_server_and_nothing_else(run):
    first, second = (run("clean", {"numbers": []}).report["facts"] for _ in range(2))
    assert first["server"] == second["server"] and first["pid"] != second["pid"]


# entry -> exit code, signal, a part of what is left; None: no report
ENDINGS = {
    "nothing": (0, None, "{}"),
    "raises": (0, None, "KeyError"),
    "is_wrong": (0, None, "reference 2"),
    "segfaults": (None, "SIGSEGV", "segfaults"),
    "aborts": (None, "SIGABRT", "Assertion `x' failed."),
    "terminated": (None, "SIGTERM", ""),
    "vanishes": (0, None, ""),
    "leaves": (0, None, "'type': 'SystemExit', 'message': '3'"),
    "interrupted": (70, None, "KeyboardInterrupt"),
    "interrupts_itself": (70, None, "KeyboardInterrupt"),
    "no_such_entry": (0, None, "AttributeError"),
}
REPORTS = ("nothing", "raises", "leaves", "is_wrong", "no_such_entry")


@pytest.mark.parametrize("entry", ENDINGS)
def test_ending(run, entry):
    exit_code, signalled, part = ENDINGS[entry]
    ending = run(entry)
    assert (ending.exit_code, ending.signal, ending.timed_out) == (exit_code, signalled, False)
    assert (ending.report is not None) == (entry in REPORTS)
    assert part in str(ending.report) + ending.stderr
    assert run("nothing").report is not None


def test_a_leg_leaves_no_core(run):
    assert run("core_size").report["facts"] == {"soft": 0}


@pytest.mark.parametrize(("detector", "count", "watched"), [("red-zone", 3, 3), ("red-zone", 0, 0), ("none", 3, 0)])
def test_a_report_says_how_many_allocations_were_watched(run, detector, count, watched):
    assert run("allocates", {"count": count}, detector=detector).report["watched"] == watched


def test_a_hanging_leg_is_stopped_with_all_that_it_started(run, tmp_path):
    started = time.monotonic()
    ending = run("hangs", {"note": str(tmp_path / "pid")}, timeout=2)
    assert ending.timed_out and ending.report is None
    assert time.monotonic() - started < 30
    assert is_gone(int((tmp_path / "pid").read_text()))
    assert run("nothing").report is not None


def test_a_child_that_outlives_its_leg_is_killed(run, tmp_path):
    ending = run("leaves_a_child", {"note": str(tmp_path / "pid")})
    assert ending.report["raised"] is None
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_of_a_long_stream_the_end_is_kept(run):
    ending = run("shouts")
    assert ending.report["raised"] is None
    assert len(ending.stderr) == CAPTURE_BYTES and ending.stderr.endswith("##the end\n")


def test_a_selection_around_the_run_does_not_reach_a_leg(folder, monkeypatch):
    monkeypatch.setenv("SGLANG_DEBUG_REVERT_PR", "27338")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    names = ["SGLANG_DEBUG_REVERT_PR", "CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET", "PYTHONPATH"]
    with Sandbox("cpu", preload=()) as sandbox:
        ending = sandbox.run(Request("unfix_test_legs:environment", {"names": names}, path=[str(folder)]))
    facts = ending.report["facts"]
    assert [facts[name] for name in names[:3]] == [None, "", "1"]
    assert facts["PYTHONPATH"].split(os.pathsep)[0] == str(folder)  # for what a leg starts


def test_a_leg_is_never_a_path_s_second_user(sandbox, folder, tmp_path):
    """What one leg imported from its overlay is not there for the next one."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text("")
        path = [str(tmp_path / name), str(folder)]
        ending = sandbox.run(Request("unfix_test_legs:imports", path=path))
        assert ending.report["facts"]["file"] == str(tmp_path / name / "mine.py")


@pytest.mark.parametrize("stay", [0, 300])
def test_a_lost_server_costs_the_leg_that_ran(folder, tmp_path, stay):
    with Sandbox("cpu", preload=()) as sandbox:
        params = {"note": str(tmp_path / "pid"), "stay": stay}
        request = Request("unfix_test_legs:kills_the_server", params, path=[str(folder)], timeout=20)
        started = time.monotonic()
        with pytest.raises(InfraError, match="fork server was lost") as caught:
            sandbox.run(request)
        assert "\n" not in str(caught.value)
        assert time.monotonic() - started < 15, "noticed by the leg's time-out only"
        assert sandbox.run(Request("unfix_test_legs:nothing", path=[str(folder)])).report is not None
    orphan = int((tmp_path / "pid").read_text())
    gone = is_gone(orphan)
    if not gone:
        os.kill(orphan, signal.SIGKILL)
    assert gone, "what the leg started outlives it"


def test_a_server_that_died_between_legs_is_started_again(folder):
    request = Request("unfix_test_legs:clean", {"numbers": []}, path=[str(folder)])
    with Sandbox("cpu", preload=()) as sandbox:
        server = sandbox.run(request).report["facts"]["server"]
        os.kill(server, signal.SIGKILL)
        assert is_gone(server)
        assert sandbox.run(request).report["facts"]["server"] != server


def test_close_ends_the_server_and_a_closed_sandbox_can_be_used_again(folder):
    request = Request("unfix_test_legs:clean", {"numbers": []}, path=[str(folder)])
    sandbox = Sandbox("cpu", preload=())
    for _ in range(2):
        server = sandbox.run(request).report["facts"]["server"]
        sandbox.close()
        assert is_gone(server)
    sandbox.close()


@pytest.mark.parametrize("package", ["no_such_package_here", "unfix_breaks_on_import"])
def test_a_missing_package_is_one_line_that_names_it(folder, monkeypatch, package):
    (folder / "unfix_breaks_on_import.py").write_text("raise OSError('unfix_breaks_on_import: no libfoo.so')")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    with Sandbox("cpu", preload=("json", package)) as sandbox, pytest.raises(InfraError) as caught:
        sandbox.run(Request("unfix_test_legs:nothing"))
    assert package in str(caught.value) and sys.executable in str(caught.value)
    assert "\n" not in str(caught.value)


class Played:
    """A fork server's process that is gone once it is waited for."""

    def poll(self):
        return None

    def wait(self, timeout=None):
        return 0

    def kill(self):
        pass


SPOILT = {"spoilt": "importing it leaves CUDA unusable"}


@pytest.mark.parametrize(
    ("hellos", "error", "note"),
    [
        pytest.param([{"ready": True}], None, "", id="ready"),
        pytest.param([SPOILT, {"ready": True}], None, "unfix: importing it leaves CUDA unusable; each leg", id="slow"),
        pytest.param([SPOILT, SPOILT], "does not import: importing it leaves CUDA", "unfix: importing", id="all"),
        pytest.param([{"error": "no libfoo.so"}], "does not import: no libfoo.so", "", id="broken"),
        pytest.param([None], "fork server did not start", "", id="died"),
    ],
)
def test_a_server_s_first_words(monkeypatch, capfd, hellos, error, note):
    asked = []

    def start(preload, env):
        asked.append("a_slow_package" in preload)
        ours, theirs = wire.pair()
        if hello := hellos[len(asked) - 1]:
            wire.send(theirs, hello)
        theirs.close()
        return Played(), ours

    monkeypatch.setattr("harness.zygote.fork", lambda preload, env: None)
    monkeypatch.setattr("harness.launch.start", start)
    raises = pytest.raises(InfraError, match=error) if error else contextlib.nullcontext()
    with Sandbox("cpu", preload=("a_slow_package",)) as sandbox, raises:
        sandbox._start()
    assert asked == [True, False][: len(hellos)]
    said = capfd.readouterr().err
    assert said.startswith(note) and bool(said) == bool(note)


CLIENT = """
import sys, threading, time
from harness.sandbox import Request, Sandbox
sandbox = Sandbox("cpu", preload=())
ending = sandbox.run(Request("unfix_test_legs:clean", {"numbers": []}, path=[sys.argv[1]]))
print(ending.report["facts"]["server"], flush=True)
if sys.argv[3] == "busy":
    sandbox.run(Request("unfix_test_legs:hangs", {"note": sys.argv[2]}, path=[sys.argv[1]]))
time.sleep(300)
"""


@pytest.mark.parametrize("doing", ["idle", "busy"])
def test_nothing_is_left_of_a_client_that_was_killed(folder, root, tmp_path, doing):
    note = tmp_path / "pid"
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, str(folder), str(note), doing], cwd=root, stdout=subprocess.PIPE, text=True
    )
    try:
        server = int(client.stdout.readline())
        if doing == "busy":
            until = time.monotonic() + 20
            while not (note.exists() and note.read_text()) and time.monotonic() < until:
                time.sleep(0.05)
            assert note.exists(), "the leg did not start"
    finally:
        client.kill()
        client.wait()
        client.stdout.close()
    assert is_gone(server)
    if doing == "busy":
        assert is_gone(int(note.read_text()))


class TestSpare:
    """After a few legs in a row, the next one's process is there before it is asked for, and is nobody's until then."""

    @pytest.fixture
    def alone(self, run, sandbox):
        """Runs a leg; which process that was, which the server's and, alone beside it, the spare's."""
        sandbox.forsake()
        for _ in range(IN_A_ROW):
            run("nothing")

        def alone():
            sandbox.settle()
            facts = run("others").report["facts"]
            return facts["pid"], facts["server"], *facts["others"]

        return alone

    def test_the_next_leg_runs_in_it(self, alone):
        _, _, spare = alone()
        assert alone()[0] == spare

    def test_one_that_dies_waiting_costs_nothing(self, alone):
        _, server, spare = alone()
        os.kill(spare, signal.SIGKILL)
        assert is_gone(spare)
        leg, after, _ = alone()
        assert leg != spare and after == server

    def test_an_interrupt_ends_neither_it_nor_the_server(self, alone):
        _, server, spare = alone()
        for pid in (server, spare):
            os.kill(pid, signal.SIGINT)
        assert alone()[:2] == (spare, server)

    @pytest.mark.parametrize("how", ["closed", "killed"])
    def test_it_ends_with_its_server(self, folder, how):
        with Sandbox("cpu") as sandbox:
            for _ in range(IN_A_ROW):
                sandbox.run(Request("unfix_test_legs:nothing", path=[str(folder)]))
            sandbox.settle()
            left = sandbox.run(Request("unfix_test_legs:others", path=[str(folder)])).report["facts"]
            if how == "killed":
                os.kill(left["server"], signal.SIGKILL)
                assert all(is_gone(pid) for pid in left["others"])
        assert all(is_gone(pid) for pid in (left["server"], *left["others"]))


SERVER = """
import os, sys, socket
from harness import forkserver
forkserver.TEAR_DOWN, forkserver.IN_A_ROW = 0.5, 1

def prepare():
    how, note = sys.argv[2:]
    with open(note, "a") as log: print(os.getpid(), file=log)
    print("preparing")
    if how == "raises": raise RuntimeError("no context")
    if how == "exits": os._exit(3)
    if how == "aborts": os.abort()
    sys.unfix_prepared = how

forkserver.Server(socket.socket(fileno=int(sys.argv[1])), prepare).serve()
"""


class TestPrepared:
    """A server whose spares prepare something, as those on a GPU make their CUDA context."""

    @pytest.fixture
    def prepared(self, root, tmp_path, monkeypatch):
        """``prepared(how)``: a sandbox around such a server."""
        monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
        with contextlib.ExitStack() as stack:

            def start(how):
                ours, theirs = wire.pair()
                command = [sys.executable, "-c", SERVER, str(theirs.fileno()), how, str(tmp_path / "note")]
                sandbox = stack.enter_context(Sandbox("cpu"))
                sandbox._process = subprocess.Popen(command, cwd=root, pass_fds=[theirs.fileno()])
                sandbox._socket = ours
                theirs.close()
                return sandbox

            yield start

    @pytest.fixture
    def request_(self, folder):
        return lambda name, **params: Request(f"unfix_test_legs:{name}", params, path=[str(folder)])

    def test_a_leg_finds_what_was_prepared_in_its_own_process(self, prepared, request_, tmp_path, capfd):
        sandbox = prepared("well")
        first, *endings = [sandbox.run(request_("sees_a_variable")) for _ in range(3)]
        assert first.report["facts"]["prepared"] is None, "there was no leg before it"
        pids = (tmp_path / "note").read_text().split()
        for at, ending in enumerate(endings):
            assert ending.report["facts"] == {"prepared": "well", "pid": int(pids[at])}
            assert ending.stdout == "", "what a spare prints is no leg's"
        sandbox.close()
        assert "preparing" not in "".join(capfd.readouterr()), "nor anybody's"

    @pytest.mark.parametrize("how", ["raises", "exits", "aborts"])
    def test_a_leg_does_without_a_spare_that_could_not(self, prepared, request_, tmp_path, how):
        sandbox = prepared(how)
        sandbox.run(request_("nothing"))
        for _ in range(2):
            ending = sandbox.run(request_("sees_a_variable"))
            assert ending.report["facts"]["prepared"] is None and ending.exit_code == 0
            assert str(ending.report["facts"]["pid"]) not in (tmp_path / "note").read_text().split()

    def test_a_process_that_does_not_leave_is_killed(self, prepared, request_, tmp_path):
        sandbox = prepared("well")
        pid = sandbox.run(request_("leaves_how", until=str(tmp_path / "never"))).report["facts"]["pid"]
        sandbox.settle()
        assert is_gone(pid)


class TestLeaving:
    """A leg has ended once its report is written; its process may take longer."""

    def test_the_next_leg_does_not_wait(self, run, sandbox, tmp_path):
        first = run("leaves_how", {"until": str(tmp_path / "go")})
        assert (first.exit_code, first.signal) == (0, None)
        second = run("leaves_how", {"until": str(tmp_path / "go")})
        for ending in (first, second):
            assert not is_gone_now(ending.report["facts"]["pid"])
        (tmp_path / "go").touch()
        sandbox.settle()
        for ending in (first, second):
            assert is_gone_now(ending.report["facts"]["pid"])

    def test_a_death_after_the_report_is_told(self, run, sandbox):
        assert run("leaves_how", {"signal": signal.SIGSEGV}).report["wrong"] is None
        with pytest.raises(InfraError, match=r"died after its report \(SIGSEGV\)"):
            sandbox.settle()
        sandbox.settle()  # told once
        assert run("nothing").report is not None

    def test_one_that_is_killed_from_outside_has_reported_all_the_same(self, run, sandbox):
        run("leaves_how", {"signal": signal.SIGKILL})
        sandbox.settle()

    @pytest.mark.parametrize("settled", [True, False])
    def test_a_server_lost_before_it_could_say_is_told(self, folder, settled):
        with Sandbox("cpu") as sandbox:
            request = Request("unfix_test_legs:clean", {"numbers": []}, path=[str(folder)])
            server = sandbox.run(request).report["facts"]["server"]
            if settled:
                sandbox.settle()
            os.kill(server, signal.SIGKILL)
            assert is_gone(server)
            with contextlib.nullcontext() if settled else pytest.raises(InfraError, match="was lost after a leg"):
                sandbox.settle()
            sandbox.settle()  # told once

    def test_it_ends_with_the_client(self, folder, tmp_path):
        with Sandbox("cpu") as sandbox:
            request = Request("unfix_test_legs:leaves_how", {"until": str(tmp_path / "never")}, path=[str(folder)])
            pid = sandbox.run(request).report["facts"]["pid"]
        assert is_gone(pid)


def test_nothing_to_settle_is_fine():
    Sandbox("cpu").settle()


def test_what_legs_share_is_imported_once(run):
    names = ["harness.memory.watch", "harness.reach", "tvm_ffi", "regressions", "eagle_kv"]
    assert run("knows", {"names": names}).report["facts"]["before"] == names[:2]


def test_what_an_import_printed_is_said_once_and_not_by_legs(folder, monkeypatch, capfd):
    (folder / "unfix_prints_on_import.py").write_text("print('imported')")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with Sandbox("cpu", preload=("unfix_prints_on_import",)) as sandbox:
        assert [sandbox.run(Request("unfix_test_legs:nothing")).stdout for _ in range(2)] == ["", ""]
    assert capfd.readouterr().err.count("imported") == 1


def test_a_report_says_where_the_time_went(run):
    started = time.monotonic()
    assert 0 < run("nothing").seconds < time.monotonic() - started + 0.001, "rounded"
    assert list(run("nothing").report["seconds"]) == ["import", "run", "check"]
    assert list(run("no_such_entry").report["seconds"]) == ["run", "check"]


def test_a_leg_s_folder_is_removed(run, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for entry in ("nothing", "segfaults"):
        run(entry)
    assert os.listdir(tmp_path) == []


def test_no_room_for_a_leg_s_folder_is_one_line(run, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(InfraError, match="missing"):
        run("nothing")


class TestInline:
    """``UNFIX_SANDBOX=inline``: the same answers, from this very process."""

    @pytest.fixture
    def inline(self, folder, monkeypatch):
        monkeypatch.setenv("UNFIX_SANDBOX", "inline")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        yield lambda name, **params: Sandbox("cpu").run(Request(f"unfix_test_legs:{name}", params, path=[str(folder)]))
        with contextlib.suppress(KeyError):
            del sys.modules["unfix_test_legs"]

    def test_it_runs_here_and_leaves_nothing(self, inline, folder):
        ending = inline("clean", numbers=[4, 5])
        assert ending.report["facts"]["sum"] == 9 and ending.report["facts"]["pid"] == os.getpid()
        assert "unfix_test_legs" not in sys.modules and str(folder) not in sys.path

    def test_what_is_installed_below_its_path_stays(self):
        sys.modules.pop("shellingham", None)
        with inline.import_path([sys.prefix]):
            importlib.import_module("shellingham")
        assert "shellingham" in sys.modules

    def test_what_a_leg_raises_is_reported(self, inline):
        assert inline("raises").report["raised"]["type"] == "KeyError"
        assert inline("is_wrong").report["wrong"] == "x[0]: 1, reference 2"
