"""`unfix bisect` from end to end: the answer, the two commands, the exit codes, Ctrl-C and what comes after."""

from __future__ import annotations

import json
import os
import shlex
import signal as signals
import subprocess
import sys
from pathlib import Path

import pytest

from harness import cli, progress
from harness.errors import InfraError, UnfixError
from harness.trial import Run

LETTERS = "abcdef"
TOGGLES = "pr: 7\ntitle: t\nfixes:\n" + "".join(
    f"  {name}: {{kind: size, summary: s, reversals: {{boxes: [{{target: boxes.{name}, "
    f"edits: [{{match: return 1, replacement: return 0}}]}}]}}}}\n"
    for name in LETTERS
)
SOURCE = "".join(f"def {name}():\n    return 1\n\n\n" for name in LETTERS)


@pytest.fixture
def work(tmp_path, monkeypatch) -> Path:
    """A directory with six fixes and the package that they are in."""
    monkeypatch.setenv("UNFIX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("UNFIX_TRUST", str(tmp_path))
    for name in ("SGLANG_DEBUG_REVERT_PR", "UNFIX_REVERT", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), str(Path(cli.__file__).parents[1])]))
    (tmp_path / "site/boxes").mkdir(parents=True)
    (tmp_path / "site/boxes/__init__.py").write_text(SOURCE)
    for name in ("toggles", "regressions"):
        (tmp_path / name).mkdir()
    (tmp_path / "toggles/7.yaml").write_text(TOGGLES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ask(formula: str) -> list[str]:
    """A command that fails where the formula is true of what is out, as the code that it imports has it."""
    body = f"import boxes; {', '.join(LETTERS)} = (not getattr(boxes, name)() for name in '{LETTERS}')"
    return [sys.executable, "-c", f"{body}; import sys; sys.exit(int({formula}))"]


def unfix(*arguments: str) -> int:
    return cli.app(list(arguments), standalone_mode=False) or 0


BLAME = "0 if b else 1"
SKIP = "125 if a and not c else c"
TRUTHS = [
    # options, formula: exit code, then the lines with what is out in a command that passes and in one that fails
    ("", "c", 0, [("c", "", "c")]),
    ("-n 3", "b and e", 0, [("b e", "b", "b e")]),
    ("", "a or (d and f)", 0, [("a", "", "a"), ("d f", "d", "d f")]),
    ("--find blaming", BLAME, 0, [("b", "b", "")]),
    ("--fixes 7:b,7:c --repeat 2", "c", 0, [("c", "", "c")]),
    ("", SKIP, 1, [("c", "", "c")]),
]


def test_a_command_that_passes_over_the_overlays_tells_nothing(work):
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(work / 'site')!r}); import boxes; boxes.c()"]
    with pytest.raises(InfraError, match="no fix changes it: .*; but no run imported a file of an overlay"):
        unfix("bisect", "--", *command)


def test_a_search_inside_of_exec_is_refused(work, monkeypatch):
    monkeypatch.setenv("UNFIX_REVERT", "7:a")
    with pytest.raises(UnfixError, match=r"7:a is out already \(UNFIX_REVERT\): take all") as caught:
        unfix("bisect", "--", *ask("c"))
    assert caught.value.exit_code == 2
    with pytest.raises(UnfixError, match="7:a is out already"):
        unfix("exec", "--revert", "7:b", "--", *ask("b"))


@pytest.mark.parametrize(("options", "formula", "code", "sets"), TRUTHS, ids=[row[1] for row in TRUTHS])
def test_the_answer_and_two_commands_that_show_it(work, capsys, options, formula, code, sets):
    command = ask(formula)
    assert unfix("bisect", *options.split(), "--", *command) == code
    lines = capsys.readouterr().out.splitlines()
    for out, passing, failing in sets:
        needed = " (each of them is needed)" if " " in out else ""
        at = lines.index(ids(out, ", ") + needed)
        for line, label, gone, wanted in zip(
            lines[at + 1 :], ("passes", "fails"), (passing, failing), (0, 1), strict=False
        ):
            name, _, pasted = line.strip().partition(": ")
            assert name == label
            words = [sys.executable, "-m", "harness.cli", "exec", "--revert", ids(gone, ","), "--"] if gone else []
            assert shlex.split(pasted) == [*words, *command]
            assert subprocess.run(pasted, shell=True, capture_output=True, check=False).returncode == wanted
    assert sum(line.startswith("7:") for line in lines) == len(sets)


def ids(letters: str, comma: str) -> str:
    return comma.join(f"7:{letter}" for letter in letters.split())


@pytest.mark.parametrize(
    ("options", "command", "code", "said"),
    [
        ("", ask("0"), 1, "no fix changes it: it passes with everything in and passes with everything out"),
        ("--find blaming", ask("c"), 2, "to find blaming fixes, it must fail with everything in, but it passes"),
        ("--find both", ask("c"), 2, "--find 'both': must be breaking or blaming"),
        ("--fixes 7:g", ask("c"), 2, "--fixes: unknown fix '7:g'"),
        ("--fixes 0", ask("c"), 2, "--fixes '0' selects no fix"),
        ("--fail-on (", ask("c"), 2, "--fail-on '\\(': not a regular expression"),
        ("--timeout 0", ask("c"), 2, "--timeout 0: must be more than 0 seconds"),
        ("--timeout nan", ask("c"), 2, "--timeout nan: must be more than 0 seconds"),
        ("--json=", ask("c"), 2, "--json needs a file name, or '-' for stdout"),
        ("", ["no-such-program"], 2, "no command 'no-such-program' to run"),
        ("", [sys.executable, "-c", "exit(127)"], 2, r"the command can't be run \(exit code 127\)"),
        ("", [sys.executable, "-I", "-c", "0"], 2, "Python would ignore PYTHONPATH"),
    ],
)
def test_what_ends_without_an_answer_is_one_line(work, options, command, code, said):
    with pytest.raises(UnfixError, match=said) as caught:
        unfix("bisect", *options.split(), "--", *command)
    assert caught.value.exit_code == code
    assert not list(work.glob("cache/searches/*"))


FLAKY = "import os, sys; open('n', 'a').write('.'); sys.exit(os.stat('n').st_size % 3 == 0)"


def test_a_command_that_fails_one_time_in_three_names_nothing(work, capsys):
    with pytest.raises(UnfixError, match=r"it fails in 1 of 3 runs \(33 %, 95 % interval 6 to 79 %\)"):
        unfix("bisect", "--json", "-", "--", sys.executable, "-c", FLAKY)
    document = json.loads(capsys.readouterr().out)
    assert document["sets"] == [] and document["ends"]["everything_in"]["runs"] == {"pass": 2, "fail": 1}
    assert document["error"].startswith("flaky")


def test_fail_on_looks_at_the_output_and_not_at_the_exit_code(work, capsys):
    body = "import boxes; print('guard' if boxes.b() else 'gather') if not boxes.a() else 0; exit(boxes.a() - 1)"
    command = [sys.executable, "-c", body]
    among = ("--fixes", "7:a,7:b,7:c")
    assert unfix("bisect", *among, "--", *command) == 0
    assert "7:a\n" in capsys.readouterr().out
    assert unfix("bisect", *among, "--fail-on", "^gather", "--", *command) == 0
    out = capsys.readouterr().out
    assert out.startswith("7:a, 7:b (each of them is needed)\n")
    assert "it fails where a line of its output matches '^gather', whatever its exit code" in out


def test_a_command_that_takes_the_selection_itself(work, capsys):
    script = "import sys; sys.exit('7:d' in sys.argv[1].split(',') and sys.argv[1] != '0')"
    assert unfix("bisect", "--", sys.executable, "-c", script, "{revert}", "--jobs") == 0
    body = shlex.join([sys.executable, "-c", script])
    assert capsys.readouterr().out.splitlines() == [
        "7:d", f"  passes: {body} 0 --jobs", f"  fails:  {body} 7:d --jobs"
    ]  # fmt: skip


def test_the_document(work, capsys):
    assert unfix("bisect", "--json", "out/found.json", "--", *ask("b and e")) == 0
    document = json.loads((work / "out/found.json").read_text())
    assert (document["schema_version"], document["direction"], document["complete"]) == (1, "breaking", True)
    assert document["command"] == ask("b and e") and document["fixes"] == [f"7:{letter}" for letter in LETTERS]
    assert document["ends"]["everything_out"] == {"answer": "fail", "runs": {"fail": 3}, "text": "fails"}
    [found] = document["sets"]
    assert found["out"] == ["7:b", "7:e"] and found["answer"] == "fail" and found["runs"]["fail"] >= 3
    assert {fix: said["answer"] for fix, said in found["without"].items()} == {"7:b": "pass", "7:e": "pass"}
    assert found["everything_else_out"]["answer"] == "pass"
    assert found["passes"]["out"] == ["7:b"] and found["fails"]["command"] in capsys.readouterr().out
    runs = {tuple(trial["out"]): [run["answer"] for run in trial["runs"]] for trial in document["trials"]}
    assert runs[()][:3] == ["pass"] * 3 and set(runs["7:b", "7:e"]) == {"fail"}
    assert document["error"] is None and document["unresolved"] == [] and document["flaky"] == []


def test_the_answer_is_told_even_where_the_document_cannot_be_written(work, capsys):
    with pytest.raises(InfraError, match="could not be written"):
        unfix("bisect", "--json", "/proc/found.json", "--", *ask("c"))
    assert capsys.readouterr().out.startswith("7:c\n")


def test_an_option_that_is_mistyped_is_named(work):
    with pytest.raises(Exception, match="No such option.*--timout"):
        unfix("bisect", "--timout", "3", "--", *ask("c"))


def test_a_variable_that_is_set_outside_is_in_no_trial_and_in_no_pasted_command(work, capsys, monkeypatch):
    monkeypatch.setenv("SGLANG_DEBUG_REVERT_PR", "7:a")
    command = [
        sys.executable,
        "-c",
        "import os; exit('UNFIX_REVERT' in os.environ or 'SGLANG_DEBUG_REVERT_PR' in os.environ)",
    ]
    assert unfix("bisect", "--fixes", "7:a", "--", *command) == 0
    passes, fails = (line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()[1:])
    assert [subprocess.run(line, shell=True, check=False).returncode for line in (passes, fails)] == [0, 1]


INTERRUPTS = """\
import os, signal, boxes
with open("runs", "a+") as runs:
    runs.write(".")
    runs.seek(0)
    if len(runs.read()) == {at}:
        open("left", "w").write(str(os.getpid()))
        os.kill(os.getppid(), signal.{signal})
        signal.pause()
exit(1 - boxes.c())
"""


@pytest.fixture
def heeded():
    """Under nohup a hang-up is ignored, and by all that is started, too."""
    before = signals.signal(signals.SIGHUP, signals.SIG_DFL)
    yield
    signals.signal(signals.SIGHUP, before)


@pytest.mark.parametrize("signal", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_an_interrupted_search_is_gone_on_with_by_the_same_line(work, heeded, signal):
    Path("ask.py").write_text(INTERRUPTS.format(at=9, signal=signal))
    search = [sys.executable, "-m", "harness.cli", "bisect", "--fixes", "7:b,7:c,7:d", "--", sys.executable, "ask.py"]
    cut = subprocess.run(search, capture_output=True, text=True, check=False)
    assert (cut.returncode, cut.stdout) == (130, ""), cut.stderr
    assert "unfix: 8 runs are kept for a day: the same line goes on from there" in cut.stderr
    assert "Traceback" not in cut.stderr and not Path("/proc", Path("left").read_text(), "cwd").exists()
    resumed = subprocess.run(search, capture_output=True, text=True, check=False)
    assert resumed.returncode == 0 and resumed.stdout.startswith("7:c\n")
    [note] = [line for line in resumed.stderr.splitlines() if "interrupted" in line]
    assert note.startswith("unfix: takes 8 runs from the same search of 20")
    total = int(resumed.stderr.splitlines()[-1].split()[-2])
    assert len(Path("runs").read_text()) == 9 + total - 8  # the ninth was cut off, and ran again
    assert not list(work.glob("cache/searches/*"))


def test_a_script_that_changed_begins_a_search_of_its_own(work):
    Path("ask.py").write_text(INTERRUPTS.format(at=2, signal="SIGINT"))
    search = [sys.executable, "-m", "harness.cli", "bisect", "--fixes", "7:c", "--", sys.executable, "ask.py"]
    assert subprocess.run(search, capture_output=True, check=False).returncode == 130
    Path("ask.py").write_text(INTERRUPTS.format(at=-1, signal="SIGINT"))
    again = subprocess.run(search, capture_output=True, text=True, check=False)
    assert again.returncode == 0 and "interrupted" not in again.stderr


@pytest.mark.parametrize(
    ("out", "name"),
    [("", "everything in"), ("a b c", "everything out"), ("b", "out: 7:b"), ("a c", "all out but 7:b")],
)
def test_a_line_a_run(out, name, capsys):
    gone = tuple(f"7:{letter}" for letter in out.split())
    with progress.Watch(["7:a", "7:b", "7:c"]) as watch:
        watch.began(gone)
        watch.ended(Run(gone, "fail", 1.25, 1, ""))
        watch.note("[bold]")
    assert capsys.readouterr().err == f"unfix: run 1: {name}: fail, 1.2 s\nunfix: [bold]\n"
