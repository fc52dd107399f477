"""Trials: what a run of a command says, that nothing of it outlives it, and which fixes can be out of what it sees."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from harness import candidates, execute, fixes, trial
from harness.errors import RottedError, UnfixError, UsageError
from harness.journal import Journal

NOTHING: frozenset[str] = frozenset()
TELLS = "echo on the way >&2; echo IndexError: out of range"


@pytest.fixture(autouse=True)
def private(tmp_path, monkeypatch):
    monkeypatch.setenv("UNFIX_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.mark.parametrize(
    ("script", "fail_on", "kind", "code", "last"),
    [
        ("exit 0", None, "pass", 0, ""),
        ("exit 1", None, "fail", 1, ""),
        ("exit 125", None, "skip", 125, ""),
        ("kill -SEGV $$", None, "fail", -11, ""),
        (f"{TELLS}; echo; exit 9", None, "fail", 9, "IndexError: out of range"),
        (TELLS, "^IndexError: out", "fail", 0, "IndexError: out of range"),
        (TELLS, "^on the way$", "fail", 0, "IndexError: out of range"),  # stderr is output, too
        (f"{TELLS}; exit 1", "KeyError", "pass", 1, "IndexError: out of range"),
        (f"{TELLS}; exit 125", "IndexError", "skip", 125, "IndexError: out of range"),
        (TELLS, "(?s)way.*Index", "pass", 0, "IndexError: out of range"),  # line by line
        ("printf 'a\\377b'", "a.b", "fail", 0, "a\N{REPLACEMENT CHARACTER}b"),
        ("head -c 1000000 /dev/zero | tr '\\0' x; printf '\\nend'", "^x{1000000}$", "fail", 0, "end"),
        ("read line", None, "fail", 1, ""),  # there is nothing on stdin
    ],
)
def test_what_a_run_says(script, fail_on, kind, code, last):
    ran = trial.run(["sh", "-c", script], os.environ, ("7:a",), fail_on=re.compile(fail_on) if fail_on else None)
    assert (ran.kind, ran.exit, ran.last, ran.out) == (kind, code, last, ("7:a",))


@pytest.mark.parametrize("fail_on", [None, "nothing"])
def test_a_timeout_is_an_answer_of_its_own(fail_on):
    never_ends = [sys.executable, "-c", "import signal; print('begun', flush=True); signal.pause()"]
    ran = trial.run(never_ends, os.environ, timeout=0.05, fail_on=re.compile(fail_on) if fail_on else None)
    assert (ran.kind, ran.exit) == ("timeout", None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sh", "-c", "no-such-program"], r"can't be run \(exit code 127\): .*no-such-program.*not found"),
        (["sh", "-c", "exit 126"], r"can't be run \(exit code 126\): sh$"),
        (["./no-such-program"], r"can't run './no-such-program': No such file"),
    ],
)
def test_what_cannot_be_run_ends_the_search(words, said):
    with pytest.raises(UsageError, match=said):
        trial.run(words, os.environ)


GRANDCHILD = """\
import os, signal, subprocess, sys
if len(sys.argv) == 2:
    subprocess.Popen([sys.executable, __file__, sys.argv[1], "child"])
    if os.environ.get("LEADER") == "goes":
        sys.exit(open(sys.argv[1] + "-known").read() == "never")
else:
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(sys.argv[1], "w").write(str(os.getpid()))
signal.pause()
"""


@pytest.mark.parametrize("how", ["timeout", "interrupted", "by itself"])
def test_nothing_outlives_a_run(tmp_path, monkeypatch, how):
    script, pipe, stop = tmp_path / "grandchild.py", tmp_path / "pid", threading.Event()
    script.write_text(GRANDCHILD)
    os.mkfifo(pipe)
    os.mkfifo(tmp_path / "pid-known")
    seen: list[int] = []
    awaiting = trial._await

    def await_grandchild(pid: int, deadline: float | None, stop: threading.Event) -> bool:
        seen.append(int(pipe.read_text()))
        assert alive(seen[0])
        if how == "by itself":
            (tmp_path / "pid-known").write_text("now")
            return awaiting(pid, deadline, stop)
        if how == "interrupted":
            stop.set()
        return False

    monkeypatch.setattr(trial, "_await", await_grandchild)
    environment = {**os.environ, "LEADER": "goes" if how == "by itself" else "stays"}
    words = [sys.executable, str(script), str(pipe)]
    if how == "interrupted":
        with pytest.raises(trial.Interrupted):
            trial.run(words, environment, stop=stop)
    else:
        assert trial.run(words, environment, stop=stop).kind == ("pass" if how == "by itself" else "timeout")
    assert not alive(seen[0])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def substituted(*words: str, catalogue: fixes.Catalogue) -> candidates.Candidates:
    return candidates.find(words, catalogue, environment=os.environ)


def test_runs_in_parallel_are_answered_in_order(catalogue, tmp_path):
    """Two runs meet at a pipe: neither ends without the other."""
    os.mkfifo(tmp_path / "meet")
    both = f"case {{revert}} in 0) echo x > {tmp_path}/meet;; *) read x < {tmp_path}/meet; exit 1;; esac"
    subject = substituted("sh", "-c", both, catalogue=catalogue)
    with trial.Trials(subject, Journal("0"), jobs=2) as trials:
        answers = trials.ask([NOTHING, frozenset(["27338:topk-factor"])], 1)
    assert [(answer.kind, dict(answer.counts)) for answer in answers] == [("pass", {"pass": 1}), ("fail", {"fail": 1})]


def test_runs_that_differ_are_flaky_and_a_journal_s_runs_are_taken_first(catalogue, tmp_path):
    count = f"echo >> {tmp_path}/n; exit $(($(wc -l < {tmp_path}/n) % 2)) # {{revert}}"
    subject = substituted("sh", "-c", count, catalogue=catalogue)
    began: list[object] = []
    with trial.Trials(subject, Journal("0"), began=began.append) as trials:
        [answer] = trials.ask([NOTHING], 3)
    assert answer.kind == "flaky" and dict(answer.counts) == {"fail": 2, "pass": 1} and len(began) == 3
    with trial.Trials(subject, Journal("1")) as trials:
        trials._journal._runs = [{"kind": "skip", "seconds": 1, "exit": 125, "last": "", "out": []}]
        assert dict(trials.ask([NOTHING], 2)[0].counts) == {"pass": 1, "skip": 1}


def test_an_error_in_one_run_ends_the_others(catalogue):
    waits = "case {revert} in 0) exit 127;; *) exec tail -f /dev/null;; esac"
    subject = substituted("sh", "-c", waits, catalogue=catalogue)
    with trial.Trials(subject, Journal("0"), jobs=2) as trials, pytest.raises(UsageError, match="can't be run"):
        trials.ask([frozenset(["own:int32-rows"]), NOTHING], 1)
    assert trials.runs == []


def test_a_placeholder_takes_the_place_of_overlay_and_variable(catalogue):
    set_outside: Mapping[str, str] = {"PATH": os.environ["PATH"], "UNFIX_REVERT": "own", "SGLANG_DEBUG_REVERT_PR": "1"}
    words = ("ssh", "host", "run --revert={revert} {revert}")
    subject = candidates.find(words, catalogue, ["own:int32-rows", "27338:topk-factor"], set_outside)
    assert subject.under(NOTHING) == (("ssh", "host", "run --revert=0 0"), {"PATH": os.environ["PATH"]})
    listed = "27338:topk-factor,own:int32-rows"
    assert subject.under(["own:int32-rows", "27338:topk-factor"])[0][2] == f"run --revert={listed} {listed}"
    assert "whether they apply there isn't known" in subject.notes[0]


SOURCE = "def width(n, topk):\n    wide = n * topk\n    return wide\n\n\ndef at(i):\n    return i\n"
FIXES = {
    "wide": "{target: boxes.width, edits: [{match: wide = n * topk, replacement: wide = n}]}",
    "line": "{target: boxes.width, edits: [{match: n * topk, replacement: topk}]}",
    "head": "{target: boxes.at, edits: [{match: return i, replacement: return (i}]}",
    "more": "{target: boxes.width, edits: [{match: return wide, replacement: return wide + 1}]}",
    "gone": "{target: boxes.at, edits: [{match: return j, replacement: return k}]}",
}
BARE = "{unfixed: [{name: u, patches: [{target: boxes.at, edits: [{match: return i, replacement: return int(i)}]}]}]}"


@pytest.fixture
def boxes(tmp_path, monkeypatch):
    """``boxes(name, …)``: a catalogue of these fixes of a package that this Python imports from `PYTHONPATH`."""
    (tmp_path / "site/boxes").mkdir(parents=True)
    (tmp_path / "site/boxes/__init__.py").write_text(SOURCE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.chdir(tmp_path)

    def build(*names: str) -> fixes.Catalogue:
        entry = "  {}: {{kind: size, summary: s, reversals: {{boxes: {}}}}}\n"
        text = "".join(entry.format(name, f"[{FIXES[name]}]" if name in FIXES else BARE) for name in names)
        (tmp_path / "toggles").mkdir(exist_ok=True)
        (tmp_path / "toggles/7.yaml").write_text("pr: 7\ntitle: t\nfixes:\n" + text)
        return fixes.load(tmp_path / "toggles")

    return build


PYTHON = [sys.executable, "-c", "import boxes, os; print(boxes.width(3, 5), os.environ.get('UNFIX_REVERT'))"]


@pytest.mark.parametrize(
    ("out", "last"), [([], "15 None"), (["7:more"], "16 7:more"), (["7:more", "7:wide"], "4 7:wide,7:more")]
)
def test_a_trial_sees_what_exec_shows(boxes, out, last):
    catalogue = boxes("wide", "more")
    words, environment = candidates.find(PYTHON, catalogue).under(out)
    assert trial.run(words, environment).last == last
    prepared = execute.prepare(PYTHON, catalogue, sorted(out, reverse=True))
    assert prepared.environment == environment


def test_a_fix_that_one_code_base_lacks_is_out_of_the_other(boxes, tmp_path):
    boxes("wide")  # makes the folders
    crates = "crates: [{target: crates.at, edits: [{match: return i, replacement: return -i}]}]"
    toggles = f"{{kind: size, summary: s, reversals: {{boxes: {BARE}, {crates}}}}}"
    (tmp_path / "toggles/7.yaml").write_text(f"pr: 7\ntitle: t\nfixes:\n  both: {toggles}\n")
    (tmp_path / "site/crates.py").write_text(SOURCE)
    subject = candidates.find(PYTHON, fixes.load(tmp_path / "toggles"))
    assert subject.fixes == ("7:both",) and [note[:26] for note in subject.notes] == ["7:both isn't in this boxes"]
    body = "import boxes, crates; print(boxes.at(3), crates.at(3))"
    assert trial.run([sys.executable, "-c", body], subject.under(["7:both"])[1]).last == "3 -3"


def test_a_fix_that_the_sources_lack_is_left_out(boxes):
    subject = candidates.find(PYTHON, boxes("wide", "bare"))
    assert subject.fixes == ("7:wide",)
    [note] = subject.notes
    assert note.startswith("left out of the search: 7:bare isn't in this boxes")
    with pytest.raises(UnfixError, match=r"^7:bare isn't in this boxes .*nothing to take out$"):
        candidates.find(PYTHON, boxes("wide", "bare"), ["7:bare"])


@pytest.mark.parametrize(
    ("names", "error", "said"),
    [
        (["wide", "gone"], RottedError, r"^7:gone in boxes.at: match .*return j.* isn't in"),
        (["head", "wide"], RottedError, r"^7:head in boxes.at: .* doesn't compile"),
        (["wide", "line", "more"], UsageError,
         r"^can't be out together: 7:wide and 7:line \(.* change the same place: .*, line 2\): leave one out with"),
    ],
)  # fmt: skip
def test_fixes_that_cannot_be_out_are_named_before_the_search(boxes, names, error, said):
    with pytest.raises(error, match=said):
        candidates.find(PYTHON, boxes(*names))


def test_the_digest_is_of_the_sources_and_of_the_edits(boxes, tmp_path):
    one = candidates.find(PYTHON, boxes("wide"))
    assert candidates.find(PYTHON, boxes("wide")).digest == one.digest
    assert candidates.find(PYTHON, boxes("line")).digest != one.digest
    (tmp_path / "site/boxes/__init__.py").write_text(SOURCE + "# more\n")
    assert candidates.find(PYTHON, boxes("wide")).digest != one.digest


def test_the_first_signal_interrupts_and_no_other_does_until_all_is_ended():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    with trial.signals_interrupt():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        for number in numbers:
            os.kill(os.getpid(), number)
    assert [signal.getsignal(number) for number in numbers] == before
