"""A sandbox's end of the talk with its fork server, which is played here: what it says and what it makes of answers."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness import sandbox as module
from harness import wire
from harness.ending import Ending
from harness.errors import InfraError
from harness.sandbox import Request, Sandbox, Servers

PID = 1 << 23  # more than a process can have
BEGUN = {"pid": PID, "shared": False}
DONE = {"status": 0, "left": [], "report": "a digest"}
LEG = Request("legs:leg", {"n": 1}, path=["/one", "/two"], detector="victim", zone_bytes=64, timeout=7.0, shared=True)
ENDING = Ending(None, (), "", "", 0, None, False, 0.0)


class Process:
    """A fork server's process, and what was done to it."""

    def __init__(self, stays: bool = False, code: int | None = None) -> None:
        self.did: list[object] = []
        self.stays, self.code = stays, code

    def poll(self):
        return self.code

    def wait(self, timeout=None):
        self.did.append(timeout)
        if self.stays and timeout:
            raise subprocess.TimeoutExpired("", timeout)

    def kill(self):
        self.did.append("kill")


ENDED = [10, "kill", None]


class Connection:
    """A socket, and the time-outs that it was given."""

    def __init__(self, ours) -> None:
        self._ours, self.limits = ours, []

    def settimeout(self, seconds) -> None:
        self.limits.append(seconds)
        self._ours.settimeout(seconds)

    def __getattr__(self, name):
        return getattr(self._ours, name)


class Play:
    """A sandbox whose server has said its answers already."""

    def __init__(self, *answers, stays=False, gone=False) -> None:
        ours, self.theirs = wire.pair()
        self.sandbox, self.process, self.connection = Sandbox("cpu"), Process(stays), Connection(ours)
        self.sandbox._process, self.sandbox._socket = self.process, self.connection
        for answer in answers:
            self.theirs.send(answer if isinstance(answer, bytes) else json.dumps(answer).encode())
        if gone:
            self.theirs.close()

    def told(self) -> list:
        """What the sandbox has said since this was asked."""
        self.theirs.setblocking(False)
        said = []
        while True:
            try:
                said.append(wire.receive(self.theirs))
            except BlockingIOError:
                return said
            except ConnectionError:
                return [*said, "closed"]


@pytest.fixture
def read(monkeypatch):
    """The arguments that a leg's ending was read with, its request and, in the end, its folder."""
    seen = SimpleNamespace(found=ENDING, directory=None, room=None)
    clock, rmtree = iter([100.0, 102.5]), module.shutil.rmtree

    def read(directory, *arguments):
        seen.directory, seen.arguments = Path(directory), arguments
        seen.request = json.loads((seen.directory / "request.json").read_text())
        if isinstance(seen.found, str):
            rmtree(directory)
            return ENDING
        if isinstance(seen.found, OSError):
            raise seen.found
        return seen.found

    def removed(directory, ignore_errors=False):
        room = Path(directory, "room")
        seen.room = room.stat().st_size if room.exists() else None
        rmtree(directory, ignore_errors=ignore_errors)

    monkeypatch.setattr(module, "ending", SimpleNamespace(read=read))
    monkeypatch.setattr(module, "shutil", SimpleNamespace(rmtree=removed))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    return seen


def test_what_a_request_says_unless_told():
    assert dataclasses.asdict(Request("legs:leg")) == {
        "entry": "legs:leg", "params": {}, "device": "cpu", "path": (), "targets": (), "detector": "none",
        "zone_bytes": 4096, "timeout": 120.0, "roots": (), "shared": False,
    }  # fmt: skip


@pytest.mark.parametrize("shared", [True, False])
def test_a_leg_as_its_server_and_its_process_are_told_it(read, monkeypatch, shared):
    monkeypatch.setenv("PYTHONPATH", "/before")
    play = Play(BEGUN | {"shared": shared}, DONE | {"status": 9, "left": ["a thread"]})
    ending = play.sandbox.run(LEG, **({"shared": True} if shared else {}))
    [told] = play.told()
    assert told == {
        "directory": str(read.directory), "path": ["/one", "/two"], "shared": shared,
        "env": {"PYTHONPATH": os.pathsep.join(["/one", "/two", "/before"])},
    }  # fmt: skip
    assert read.directory.name.startswith("unfix-leg-") and not read.directory.exists()
    assert read.request == {
        "entry": "legs:leg", "params": {"n": 1}, "device": "cpu", "targets": [], "detector": "victim",
        "zone_bytes": 64, "roots": [],
    }  # fmt: skip
    assert read.arguments == (9, "a digest", False, 2.5)
    assert ending == dataclasses.replace(ENDING, shared=shared, left=("a thread",))
    assert play.connection.limits == [120.0, 7.0]


def test_without_a_path_a_leg_s_environment_has_no_empty_entry(read, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    play = Play(BEGUN, DONE)
    play.sandbox.run(LEG)
    assert play.told()[0]["env"] == {"PYTHONPATH": os.pathsep.join(["/one", "/two"])}


@pytest.mark.parametrize(
    ("found", "room"), [(ENDING, 1 << 16), (dataclasses.replace(ENDING, report={}), None), ("its folder gone", None)]
)
def test_a_leg_without_a_report_shows_whether_there_is_room_for_one(read, found, room):
    read.found = found
    play = Play(BEGUN, DONE)
    assert play.sandbox.run(LEG) == (ENDING if isinstance(found, str) else found)
    assert read.room == room


def test_a_full_disk_is_one_line(read):
    read.found = OSError(28, "No space left on device")
    play = Play(BEGUN, DONE)
    with pytest.raises(InfraError, match=r"^a leg's directory under .* could not be used: .*No space left on device$"):
        play.sandbox.run(LEG)
    assert not read.directory.exists()


@pytest.mark.parametrize("gone", [True, False])
def test_a_leg_that_takes_too_long_is_stopped(read, monkeypatch, gone):
    play, stopped = Play(BEGUN), []

    def killpg(pid, how):
        stopped.append((pid, how))
        wire.send(play.theirs, DONE | {"status": 9})
        if gone:
            raise ProcessLookupError

    monkeypatch.setattr(os, "killpg", killpg)
    play.sandbox.run(dataclasses.replace(LEG, timeout=0.01))
    assert stopped == [(PID, signal.SIGKILL)] and play.connection.limits == [120.0, 0.01, 30]
    assert read.arguments[:3] == (9, "a digest", True)


@pytest.mark.parametrize(
    ("answers", "error", "ended"),
    [
        pytest.param([], "ConnectionError", [], id="before it begins"),
        pytest.param([b"no message"], "JSONDecodeError", [], id="garbage"),
        pytest.param([{"shared": False}], "KeyError", [], id="no process"),
        pytest.param([BEGUN], "ConnectionError", [PID], id="while it runs"),
        pytest.param([BEGUN, b"no message"], "JSONDecodeError", [PID], id="garbage while it runs"),
    ],
)
def test_a_server_that_is_lost_takes_its_leg_along(read, monkeypatch, answers, error, ended):
    play, killed = Play(*answers), []
    play.theirs.shutdown(module.socket.SHUT_WR)
    monkeypatch.setattr(module, "_end_tree", killed.append)
    with pytest.raises(InfraError, match=rf"^the fork server was lost while a leg ran \({error}: "):
        play.sandbox.run(LEG)
    assert killed == ended and play.process.did == ENDED


def test_a_tree_of_processes_is_known_before_it_is_ended(monkeypatch):
    done = []

    def killer(name, error):
        def kill(pid, how):
            done.append((name, pid, how))
            raise error

        return kill

    monkeypatch.setattr(module.orphans, "descendants", lambda pid: done.append(pid) or [7, 8])
    monkeypatch.setattr(os, "killpg", killer("group", ProcessLookupError))
    monkeypatch.setattr(os, "kill", killer("one", PermissionError))
    module._end_tree(PID)
    kill = signal.SIGKILL
    assert done == [PID, ("group", PID, kill), ("one", 7, kill), ("one", 8, kill)]


@pytest.mark.parametrize(
    ("status", "shared", "left", "asks"),
    [
        pytest.param(0, False, [], True, id="reported"),
        pytest.param(0, True, [], False, id="in a shared process"),
        pytest.param(0, True, ["a thread"], True, id="in one that is given up"),
        pytest.param(9, False, [], False, id="killed"),
        pytest.param(256, False, [], False, id="exit 1"),
        pytest.param(9, True, ["a thread"], False, id="killed in a shared process"),
        pytest.param(1, False, [], False, id="hung up"),
    ],
)
def test_only_a_process_that_may_still_be_there_is_asked_after_and_once(read, status, shared, left, asks):
    play = Play(BEGUN | {"shared": shared}, DONE | {"status": status, "left": left}, {"late": []})
    play.sandbox.settle()
    assert play.told() == [], "no leg, no question"
    play.sandbox.run(LEG)
    play.told()
    play.connection.limits.clear()
    for said in ([{"settle": True}] if asks else [], []):
        play.sandbox.settle()
        assert play.told() == said
    assert play.connection.limits == ([120.0] if asks else [])


def test_a_closed_one_asks_after_nobody(read):
    play, other = Play(BEGUN, DONE), Play()
    play.sandbox.run(LEG)
    play.sandbox.close()
    play.sandbox._process, play.sandbox._socket = other.process, other.connection
    play.sandbox.settle()
    assert other.told() == []


@pytest.mark.parametrize(
    ("late", "how"),
    [([11], "SIGSEGV"), ([1], "SIGHUP"), ([3 << 8], "exit 3"), ([0], "exit 0"), ([1 << 8, 11, 6], "exit 1")],
)
def test_a_process_that_died_late_is_told(read, late, how):
    play = Play(BEGUN, DONE, {"late": late})
    play.sandbox.run(LEG)
    with pytest.raises(InfraError, match=rf"^a leg's process died after its report \({how}\): what it reported is not"):
        play.sandbox.settle()
    assert play.process.did == [], "the server is as good as before"


@pytest.mark.parametrize(
    ("answers", "error"),
    [([], "ConnectionError"), ([b"no message"], "JSONDecodeError"), ([{"settled": []}], "KeyError")],
)
def test_a_server_that_can_t_say_how_they_died_is_told(read, answers, error):
    play = Play(BEGUN, DONE, *answers)
    play.theirs.shutdown(module.socket.SHUT_WR)
    play.sandbox.run(LEG)
    with pytest.raises(InfraError, match=rf"^the fork server was lost after a leg \({error}: "):
        play.sandbox.settle()
    assert play.process.did == ENDED


@pytest.mark.parametrize("gone", [True, False])
def test_a_server_is_told_that_it_is_forsaken(gone):
    play = Play(gone=gone)
    play.sandbox.forsake()
    assert gone or play.told() == [{"forsake": True}]
    Sandbox("cpu").forsake()  # there is none to tell


@pytest.mark.parametrize("stays", [True, False])
def test_a_server_that_is_closed_has_time_to_end(stays):
    play = Play(stays=stays)
    with play.sandbox as entered:
        assert entered is play.sandbox
    assert play.told() == ["closed"] and play.process.did == ENDED
    assert play.sandbox._process is play.sandbox._socket is None
    play.sandbox.close()
    assert play.process.did == ENDED


@pytest.fixture
def start(monkeypatch):
    """``start(hellos, zygote)``: servers that say these, as the zygote or a start gives them; what each was asked."""

    def start(hellos, zygote=False):
        asked, plays = [], [Play(*hello) for hello in hellos]
        for play in plays:
            play.theirs.shutdown(module.socket.SHUT_WR)

        def next_one(preload, env):
            asked.append((preload, env))
            return plays[len(asked) - 1].process, plays[len(asked) - 1].connection

        monkeypatch.setattr(module.launch, "environment", lambda device, path: (device, path))
        monkeypatch.setattr(module.zygote, "fork", next_one if zygote else lambda preload, env: None)
        monkeypatch.setattr(module.launch, "start", next_one)
        return asked, plays

    return start


NAMES = ["numpy", "torch", "triton"]
SPOILT = {"spoilt": "importing it leaves CUDA unusable"}


@pytest.mark.parametrize("zygote", [True, False])
def test_a_server_is_started_once(start, zygote):
    asked, [play] = start([[{"ready": True, "pid": 1}]], zygote)
    sandbox = Sandbox("cpu", ["slow"], ["/one"])
    assert sandbox.device == "cpu"
    assert [sandbox._start() for _ in range(2)] == [play.connection] * 2
    assert asked == [([*NAMES, "slow"], ("cpu", ["/one"]))]
    assert play.connection.limits == ([] if zygote else [300.0]) and play.process.did == []


@pytest.mark.parametrize("lost", ["its process", "its socket"])
def test_a_server_that_is_lost_is_replaced(start, lost):
    before, (_, [play]) = Play(), start([[{"ready": True}]])
    if lost == "its process":
        before.process.code = 1
    else:
        before.sandbox._socket = None
    assert before.sandbox._start() is play.connection and before.process.did == ENDED


@pytest.mark.parametrize(
    ("hellos", "error"),
    [
        pytest.param([[]], r"the fork server did not start \(ConnectionError: ", id="gone"),
        pytest.param([[b"garbage"]], r"the fork server did not start \(JSONDecodeError: ", id="garbage"),
        pytest.param([[{"error": "no libfoo.so"}]], "a package .* does not import: no libfoo.so", id="no import"),
        pytest.param([[SPOILT], [SPOILT]], "a package .* does not import: importing it leaves CUDA", id="spoilt"),
        pytest.param([[SPOILT], [{"ready": True}]], None, id="spoilt by what is slow"),
    ],
)
def test_what_a_server_says_first(start, capfd, hellos, error):
    asked, plays = start(hellos)
    sandbox = Sandbox("cpu", ["slow"])
    if error:
        with pytest.raises(InfraError, match=f"^{error}"):
            sandbox._start()
    else:
        assert sandbox._start() is plays[-1].connection
    assert [preload for preload, _ in asked] == [[*NAMES, "slow"], NAMES][: len(hellos)]
    assert [play.process.did for play in plays] == [ENDED if error or play is not plays[-1] else [] for play in plays]
    said = "unfix: importing it leaves CUDA unusable; each leg imports it for itself, slowly\n"
    assert capfd.readouterr().err == said * (len(hellos) - 1)


class Noted:
    """Plays a sandbox; ``log`` has what all of them were told."""

    log: list = []

    def __init__(self, *made) -> None:
        self.made, self.device = made, made[0]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def run(self, request, *, shared):
        self.log.append(("run", *self.made, shared))
        return request.entry

    def __getattr__(self, name):
        return lambda: self.log.append((name, *self.made))


@pytest.fixture
def log(monkeypatch):
    monkeypatch.delenv("UNFIX_SANDBOX", raising=False)
    monkeypatch.setattr(module, "Sandbox", Noted)
    monkeypatch.setattr(Noted, "log", [])
    return Noted.log


def request_in(tree) -> Request:
    return dataclasses.replace(LEG, path=[str(tree)], roots=(), shared=True)


def test_one_server_is_for_all_overlays_unless_they_are_slow_to_import(log):
    servers = Servers("cpu")
    for tree in (Path("/1"), None, Path("/2")):
        assert servers.run(tree, request_in(tree)) == "legs:leg"
    assert log == [("run", "cpu", (), (), True)] * 3
    assert len(servers._open) == 1


def test_of_an_overlay_s_own_servers_the_last_used_are_kept(log):
    servers = Servers("cpu", ["slow"])
    for at in (1, 2, 3, 4, 1, 5):
        servers.run(Path(f"/{at}"), request_in(f"/{at}"))
    made = {at: ("cpu", ["slow"], [f"/{at}"]) for at in range(1, 6)}
    assert log == [*(("run", *made[at], False) for at in (1, 2, 3, 4, 1)), ("settle", *made[2]), ("close", *made[2]),
                   ("run", *made[5], False)]  # fmt: skip
    log.clear()
    for name in ("forsake", "settle", "close"):
        getattr(servers, name)()
        assert sorted(log) == [(name, *made[at]) for at in (1, 3, 4, 5)]
        log.clear()
    servers.close()
    assert log == []


@pytest.mark.parametrize(
    ("preload", "more", "isolated", "shared"),
    [
        pytest.param([], {}, False, True, id="declared"),
        pytest.param([], {"shared": False}, False, False, id="not declared"),
        pytest.param([], {"roots": ["/one"]}, False, False, id="somebody asks what it reads"),
        pytest.param([], {}, True, False, id="asked for"),
        pytest.param(["slow"], {}, False, False, id="slow to import"),
        pytest.param(["slow"], {"shared": False}, False, False, id="neither"),
    ],
)
def test_who_may_share_a_process(log, monkeypatch, preload, more, isolated, shared):
    if isolated:
        monkeypatch.setenv("UNFIX_SANDBOX", "isolated")
    Servers("cpu", preload).run(None, dataclasses.replace(LEG, **more))
    assert [said[-1] for said in log] == [shared]


def test_one_that_is_open_serves_all(log):
    mine = Noted("cpu", "mine")
    servers = Servers.around(mine)
    servers.run(Path("/1"), LEG)
    servers.close()
    assert log == [("run", "cpu", "mine", True), ("close", "cpu", "mine")]
