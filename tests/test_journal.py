"""The journal of an interrupted search: who finds it, what is read from it, and when it goes."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest

from harness import journal
from harness.errors import InfraError
from harness.journal import Journal

RUN = {"out": ["7:a"], "kind": "fail", "seconds": 1.5, "exit": 1, "last": "é"}
PASS = {**RUN, "out": [], "kind": "pass"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """Where the journals are."""
    monkeypatch.setenv("UNFIX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "searches"


def interrupted(*runs: dict) -> Journal:
    kept = Journal("key")
    for run in runs:
        kept.add(run)
    kept.leave()
    return kept


def test_an_interrupted_search_s_runs_are_taken_once_each(folder):
    interrupted(RUN, PASS, RUN)
    again = Journal("key")
    assert again.kept == 3 and again.since.startswith("20") and not again.busy
    assert again.take([]) == PASS and again.take([]) is None
    assert [again.take(["7:a"]) for _ in range(3)] == [RUN, RUN, None]
    again.add(PASS)
    assert again.leave() == 4
    assert Journal("another").kept == 0
    third = Journal("key")
    assert third.kept == 4 and third.since == again.since
    third.remove()
    assert list(folder.iterdir()) == [folder / "another.jsonl"]


def test_an_interruption_before_the_first_run_leaves_nothing(folder):
    assert Journal("key").leave() == 0
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("{header}{run}{pass}", ["fail", "pass"]),
        ("{header}{run}{torn}", ["fail"]),
        ("{header}{run}{torn}\n{pass}", ["fail"]),  # what comes after a bad line isn't trusted
        ("{header}{run}null\n{pass}", ["fail"]),
        ('{header}{run}{"out": [], "kind": "pass"}\n{pass}', ["fail"]),  # another version's
        ("{header}{run}{header}{pass}", ["fail"]),
        ("{header}", []),
        ("{run}{pass}", []),
        ("{torn}", []),
        ("\x00\x00", []),
        ("", []),
    ],
)
def test_a_journal_is_read_to_its_first_bad_line_and_cut_there(folder, text, kinds):
    header, run, passed = (json.dumps(line) + "\n" for line in ({"since": "2026-01-01 00:00:00"}, RUN, PASS))
    parts = {"{header}": header, "{run}": run, "{pass}": passed, "{torn}": run[:-9]}
    for name, part in parts.items():
        text = text.replace(name, part)
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o700)
    (folder / "key.jsonl").write_text(text)
    kept = Journal("key")
    assert [run["kind"] for run in kept._runs] == kinds and kept.kept == len(kinds)
    assert kept.since == ("2026-01-01 00:00:00" if kinds else "")
    kept.add({**RUN, "kind": "skip"})
    kept.leave()
    lines = [json.loads(line) for line in (folder / "key.jsonl").read_text().splitlines()]
    assert [line.get("kind") for line in lines] == [None, *kinds, "skip"]


def test_a_search_goes_on_without_a_journal_that_the_disk_does_not_take(folder):
    kept = Journal("key")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
    try:
        for _ in range(9):
            kept.add(RUN)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert kept.lost == f"can't keep a journal in {folder}: File too large"
    assert kept.leave() == 0 and list(folder.iterdir()) == []


def test_a_journal_older_than_a_day_is_removed_unless_its_search_runs(folder):
    interrupted(RUN)
    running = Journal("running")
    old = time.time() - journal.STALE_SECONDS - 60
    for path in folder.iterdir():
        os.utime(path, (old, old))
    assert Journal("key").kept == 0
    assert sorted(path.name for path in folder.iterdir()) == ["key.jsonl", "running.jsonl"]
    running.remove()


def test_a_second_search_at_the_same_time_has_no_journal(folder):
    first = Journal("key")
    first.add(RUN)
    second = Journal("key")
    assert second.busy and second.kept == 0 and second.take(["7:a"]) is None
    second.add(PASS)
    second.remove()
    assert first.leave() == 1
    assert [run["kind"] for run in Journal("key")._runs] == ["fail"]


def test_a_journal_that_its_search_removes_between_open_and_lock_is_made_anew(folder, monkeypatch):
    interrupted(RUN)
    lock, path = fcntl.flock, folder / "key.jsonl"

    def late(*arguments: object) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        path.unlink()
        lock(*arguments)

    monkeypatch.setattr(fcntl, "flock", late)
    kept = Journal("key")
    assert kept.kept == 0
    kept.add(PASS)
    assert kept.leave() == 1 and Journal("key").take([]) == PASS


def test_a_cache_that_cannot_be_written_is_infra(folder):
    folder.parent.mkdir(mode=0o700)
    folder.write_text("a file")
    with pytest.raises(InfraError, match="can't keep a journal in .*searches"):
        Journal("key")


def of(words=("run", "a.txt::test"), fixes=("7:a",), options=(None, 1), sources="s", environment=None) -> str:
    return journal.key(words, fixes, options, sources, environment or {"A": "1"})


def test_any_change_of_what_an_answer_depends_on_is_another_search(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    Path("a.txt").write_text("1")
    one = of()
    assert of() == one == of(environment={"A": "1", "SHLVL": "3", "OLDPWD": "/"})
    others = [
        of(words=("run", "a.txt")), of(words=("run a.txt::test",)), of(fixes=("7:a", "7:b")), of(options=(3.0, 1)),
        of(sources="t"), of(environment={"A": "2"}),
    ]  # fmt: skip
    Path("a.txt").write_text("2")
    others.append(of())
    Path("a.txt").write_text("1")
    Path("below").mkdir()
    monkeypatch.chdir("below")
    others.append(of(words=("run", "../a.txt::test")))
    assert len({one, *others}) == 9


def test_a_git_checkout_s_state_counts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)

    def git(*words: str) -> None:
        who = ["-c", "user.name=n", "-c", "user.email=e@x"]
        subprocess.run(["git", *who, *words], check=True, capture_output=True)

    git("init")
    Path("code.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "one")
    keys = [of(), of()]
    Path("code.py").write_text("2")
    keys.append(of())
    git("commit", "-am", "two")
    keys.append(of())
    assert keys[0] == keys[1] and len(set(keys)) == 3
