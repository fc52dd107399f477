"""Faults around a whole run: Ctrl-C at any moment, a kill that can't be answered, two runs at once, a clock that jumps.

What was learnt is kept, nothing is invented, and no process is left. Beside these: a pytest that dies, and a run that
is gone on from, `test_run_cli.py` and `test_runlog.py`; a search that is interrupted, `test_bisect_cli.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import orphans, runlog

CASES = ("27486:draft-tokens-assert", "--device", "cpu", "-n", "1")  # six
HANG = 120.0  # seconds that nothing here takes


@pytest.fixture
def started(root, tmp_path):
    """``started(*arguments, …)``: the command, in a session of its own, as a terminal's foreground job has a group.

    All that it started is noted as often as one waits for something, and killed in the end.
    """
    with contextlib.ExitStack() as stack:

        def start(*arguments, **environment):
            return stack.enter_context(Started(arguments, root, tmp_path, environment))

        yield start


class Started:
    def __init__(self, arguments, root, folder, environment):
        (folder / "tmp").mkdir(exist_ok=True)
        env = {name: value for name, value in os.environ.items() if not name.startswith(("SGLANG_", "PYTEST_"))}
        env |= {"TMPDIR": str(folder / "tmp"), **environment}
        self.seen: set[int] = set()
        self.process = subprocess.Popen(
            [sys.executable, *arguments], cwd=root, env=env, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in {self.process.pid, *self.left()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def until(self, happened: Callable[[], bool]) -> None:
        end = time.monotonic() + HANG
        while not happened():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end, "it hangs"
            self.seen |= orphans.descendants(self.process.pid)
            time.sleep(0.01)
        self.seen |= orphans.descendants(self.process.pid)

    def children(self, what: str = "cmdline") -> str:
        """The command lines of what it started, or what /proc has there of that name."""
        return " ".join(_read(pid, what) for pid in orphans.descendants(self.process.pid))

    def left(self) -> list[int]:
        """What it started and that still runs."""
        return [pid for pid in self.seen if _read(pid, "stat").rpartition(")")[2].strip()[:1] not in ("", "Z", "X")]

    def ended(self) -> tuple[int, str, str]:
        """Exit code, stdout, stderr. All that it started is gone, or will be at once."""
        said, notes = self.process.communicate(timeout=HANG)
        end = time.monotonic() + HANG
        while left := self.left():
            assert time.monotonic() < end, [_read(pid, "cmdline") for pid in left]
            time.sleep(0.05)
        return self.process.returncode, said, notes


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


# the module whose import has ended when Ctrl-C comes: from the first that the command imports to one of the last
@pytest.mark.parametrize("module", ["typer", "pydantic", "pytest", "harness.upstream_cli"])
def test_ctrl_c_while_the_command_is_imported(started, module):
    command = started("-X", "importtime", "-m", "harness", "list")
    notes = []
    for line in command.process.stderr:
        if not line.startswith("import time:"):
            notes.append(line)
        elif line.rpartition("|")[2].strip() == module:
            os.killpg(command.process.pid, signal.SIGINT)
    code, said, _ = command.ended()
    assert (code, said, notes) == (130, "", ["unfix: interrupted\n"])


# what is there when Ctrl-C comes
MOMENTS = {
    "a server's imports": lambda command, log: "_socket." in command.children("maps"),
    "a test session": lambda command, log: "pytest" in command.children(),
    "cases to run": lambda command, log: b'{"collected"' in log,
    "the end": lambda command, log: b'{"ended"' in log,
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_while_a_run(started, tmp_path, moment):
    log = tmp_path / "a.jsonl"
    command = started("-m", "harness", "run", *CASES, "--jsonl", str(log))
    command.until(lambda: MOMENTS[moment](command, log.read_bytes() if log.exists() else b""))
    os.killpg(command.process.pid, signal.SIGINT)
    code, said, notes = command.ended()
    if moment == "the end" and code == 0:  # it was too late
        assert "6 proved" in said
    else:
        assert (code, said) == (130, "") and notes.endswith("unfix: interrupted\n") and "Traceback" not in notes
    if log.exists() and log.read_bytes():
        kept = runlog.read(log)
        assert bool(kept.incomplete()) == (len(kept.results) < 6 or kept.ended is None)
        assert {record["verdict"] for record in kept.results.values()} <= {"proved"}
    assert [name for name in os.listdir(tmp_path / "tmp") if not name.startswith("pytest-of-")] == []


def test_nothing_outlives_a_run_that_is_killed(started, tmp_path):
    log = tmp_path / "a.jsonl"
    command = started("-m", "harness", "run", *CASES, "--jsonl", str(log))
    command.until(lambda: log.exists() and b'{"environment"' in log.read_bytes())
    assert len(command.seen) > 3
    command.process.kill()
    assert command.ended()[0] == -signal.SIGKILL
    kept = runlog.read(log)
    assert kept.ended is None and kept.incomplete()


def test_nothing_outlives_a_proof_that_is_killed(started):
    command = started("-m", "harness", "prove", "27486:draft-tokens-assert", "--device", "cpu", "-n", "1")
    command.until(lambda: "sys.stdin.readline" in command.children())  # a worker of its first session
    command.process.kill()
    assert command.ended()[0] == -signal.SIGKILL


def test_nothing_outlives_a_search_that_is_killed(started, tmp_path):
    """Neither the command that is tried, nor what that started, in a process group of its own."""
    note, pipe = tmp_path / "note", "import os, signal, sys; os.setpgid(0, 0); "
    child = f"{pipe}print(os.getpid(), file=open(sys.argv[1], 'a'), flush=True); signal.pause()"
    tried = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}, {str(note)!r}])"
    search = ["bisect", "--fixes", "27338:topk-factor", "--", sys.executable, "-c", tried]
    command = started("-m", "harness", *search)
    command.until(lambda: note.exists() and note.read_text().endswith("\n"))
    assert int(note.read_text()) in command.seen
    command.process.kill()
    assert command.ended()[0] == -signal.SIGKILL


CLOCK = """
import itertools, time

def jumps(real=time.time, calls=itertools.count()):
    return real() + (4e9 if next(calls) % 2 else -1e9)

time.time = jumps
"""


def test_a_clock_that_jumps_changes_nothing(tmp_path, steady, unfix):
    """By a century and more, forth and back at each look, in the command, its pytest, its servers and its legs."""
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock/sitecustomize.py").write_text(CLOCK)
    log, matrix = tmp_path / "a.jsonl", tmp_path / "a.json"
    options = ("run", *CASES, "--jsonl", str(log), "--json", str(matrix))
    told = unfix(*options, cwd=steady, PYTHONPATH=str(tmp_path / "clock"))
    assert told.returncode == 0, told.stdout + told.stderr
    document = json.loads(matrix.read_text())
    assert document["verdicts"] == {"proved": 6} and document == runlog.document(log)
    assert all(0 <= leg["seconds"] < HANG for row in document["results"] for leg in row["legs"])
    again = unfix(*options, "--resume", "--html", str(tmp_path / "page.html"), cwd=steady)
    assert again.returncode == 0 and "no tests ran" in again.stderr
    assert json.loads(matrix.read_text()) == document


def test_two_at_once_on_a_cold_cache_build_each_thing_once(started, tmp_path):
    caches = {"UNFIX_CACHE": str(tmp_path / "cache"), "EAGLE_KV_CACHE": str(tmp_path / "builds")}
    both = [started("-m", "harness", "repro", "27486:slot-assert", "--device", "cpu", **caches) for _ in range(2)]
    for code, said, notes in [each.ended() for each in both]:
        assert code == 0 and said.endswith("  proved\n"), notes
    assert sorted(len(path.name) for path in (tmp_path / "cache/overlays").iterdir()) == [64]
    built = sorted(path.relative_to(tmp_path / "builds").parts[1:] for path in (tmp_path / "builds").rglob("*.*"))
    assert built == [("store_kvcache.cuh",), ("store_kvcache.cuh",), ("store_kvcache.so",), ("store_kvcache.so",)]
