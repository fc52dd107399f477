"""The zygote: servers that are forks of it serve as their own would, and nothing depends on it."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from harness import launch, wire, zygote
from harness.sandbox import Request, Sandbox

LEGS = """
import os

def where(params, device):
    import torch
    return {"parent": os.getppid(), "said": os.environ.get("UNFIX_SAID"), "zygote": os.environ.get("UNFIX_ZYGOTE")}

def dies(params, device):
    os.abort()
"""


@pytest.fixture(scope="module")
def open_zygote():
    with zygote.opened("cpu"):
        yield


@pytest.fixture
def leg(tmp_path, open_zygote):
    """``leg(sandbox, name)``: one leg's ending."""
    (tmp_path / "zygote_legs.py").write_text(LEGS)
    return lambda sandbox, name="where": sandbox.run(Request(f"zygote_legs:{name}", path=[str(tmp_path)]))


def facts(ending):
    assert ending.report and not ending.report["raised"], ending
    return ending.report["facts"]


def command(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_servers_are_forks_of_it_each_with_its_own_environment(leg, monkeypatch):
    seen = []
    for said in ("one", "two"):
        monkeypatch.setenv("UNFIX_SAID", said)
        with Sandbox("cpu") as sandbox:
            found = facts(leg(sandbox))
            assert found["said"] == said and found["zygote"] is None
            assert found["parent"] == sandbox._process.pid
            seen.append((sandbox._process.pid, parent(sandbox._process.pid)))
    (first, zygote_of_first), (second, zygote_of_second) = seen
    assert first != second and zygote_of_first == zygote_of_second != os.getpid()
    assert b"harness.forkserver" in command(zygote_of_first)
    assert os.getsid(zygote_of_first) == zygote_of_first  # a terminal that stops this process doesn't stop its servers


def test_a_server_is_gone_when_its_sandbox_closed(leg):
    with Sandbox("cpu") as sandbox:
        leg(sandbox)
        pid = sandbox._process.pid
    assert not Path(f"/proc/{pid}").exists()


def test_a_server_that_died_is_followed_by_another_fork(leg):
    with Sandbox("cpu") as sandbox:
        leg(sandbox)
        first = sandbox._process
        first.kill()
        first.wait(10)
        assert facts(leg(sandbox))["parent"] == sandbox._process.pid != first.pid
        assert parent(sandbox._process.pid) != os.getpid()


def test_a_leg_that_dies_costs_its_server_nothing(leg):
    with Sandbox("cpu") as sandbox:
        assert leg(sandbox, "dies").signal == "SIGABRT"
        pid = sandbox._process.pid
        assert facts(leg(sandbox))["parent"] == pid


@pytest.mark.parametrize("other", [{"device": "cuda"}, {"device": "cpu", "path": ["/elsewhere"]}])
def test_none_is_had_where_it_has_imported_something_else(open_zygote, other, monkeypatch):
    monkeypatch.setattr(launch, "compute_capabilities", lambda: ["9.0"])
    env = launch.environment(**other)
    assert zygote.fork(launch.preload("cpu"), env) is None
    assert zygote.fork(["json"], launch.environment("cpu")) is None


def test_what_it_cannot_read_it_passes_over(open_zygote):
    for said in (b"{", b'{"kind": 1}', b"[1]"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(os.environ[launch.ZYGOTE])
            stranger.send(said)
            with pytest.raises(OSError):
                wire.receive(stranger)
    process, connection = zygote.fork(launch.preload("cpu"), launch.environment("cpu"))
    connection.close()
    process.wait(10)


def test_a_server_outlives_it_and_the_next_sandbox_starts_its_own(leg, tmp_path):
    with zygote.opened("cpu"), Sandbox("cpu") as sandbox, Sandbox("cpu") as after:
        leg(sandbox)
        os.kill(parent(sandbox._process.pid), signal.SIGKILL)
        assert facts(leg(sandbox))["parent"] == sandbox._process.pid
        assert facts(leg(after))["parent"] == after._process.pid
        assert parent(after._process.pid) == os.getpid()
    assert launch.ZYGOTE not in os.environ


def test_a_path_too_long_for_a_socket_means_none(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(zygote.tempfile, "tempdir", str(deep))
    monkeypatch.delenv(launch.ZYGOTE, raising=False)
    with zygote.opened("cpu"):
        assert launch.ZYGOTE not in os.environ
    assert list(deep.iterdir()) == []
