"""No network unless asked: every command that needs none runs where each use of an internet socket is an error.

It is Python's own audit that tells: in the command, and in every Python that it starts. Those that ask for a network
are `unfix upstream install` and every command with a `--release` that isn't in the cache, which pip fetches.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WATCH = """
import os, socket, sys
def watch(event, arguments, asked={"socket.getaddrinfo", "socket.gethostbyname", "socket.connect", "socket.sendto"}):
    if event in asked and getattr(arguments[0], "family", None) != socket.AF_UNIX:
        with open(os.environ["ASKED"], "a") as log:
            print(event, arguments[1:] if event == "socket.connect" else arguments, file=log)
        raise RuntimeError("no network here")
sys.addaudithook(watch)
open(os.environ["ASKED"], "a").close()
"""
NIGHT = str(ROOT / "tests/nights/2-fix-deleted.json")
ENTRY = "patches: [{target: sglang.a.f, edits: [{match: a, replacement: b}]}]"
COMMANDS = {
    "list": ["list"],
    "diff": ["diff", "27338"],
    "check": ["check"],
    "import": ["import", "entry.yaml", "1"],
    "report": ["report", NIGHT, "--html", "r.html", "--badge", "b.json"],
    "repro": ["repro", "27338", "--device", "cpu"],
    "exec": ["exec", "--revert", "27338", "--", "python", "-c", "import eagle_kv"],
    "bisect": ["bisect", "--fixes", "27338", "--", sys.executable, "-c", "import eagle_kv.backends.flashinfer"],
    "run": ["run", "own:int32-rows", "--device", "cpu", "-n", "1", "--json", "m.json"],
}


@pytest.fixture
def asked(unfix, tmp_path):
    """``asked(*arguments)``: how a command ended, and what it asked of a network."""
    (tmp_path / "watch").mkdir()
    (tmp_path / "watch/sitecustomize.py").write_text(WATCH)
    (tmp_path / "entry.yaml").write_text(ENTRY)
    log = tmp_path / "asked"

    def run(*arguments: str) -> tuple[int, str, list[str]]:
        path = f"{tmp_path / 'watch'}:{ROOT}:{ROOT / 'kernels'}"
        ended = unfix(*arguments, cwd=tmp_path, PYTHONPATH=path, ASKED=str(log), UNFIX_CACHE=str(tmp_path / "cache"))
        return ended.returncode, ended.stderr, log.read_text().splitlines()

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_asks_no_network(name, asked):
    code, said, log = asked(*COMMANDS[name])
    assert log == []
    assert code in (0, 1, 3), said


def test_one_that_asks_for_a_release_is_seen_to(asked):
    code, said, log = asked("check", "--release", "0.5.13")
    assert code == 4 and "can't fetch sglang 0.5.13" in said
    assert log and all(line.startswith("socket.") for line in log)


def test_what_is_shown_loads_nothing(tmp_path, unfix):
    """The page is one file: it names no address, and its policy lets it load from none."""
    ended = unfix("report", NIGHT, "--html", str(tmp_path / "r.html"))
    page = (tmp_path / "r.html").read_text()
    assert ended.returncode == 3 and "default-src 'none'" in page
    assert not [
        word for word in ("http:", "https:", "//", "src=", "@import", "url(") if word in page.split("<body>")[0]
    ]
    assert json.loads(Path(NIGHT).read_text())["results"]
