"""The log of a run: what a killed run leaves can be read, and gone on from; what is no log is said to be none."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time

import pytest

from harness import history, report, runlog
from harness.errors import InfraError, UsageError
from harness.runlog import Writer, odd_end

RUN = {
    "target": "eagle_kv", "target_version": None, "target_commit": None, "device": "cpu", "commit": "c", "sources": "s",
    "session_reverted": [], "selected": ["1:a"], "shard": None,
}  # fmt: skip


def record(test, verdict="proved"):
    return {
        "test": test, "regression": "1", "fix": "1:a", "blames": "1:a", "case": test, "backend": "b",
        "target": "eagle_kv", "device": "cpu", "tells": True, "verdict": verdict, "reason": None, "legs": [],
    }  # fmt: skip


def write(path, *lines, run=RUN, resume=False):
    writer = Writer(path, run, resume=resume)
    for kind, value in lines:
        writer.write(kind, value)
    writer.close()
    return writer


def results(*tests):
    return [("result", record(test)) for test in tests]


COUNTED = ("collected", {"cases": 3, "shard": None})
# what a log has after its first line -> what is missing of it
LOGS = [
    ([COUNTED, *results("a", "b", "c"), ("ended", 0)], []),
    ([COUNTED, *results("a", "b", "c"), ("ended", 1)], ["pytest ended with 1, for a reason that no verdict holds"]),
    ([COUNTED, *results("a", "b"), ("result", record("c", "vacuous")), ("ended", 1)], []),
    ([COUNTED, *results("a", "b"), ("result", record("c", "skipped")), ("ended", 0)], []),
    ([COUNTED, ("result", record("a", "skipped")), *results("b", "c"), ("ended", 4)], [odd_end(4)]),
    ([("collected", {"cases": 1, "shard": None}), ("result", record("a", "skipped")), ("ended", 4)], []),
    ([("collected", {"cases": 0, "shard": None}), ("ended", 3)], [odd_end(3)]),
    (
        [("collected", {"cases": 1, "shard": None, "left_out": "2 of 3"}), *results("a"), ("ended", 0)],
        ["2 of 3"],
    ),
    (
        [("collected", {"cases": 2, "shard": None, "left_out": "2 of 4"}), *results("a"), ("ended", 0)],
        ["the run was cut short: 1 of 2 cases did not run, or are not in its log", "2 of 4"],
    ),
    (
        [("collected", {"cases": 1}), *results("a"), ("ended", 0), ("collected", {"cases": 2}), *results("b")],
        ["the run was cut short: its cases ran, but it did not come to its end"],  # gone on from, and killed
    ),
    ([COUNTED, *results("a", "b")], ["the run was cut short: 1 of 3 cases did not run, or are not in its log"]),
    (
        [COUNTED, *results("a", "b"), ("ended", 2)],
        ["the run was cut short: 1 of 3 cases did not run, or are not in its log"],
    ),
    ([COUNTED], ["the run was cut short: 3 of 3 cases did not run, or are not in its log"]),
    ([COUNTED, *results("a", "b", "c")], ["the run was cut short: its cases ran, but it did not come to its end"]),
    ([*results("a", "b"), ("ended", 0)], ["the run was cut short before it knew its cases"]),
    ([], ["the run was cut short before it knew its cases"]),
    ([("collected", {"cases": 0, "shard": None}), ("ended", 5)], []),
]


@pytest.mark.parametrize(("lines", "missing"), LOGS)
def test_what_is_missing_is_said(lines, missing, tmp_path):
    path = tmp_path / "new" / "a.jsonl"
    write(path, *lines)
    matrix = history.read_document(path)  # what `unfix report` reads
    assert matrix["incomplete"] == missing
    assert [row["test"] for row in matrix["results"]] == [row["test"] for kind, row in lines if kind == "result"]
    assert matrix["environment"] == {name: RUN[name] for name in runlog.IDENTITY}
    assert not missing or report.exit_code(matrix["results"], incomplete=missing) == 4


def test_the_line_that_was_being_written_is_not_one_and_is_written_over(tmp_path):
    path = tmp_path / "a.jsonl"
    write(path, COUNTED, *results("a", "b"))
    whole = path.read_bytes()
    for cut in range(whole.rindex(b"\n", 0, -1) + 1, len(whole)):
        path.write_bytes(whole[:cut])
        assert set(runlog.read(path).results) == {"a"}
    write(path, *results("c"), resume=True)
    assert set(runlog.read(path).results) == {"a", "c"}
    assert len(path.read_bytes().splitlines()) == 4


def test_a_case_that_nothing_was_learnt_about_runs_again_and_the_later_line_counts(tmp_path):
    path = tmp_path / "a.jsonl"
    write(path, COUNTED, ("result", record("a", "infra")), ("result", record("b", "regressed")), ("ended", 1))
    assert set(runlog.read(path).done()) == {"b"}
    write(path, *results("a", "c"), ("ended", 1), resume=True)
    matrix = runlog.document(path)
    assert [(row["test"], row["verdict"]) for row in matrix["results"]] == [
        ("a", "proved"), ("b", "regressed"), ("c", "proved"),
    ]  # fmt: skip
    assert matrix["incomplete"] == []


def test_without_resume_it_starts_anew(tmp_path):
    path = tmp_path / "a.jsonl"
    write(path, COUNTED, *results("a", "b"))
    assert write(path, COUNTED, *results("c")).before.results == {}
    assert set(runlog.read(path).results) == {"c"}


@pytest.mark.parametrize("content", [None, b"", b'{"schema_version": 1, "ru'])
def test_where_there_is_nothing_to_go_on_from_it_starts_too(content, tmp_path):
    path = tmp_path / "a.jsonl"
    if content is not None:
        path.write_bytes(content)
    write(path, *results("a"), resume=True)
    assert set(runlog.read(path).results) == {"a"}


OTHERS = [
    ({"commit": "d"}, "commit 'c' there, 'd' here; without --resume it starts anew"),
    ({"sources": "t"}, "the project or the code under test has changed since; without"),
    ({"device": "cuda"}, "device 'cpu' there, 'cuda' here"),
    ({"session_reverted": ["1:a"]}, r"session_reverted \[\] there"),
    ({"shard": {"index": 1, "of": 2}}, "shard None there"),
]


@pytest.mark.parametrize(("other", "said"), OTHERS)
def test_another_run_is_not_gone_on_from(other, said, tmp_path):
    path = tmp_path / "a.jsonl"
    write(path, COUNTED, *results("a"))
    before = path.read_bytes()
    for refuse in (runlog.check, Writer):
        with pytest.raises(UsageError, match=f"a.jsonl is of another run: {said}"):
            refuse(path, {**RUN, **other}, resume=True)
    assert path.read_bytes() == before


FIRST = json.dumps({"schema_version": 1, "run": RUN}).encode() + b"\n"


def line(kind, value):
    return FIRST + json.dumps({kind: value}).encode() + b"\n"


# what a line is -> what is said of it
NO_LOGS = [
    (b"", "a.jsonl:1: is no run's log"),
    (b"{}", "a.jsonl:1: is no run's log"),
    (b"{}\n", "a.jsonl:1: is no line of a run's log .*KeyError: 'schema_version'"),
    (b'{"schema_version": 2, "run": {}}\n', "a.jsonl:1: .*schema_version 2"),
    (b'{"schema_version": 1, "run": {}}\n', "a.jsonl:1: .*KeyError: 'session_reverted'"),
    (FIRST + b"\n", "a.jsonl:2: is no line"),
    (FIRST + b'{"result": {}}\n', "a.jsonl:2: .*the result has no backend"),
    (FIRST + b'{"result": []}\n', "a.jsonl:2: .*the result is no object"),
    (line("result", {**record("a"), "verdict": "splendid"}), "a.jsonl:2: .*the verdict 'splendid', which is none"),
    (line("result", {**record("a"), "legs": [1]}), "a.jsonl:2: .*legs that are no list of outcomes"),
    (line("collected", {"cases": "six"}), "a.jsonl:2: .*invalid literal"),
    (FIRST + b"[" * 200_000 + b"\n", "a.jsonl:2: .*(RecursionError|JSONDecodeError)"),
    (FIRST + b'{"other": 1}\n', "a.jsonl:2: .*other is none of"),
    (FIRST + b"\xff\n", "a.jsonl:2: .*UnicodeDecodeError"),
    (b"[1]\n", "a.jsonl:1: .*TypeError"),
]


@pytest.mark.parametrize(("content", "said"), NO_LOGS)
def test_what_is_no_log_is_one_line_that_says_where(content, said, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=said):
        runlog.read(path)


def test_two_runs_do_not_write_one_log(tmp_path):
    path = tmp_path / "a.jsonl"
    writer = Writer(path, RUN, resume=False)
    for resume in (False, True):
        with pytest.raises(InfraError, match="a.jsonl is being written by another run"):
            Writer(path, RUN, resume=resume)
    writer.close()
    Writer(path, RUN, resume=True).close()


def test_a_full_disk_ends_the_log_at_a_line_and_is_said(tmp_path):
    path = tmp_path / "a.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    writer = Writer(path, RUN, resume=False)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        for test in "abcdef":
            writer.write(*results(test)[0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    writer.write(*results("later")[0])
    writer.close()
    assert "a.jsonl could not be written: " in writer.lost and "the cases after that are not in it" in writer.lost
    kept = "".join(runlog.read(path).results)
    assert kept and kept != "abcdef" and "abcdef".startswith(kept) and runlog.read(path).incomplete()


def test_a_killed_run_is_gone_on_from_and_equals_an_unbroken_one(steady, unfix, tmp_path):
    """The real command, killed as hard as can be when a third of its cases have ended."""
    select, log = ["27338:capacity-assert", "--device", "cpu", "-n", "2"], tmp_path / "night.jsonl"
    whole = tmp_path / "whole.json"
    assert unfix("run", *select, "--json", str(whole), cwd=steady).returncode == 0
    expected = json.loads(whole.read_text())

    command = [sys.executable, "-m", "harness.cli", "run", *select, "--jsonl", str(log)]
    process = subprocess.Popen(command, cwd=steady, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while not log.exists() or log.read_bytes().count(b'{"result"') < len(expected["results"]) // 3:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    process.kill()
    process.wait()
    while True:  # its pytest goes with it, and lets go of the log
        try:
            runlog.check(log, dict(runlog.read(log).run), resume=True)
            break
        except InfraError:
            assert time.monotonic() < until
            time.sleep(0.02)
    killed = runlog.read(log)
    assert killed.ended is None and 0 < len(killed.results) < len(expected["results"])

    joined = tmp_path / "joined.json"
    ended = unfix("run", *select, "--jsonl", str(log), "--resume", "--json", str(joined), cwd=steady)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(joined.read_text())
    assert f"{len(expected['results']) - len(killed.results)} passed" in ended.stderr  # no case twice
    assert without_times(found) == without_times(expected)
    again = unfix("run", *select, "--jsonl", str(log), "--resume", "--json", str(joined), cwd=steady)
    assert again.returncode == 0 and "no tests ran" in again.stderr
    assert without_times(json.loads(joined.read_text())) == without_times(expected)


def without_times(matrix):
    for row in matrix["results"]:
        for leg in row["legs"]:
            leg.pop("seconds", None)
    return matrix


def test_a_log_is_asked_for_where_one_is_needed(unfix, tmp_path):
    ended = unfix("run", "27338", "--resume")
    assert (ended.returncode, ended.stderr) == (2, "unfix: --resume goes on from a log: give --jsonl F, too\n")
    log = tmp_path / "a.jsonl"
    write(log, COUNTED, *results("a"))
    ended = unfix("run", "27338", "--device", "cpu", "--jsonl", str(log), "--resume")
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert f"{log} is of another run: commit 'c' there" in ended.stderr
