"""`unfix prove`: how sessions are judged, which legs need not run again, and the command on small checkouts."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from harness import prove, prove_session
from harness.answers import Answers
from harness.prove import Heard
from harness.reads import EVERYTHING
from harness.sandbox import Request

SIZE, GUARD, OTHER = "27338:topk-factor", "27338:capacity-assert", "27460:topk-factor"
NAMES = {"s": SIZE, "g": GUARD, "o": OTHER}
WORDS = {  # what a leg with this outcome says
    "guarded": {"error": "AssertionError: EAGLE draft kv_indices row too small: need 10, row has 8"},
    "refused": {"error": "AssertionError: something else", "outcome": "guarded"},
    "overflow": {"overflow": "cuda_graph_kv_indices = torch.zeros("},
    "elsewhere": {"overflow": "another_buffer = torch.zeros(", "outcome": "overflow"},
}


def legs(text: str) -> list[dict]:
    """`-:clean s:guarded s+g:overflow/2`: what is out in each leg, what it did, how many elements strayed."""
    found = []
    for part in text.split():
        out, _, said = part.partition(":")
        outcome, _, elements = said.partition("/")
        leg = {"reverted": [NAMES[name] for name in out.split("+") if name != "-"], "outcome": outcome}
        leg |= WORDS.get(outcome, {})
        if "overflow" in leg:
            seen = int(elements or 2)
            leg["overflow"] = {
                "side": "after", "predicted_elements": 2, "observed_elements": seen, "buffers": [leg["overflow"]],
            }  # fmt: skip
        found.append(leg)
    return found


def heard(fix: str, text: str, outcome: str = "passed", *, tells: bool = True, verdict: str | None = None) -> Heard:
    verdict = verdict or {"passed": "proved", "failed": "regressed", "skipped": "skipped"}[outcome]
    record = {"fix": NAMES[fix], "tells": tells, "verdict": verdict, "reason": "r", "legs": legs(text)}
    return Heard(outcome, "" if outcome == "passed" else "w", record)


OF_SIZE = "-:clean s:guarded s+g:overflow"
OF_GUARD = "-:guarded g:overflow"
# the fix that is out | the test's, ? if it can't tell | legs in the baseline | in the session | outcome | kind | why
JUDGED = """
s | s | OF_SIZE                        | s:guarded s:guarded s+g:overflow   | failed  | caught     |
s | s | OF_SIZE                        | s:guarded s:guarded s+g:overflow   | passed  | missed     | passes with
s | s | OF_SIZE                        | s:refused s:guarded s+g:overflow   | failed  | missed     | something else
s | s | OF_SIZE                        | s:clean s:guarded s+g:overflow     | failed  | missed     | is clean;
s | s | OF_SIZE                        | s:guarded s:guarded s+g:overflow/3 | failed  | missed     | 3 elements
s | s | OF_SIZE                        |                                    | failed  | missed     | no leg ran
s | s | -:clean s+g:overflow           | s:guarded s+g:overflow             | failed  | missed     | no leg with only
s | s?| -:clean s:clean                | s:clean s:clean                    | passed  | quiet      |
s | s?| -:clean s:clean                | s:wrong s:wrong                    | failed  | collateral |
g | s | OF_SIZE                        | g:clean s+g:overflow s+g:overflow  | failed  | caught     |
g | s | OF_SIZE                        | g:wrong s+g:overflow s+g:overflow  | failed  | missed     | is wrong, which
g | s | OF_SIZE                        | g:clean s+g:overflow s+g:overflow  | passed  | missed     | passes with
g | s?| -:guarded s:guarded s+g:clean  | g:overflow s+g:clean s+g:clean     | failed  | caught     |
g | s?| -:guarded s:guarded s+g:clean  | g:clean s+g:clean s+g:clean        | failed  | missed     | is clean
g | s?| -:clean s:clean s+g:clean      | g:clean s+g:clean s+g:clean        | passed  | quiet      |
s | g | OF_GUARD                       | s:guarded s+g:overflow/10          | failed  | noticed    |
s | g | OF_GUARD                       | s:guarded s+g:overflow             | passed  | quiet      |
s | g?| -:clean g:clean                | s:guarded s+g:overflow             | failed  | noticed    |
s | g | OF_GUARD                       | s:wrong s+g:overflow               | failed  | collateral | is wrong
s | g | OF_GUARD                       | s:guarded s+g:elsewhere            | failed  | collateral | nothing declares
o | g | OF_GUARD                       | o:guarded o+g:overflow             | passed  | quiet      |
o | g | OF_GUARD                       | o:guarded o+g:overflow             | failed  | collateral |
o | g | OF_GUARD                       | o:guarded o+g:overflow             | skipped | collateral |
o | s | OF_SIZE                        | o:guarded o+s:guarded              | failed  | collateral |
"""


@pytest.mark.parametrize("line", [line for line in JUDGED.splitlines() if line])
def test_a_test_in_the_session_of_a_fix(line, catalogue):
    line = line.replace("OF_SIZE", OF_SIZE).replace("OF_GUARD", OF_GUARD)
    out, about, before, after, outcome, kind, why = (part.strip() for part in line.split("|"))
    fix, tells = about[0], "?" not in about
    baseline = {"t": heard(fix, before, tells=tells)}
    session = {"t": heard(fix, after, outcome, tells=tells)}
    cell = prove.row(catalogue.fix(NAMES[out]), "cpu", baseline, session).cells["t"]
    assert (cell.kind, why in cell.why) == (kind, True), cell


def test_what_no_session_can_say_is_told_apart(catalogue):
    fix, size = catalogue.fix(SIZE), heard("s", OF_SIZE)
    skipped = heard("s", "", "skipped")
    cases = {
        "skipped": (skipped, skipped),
        "infra": (size, heard("s", "s:guarded", "failed", verdict="infra")),
        "quiet": (Heard("passed"), Heard("passed")),  # a plain test, without a case
        "collateral": (Heard("passed"), Heard("failed", "AssertionError")),
    }
    for kind, (before, after) in cases.items():
        assert prove.row(fix, "cpu", {"t": before}, {"t": after}).cells["t"].kind == kind


def test_a_baseline_is_red_where_a_test_fails_or_hides_a_verdict():
    tests = {
        "good": heard("s", OF_SIZE),
        "skipped": heard("s", "", "skipped"),
        "fails": Heard("failed", "boom"),
        "hides": heard("s", OF_SIZE, verdict="vacuous"),
    }
    assert prove.red(tests) == {"fails": "boom", "hides": "vacuous: r"}


def test_rows_by_function_and_functions_that_catch_nothing(catalogue):
    caught = heard("s", "s:guarded s:guarded s+g:overflow", "failed")
    baseline = {"f::t[a]": heard("s", OF_SIZE), "f::t[b]": heard("s", OF_SIZE), "f::idle": Heard("passed")}
    session = {"f::t[a]": caught, "f::t[b]": heard("s", OF_SIZE), "f::idle": Heard("passed")}
    row = prove.row(catalogue.fix(SIZE), "cpu", baseline, session)
    assert prove.by_function(row, "caught") == {"f::t": (1, 2)} and not row.ok
    assert prove.idle([row]) == ["f::idle"]
    assert prove.tellers(SIZE, baseline) == ["f::t[a]", "f::t[b]"] and prove.tellers(GUARD, baseline) == []


LEGS = """
import os, signal, subprocess, sys

def imports(params, device):
    import pack.a

def opens(params, device):
    with open(os.path.join(os.path.dirname(__file__), "pack", "text")):
        return {"opened": True}

def dies(params, device):
    import pack.a
    os.kill(os.getpid(), signal.SIGSEGV)

def is_ended(params, device):
    import pack.a
    os.kill(os.getpid(), signal.SIGKILL)

def starts(params, device):
    subprocess.run(["true"])

def spawns(params, device):
    import multiprocessing
    child = multiprocessing.get_context("spawn").Process(target=print)
    child.start()
    child.join()

def asks(params, device):
    import pack.b
    subprocess.run([sys.executable, "--version"])

def counts(params, device):
    import pack.a
    with open(params["note"], "a") as note:
        note.write("x")
    if params.get("end"):
        os.kill(os.getpid(), getattr(signal, params["end"]))
    if params.get("full"):
        raise MemoryError("no room")
    return {"a": pack.a.VALUE}
"""


@pytest.fixture
def sources(tmp_path):
    """A package of two modules and a text, and legs that read some of it."""
    folder = tmp_path / "sources"
    (folder / "pack").mkdir(parents=True)
    for name in ("__init__.py", "a.py", "b.py", "text"):
        (folder / "pack" / name).write_text("VALUE = 0\n")
    (folder / "unfix_test_reads.py").write_text(LEGS)
    return folder


@pytest.mark.parametrize(
    ("entry", "read"),
    [
        ("imports", {"pack/__init__.py", "pack/a.py"}),
        ("opens", {"pack/text"}),
        ("dies", {"pack/__init__.py", "pack/a.py"}),
        ("starts", {EVERYTHING}),
        ("spawns", {EVERYTHING}),
        ("asks", {"pack/__init__.py", "pack/b.py"}),
    ],
)
def test_a_leg_says_what_it_reads(entry, read, sandbox, sources):
    request = Request(f"unfix_test_reads:{entry}", path=[str(sources)], roots=[str(sources)])
    first, second = sandbox.run(request), sandbox.run(request)  # the second reads compiled copies
    for ending in (first, second):
        assert set(ending.read) - {"unfix_test_reads.py"} == read
    assert sandbox.run(replace(request, roots=())).read is None


def test_a_compiled_copy_that_lies_elsewhere_counts_as_its_source(sources, tmp_path):
    code = "import sys; from pathlib import Path; from harness import reads; reads.log(Path(sys.argv[1]), sys.argv[2:])"
    environment = {
        **os.environ, "PYTHONPATH": f"{sources}{os.pathsep}{Path(__file__).parents[1]}",
        "PYTHONPYCACHEPREFIX": str(tmp_path / "compiled"), "PYTHONDONTWRITEBYTECODE": "",
    }  # fmt: skip
    for name in ("first", "second"):  # the second opens the copy and not the source
        command = [sys.executable, "-c", f"{code}; import pack.a", str(tmp_path / name), str(sources)]
        subprocess.run(command, env=environment, check=True)
        assert set((tmp_path / name).read_text().split()) == {"pack/__init__.py", "pack/a.py"}


def overlay(sources: Path, folder: Path, **changed: str) -> Path:
    """A tree that changes these modules, and links to the rest."""
    (folder / "pack").mkdir(parents=True)
    for file in (sources / "pack").iterdir():
        if file.stem in changed:
            (folder / "pack" / file.name).write_text(changed[file.stem])
        elif file.is_file():
            (folder / "pack" / file.name).symlink_to(file)
    return folder


@pytest.fixture
def ask(sources, tmp_path):
    """``ask(tree, **params)``: the answer of the leg that counts its runs, and how often it has run."""
    note = tmp_path / "note"

    def run(tree, entry="counts", **params):
        request = Request(f"unfix_test_reads:{entry}", {"note": str(note), **params})
        path = [str(tree), str(sources)] if tree else [str(sources)]
        ending = answers.run(tree, replace(request, path=path))
        return (ending.report or {}).get("facts"), len(note.read_text())

    (tmp_path / "answers").mkdir()
    answers = Answers(tmp_path / "answers", sources, "cpu")
    yield run
    answers.close()


def test_a_leg_runs_again_only_where_what_it_read_has_changed(ask, sources, tmp_path):
    other = overlay(sources, tmp_path / "other", b="VALUE = 1\n")  # the leg reads a, and never b
    changed = overlay(sources, tmp_path / "changed", a="VALUE = 2\n")
    both = overlay(sources, tmp_path / "both", a="VALUE = 2\n", b="VALUE = 1\n")
    assert ask(None) == ({"a": 0}, 1)
    assert ask(other) == ({"a": 0}, 1)
    assert ask(changed) == ({"a": 2}, 2)
    assert ask(both) == ({"a": 2}, 2)
    assert ask(None) == ({"a": 0}, 2)
    assert ask(None, more=1) == ({"a": 0}, 3)  # another request


def test_a_crash_is_an_answer_and_an_end_from_outside_is_none(ask):
    assert [ask(None, end="SIGSEGV") for _ in range(2)] == [(None, 1)] * 2
    assert [ask(None, end="SIGKILL") for _ in range(2)] == [(None, 2), (None, 3)]


def test_what_the_machine_failed_is_no_answer(ask):
    assert [ask(None, full=True)[1] for _ in range(2)] == [1, 2]


def test_tests_whose_names_differ_behind_an_at_are_two(pytestconfig):
    heard = prove_session._Listener(pytestconfig)
    for name, outcome in (("f::t[a@1]", "failed"), ("f::t[a@2]", "passed")):
        heard.pytest_runtest_logreport(pytest.TestReport(name, ("f", 1, "t"), {}, outcome, None, "call"))
    assert {name: said["outcome"] for name, said in heard._tests.items()} == {
        "f::t[a@1]": "failed",
        "f::t[a@2]": "passed",
    }


def test_an_answer_is_not_kept_after_its_command(ask, tmp_path):
    (tmp_path / "answers").rmdir()
    assert [ask(None) for _ in range(2)] == [({"a": 0}, 1), ({"a": 0}, 2)]
    assert not (tmp_path / "answers").exists()


FIX = "27486:draft-tokens-assert"
KEPT = "test_27486.py"
# checkouts whose only regressions are the six quick ones of one fix
ONLY = '''
import pytest
from regressions.scenarios import multi_layer
from regressions.tables import shapes

CONFIGS = """
num_steps num_draft_tokens num_seqs
        3                4        2
        3                8        2
"""

def configs(device):
    return [multi_layer.case("{fix}", **row) for row in shapes(CONFIGS)]

@pytest.mark.fix("{fix}")
@pytest.mark.cases(of=configs)
def test_refused(prove, case):
    prove(case)
'''.replace("{fix}", FIX)


@pytest.fixture
def small(checkout):
    for file in (checkout / "regressions").glob("test_*.py"):
        file.unlink()
    (checkout / "regressions" / KEPT).write_text(ONLY)
    return checkout


def proved(unfix, checkout, *sel):
    ended = unfix("prove", *sel, "--device", "cpu", "-n", "1", "--json", "out/kills.json", cwd=checkout)
    file = checkout / "out" / "kills.json"
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended, json.loads(file.read_text()) if file.exists() else None


def test_a_fix_that_its_test_catches(unfix, small):
    ended, document = proved(unfix, small, FIX)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    assert document["fixes"][FIX] == {
        "caught": 1, "missed": 0, "noticed": 0, "collateral": 0, "quiet": 1, "skipped": 0, "infra": 0,
    }  # fmt: skip
    [kill] = document["results"]
    assert kill["test"] == "regressions/test_27486.py::test_refused[multi_layer-steps3-draft8-seqs2]"
    assert f"with {FIX} out: must be guarded, is error" in kill["why"]
    assert document["environment"]["torch"] and document["baseline"]["red"] == {}
    assert "1 of 1" in ended.stdout and "1 fixes x 2 tests: 1 as they must be" in ended.stdout
    assert "nothing out: 2 tests: 2 passed" in ended.stderr and f"{FIX} out: 1 caught, 1 quiet" in ended.stderr


def test_a_red_baseline_stops_it(unfix, small):
    """The fix is gone from the sources: nothing with it out would say anything."""
    file = small / "kernels/eagle_kv/multi_layer_eagle.py"
    line = "        check_num_draft_tokens(num_steps, num_draft_tokens)\n"
    assert file.read_text().count(line) == 1
    file.write_text(file.read_text().replace(line, ""))
    ended, document = proved(unfix, small)
    assert ended.returncode == 3 and document["fixes"] == {} and document["results"] == []
    assert len(document["baseline"]["red"]) == 2
    assert "red: regressions/test_27486.py::test_refused[" in ended.stdout and " and 1 more: rotted: " in ended.stdout
    assert " out: " not in ended.stderr.replace("nothing out: ", "")


def test_a_weak_test_is_a_miss_and_an_innocent_one_collateral(unfix, small):
    weak = ONLY.replace("    prove(case)", "    with contextlib.suppress(BaseException):\n        prove(case)")
    innocent = "def test_innocent():\n    assert not os.environ.get('SGLANG_DEBUG_REVERT_PR')\n"
    (small / "regressions" / KEPT).write_text(f"import contextlib, os\n{weak}\n{innocent}")
    ended, document = proved(unfix, small, FIX, "27460")
    assert ended.returncode == 1, ended.stderr + ended.stdout
    kinds = {(row["fix"], row["test"].partition("::")[2].partition("[")[0]): row["kind"] for row in document["results"]}
    assert kinds[FIX, "test_refused"] == "missed" and kinds[FIX, "test_innocent"] == "collateral"
    assert kinds[OTHER, "test_innocent"] == "collateral" and (OTHER, "test_refused") not in kinds
    assert document["untested"] == [OTHER, "27460:capacity-assert"]
    assert document["idle"] == []  # of two fixes, most tests are not about any
    lines = ended.stdout.splitlines()
    assert lines[:2] == [f"no test: {OTHER}", "no test: 27460:capacity-assert"]
    assert f"missed: {FIX}: regressions/test_27486.py::test_refused[" in ended.stdout
    assert f"passes with {FIX} out" in ended.stdout and f"collateral: {FIX}: " in ended.stdout


ENDLESS = "import pathlib, time\n\ndef test_endless():\n    pathlib.Path('began').touch()\n    time.sleep(600)\n"


def test_no_session_outlives_a_command_that_is_ended(small, tmp_path):
    (small / "regressions" / KEPT).write_text(ENDLESS)
    command = [sys.executable, "-m", "harness.cli", "prove", FIX, "--device", "cpu", "-n", "0"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=small, env=environment, stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + 60
        while not (small / "began").exists() and time.monotonic() < until:
            time.sleep(0.05)
        process.terminate()  # a session holds stderr's pipe open no longer than it lives
        _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (130, "unfix: interrupted\n")
    assert not list(tmp_path.glob("unfix-prove-*"))
    assert not any(str(small) in words for words in _running())


def _running() -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(file.read_text(errors="replace"))
    return found


def test_a_session_that_cannot_be_read_is_infra(unfix, small):
    (small / "regressions" / KEPT).write_text(ONLY + "\nimport no_such_module\n")
    ended = unfix("prove", FIX, "--device", "cpu", "-n", "1", cwd=small)
    assert (ended.returncode, ended.stdout) == (4, "") and "No module named 'no_such_module'" in ended.stderr
    assert ended.stderr.splitlines()[-1] == "unfix: pytest ended with 1 with nothing out; its own words are above"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("nonsense",), "SEL: unknown fix 'nonsense'"),
        (("0",), "selects no fix"),
        (("--jobs", "many"), "--jobs 'many'"),
        (("--jobs", "²"), "--jobs '²'"),
        (("--target", "other"), "--target 'other'"),
        (("--json", ""), "--json needs a file name"),
    ],
)
def test_bad_usage_is_one_line(unfix, arguments, part):
    ended = unfix("prove", *arguments)
    assert ended.returncode == 2 and len(ended.stderr.strip().splitlines()) == 1 and part in ended.stderr
