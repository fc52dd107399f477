"""``unfix run`` and ``unfix merge`` on real cases: shards, a pytest that dies, and what is refused before any work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FEW = ("27486:draft-tokens-assert", "--device", "cpu")  # six cases


@pytest.fixture(scope="module")
def whole(unfix, steady, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "whole.json"
    ended = unfix("run", *FEW, "-n", "2", "--json", str(out), cwd=steady)
    assert ended.returncode == 0, ended.stderr
    return json.loads(out.read_text())


def without_times(matrix):
    for row in matrix["results"]:
        for leg in row["legs"]:
            leg.pop("seconds", None)
    return matrix


def test_shards_merged_are_the_whole_run_case_by_case(unfix, steady, whole, tmp_path):
    night = tmp_path / "night.json"
    for seconds, row in enumerate(whole["results"], 1):
        row["legs"][0]["seconds"] = float(seconds**3)  # the last is as long as most others together
    night.write_text(json.dumps(whole))
    parts = []
    for index in (1, 2, 3):
        parts.append(tmp_path / f"{index}.json")
        options = ("--shard", f"{index}/3", "--baseline", str(night), "--json", str(parts[-1]), "-n", str(index % 2))
        ended = unfix("run", *FEW, *options, cwd=steady)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    made = [json.loads(part.read_text()) for part in parts]
    assert sorted(len(part["results"]) for part in made) == [1, 1, 4]
    assert [part["shard"]["index"] for part in made] == [1, 2, 3]
    joined = tmp_path / "joined.json"
    ended = unfix("merge", *map(str, parts), "--json", str(joined))
    assert ended.returncode == 0 and ended.stdout == "unfix: 6 cases: 6 proved\n"
    assert without_times(json.loads(joined.read_text())) == without_times(json.loads(json.dumps(whole)))


def test_a_page_that_cannot_be_written_loses_no_matrix(unfix, tmp_path):
    (tmp_path / "file").write_text("")
    matrix = tmp_path / "matrix.json"
    ended = unfix("run", *FEW, "-n", "2", "--html", str(tmp_path / "file" / "page.html"), "--json", str(matrix))
    assert ended.returncode == 4 and "page.html could not be written" in ended.stderr
    assert len(json.loads(matrix.read_text())["results"]) == 6


def test_a_shard_without_a_case_is_well(unfix, tmp_path):
    part = tmp_path / "part.json"
    ended = unfix("run", *FEW, "--shard", "7/7", "--json", str(part), "-n", "2")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(part.read_text())["shard"] | {"plan": ""} == {
        "index": 7, "of": 7, "cases": 0, "of_cases": 6, "plan": "",
    }  # fmt: skip


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_pytest_that_dies_leaves_what_it_had_and_is_no_green_run(tmp_path, root):
    log, out = tmp_path / "a.jsonl", tmp_path / "a.json"
    options = ("27338:topk-factor", "--device", "cpu", "-n", "2", "--jsonl", str(log), "--json", str(out))
    command = [sys.executable, "-m", "harness.cli", "run", *options]
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while not log.exists() or b'{"result"' not in log.read_bytes():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    for child in children(process.pid):
        os.kill(child, signal.SIGKILL)
    said, notes = process.communicate(timeout=120)
    assert process.returncode == 4, notes
    matrix = json.loads(out.read_text())
    assert matrix["incomplete"][0].startswith("the run was cut short: ") and matrix["incomplete"][0] in said
    assert 0 < len(matrix["results"]) < 36
    assert "pytest ended with -9" in notes


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_how_to_go_on(number, tmp_path, root):
    log = tmp_path / "a.jsonl"
    command = [sys.executable, "-m", "harness.cli", "run", "27338:topk-factor", "-n", "1", "--jsonl", str(log)]
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while not log.exists() or b'{"result"' not in log.read_bytes():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    started = children(process.pid)
    process.send_signal(number)
    said, notes = process.communicate(timeout=60)
    assert process.returncode == 130 and said == ""
    assert f"cases are in {log}; the same line with --resume goes on from there" in notes
    assert notes.endswith("unfix: interrupted\n") and "Traceback" not in notes
    assert started and not any(Path(f"/proc/{child}").exists() for child in started)


REFUSED = [
    (("--shard", "5/4"), 2, "--shard '5/4': must be I/N"),
    (("--baseline", "/nowhere"), 2, "--baseline is for a report or a shard"),
    (("--shard", "1/2", "--baseline", "/nowhere"), 2, "--baseline /nowhere: no such file or folder"),
    (("--resume",), 2, "--resume goes on from a log: give --jsonl F, too"),
    (("--jsonl", "/proc/nowhere/a.jsonl"), 4, "/proc/nowhere/a.jsonl could not be written: "),
    (("--jsonl", "/dev/null"), 2, "/dev/null is no file that a log can be kept in"),
    (("--html", "/tmp"), 2, "--html /tmp: is a folder, must be a file"),
    (("--html", "/nowhere/x", "--badge", "/nowhere/x"), 2, "--html and --badge both name /nowhere/x: give each a file"),
    (("--json", "/nowhere/x", "--jsonl", "/nowhere/x"), 2, "--json and --jsonl both name /nowhere/x"),
    (("--github",), 2, "--github: GITHUB_STEP_SUMMARY names no file"),
    (("--json", ""), 2, "--json needs a file name"),
]


@pytest.mark.parametrize(("options", "code", "said"), REFUSED)
def test_what_can_t_be_done_is_one_line_before_any_work(options, code, said, unfix):
    ended = unfix("run", *FEW, *options)
    assert ended.returncode == code and not ended.stdout
    assert ended.stderr.startswith(f"unfix: {said}") and ended.stderr.count("\n") == 1
