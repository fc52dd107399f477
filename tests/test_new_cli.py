"""`unfix new`: a toy package's fix, registered from its diff; and all that is refused, with nothing left behind."""

from __future__ import annotations

import difflib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from harness import fixes, new_cli
from harness.errors import RottedError, UnfixError, UsageError

BEFORE = """\
import ctypes

import torch


class Rows:
    def __init__(self, max_requests, topk, context):
        self.topk = topk
        self.slots = torch.zeros(max_requests * context, dtype=torch.int32)

    def fill(self, requests):
        ids = torch.cat([request for request in requests for _ in range(self.topk)])
        ctypes.memmove(self.slots.data_ptr(), ids.data_ptr(), ids.numel() * 4)
        return self.slots[: ids.numel()]
"""
AFTER = BEFORE.replace("max_requests * context", "max_requests * topk * context").replace(
    "        ctypes.memmove",
    '        assert ids.numel() <= self.slots.numel(), f"rows too small: need {ids.numel()}"\n        ctypes.memmove',
)
RUN = """\
    import torch
    from toy.rows import Rows

    from harness.leg import WrongValues

    ids = torch.arange(1, params["n"] + 1, dtype=torch.int32)
    filled = Rows(max_requests=1, topk=2, context=8).fill([ids])
    if filled.tolist() != ids.tolist() * 2:
        raise WrongValues(f"filled {filled.tolist()}")
    return {}
"""


def unified(old: str, new: str, name: str = "src/toy/rows.py") -> str:
    lines = difflib.unified_diff(old.splitlines(True), new.splitlines(True), f"a/{name}", f"b/{name}")
    return "".join(lines)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty checkout of this project, as the working directory."""
    folder = tmp_path / "project"
    for below in ("toggles", "regressions/scenarios"):
        (folder / below).mkdir(parents=True)
    monkeypatch.setenv("UNFIX_TRUST", str(folder))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return folder


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A package that has the fix."""
    package = tmp_path / "repo/src/toy"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "rows.py").write_text(AFTER)
    return tmp_path / "repo"


def new(*arguments: str, diff: str = "", pr: str = "901") -> Result:
    app = typer.Typer()
    new_cli.register(app)
    app.callback()(lambda: None)
    return CliRunner().invoke(app, ["new", pr, "--diff", "-", *arguments], input=diff)


def written(project: Path) -> list[str]:
    return sorted(path.relative_to(project).as_posix() for path in project.rglob("*") if path.is_file())


FILES = ["regressions/scenarios/pr_901.py", "regressions/test_901.py", "toggles/901.yaml"]


def test_from_a_diff_to_three_files(project, toy):
    result = new("--source", str(toy), diff=unified(BEFORE, AFTER))
    assert result.exit_code == 0, result.output
    assert written(project) == FILES
    assert "-        self.slots = torch.zeros(max_requests * topk * context, dtype=torch.int32)\n+" in result.stdout
    assert "next: fill in run() of regressions/scenarios/pr_901.py, then: unfix run 901 --target toy" in result.stderr
    size, guard = fixes.load(project / "toggles").fixes
    assert (size.id, size.kind, size.code_bases) == ("901:topk-factor", "size", ("toy",))
    assert (guard.id, guard.kind, guard.guard) == ("901:ids-assert", "guard", "rows too small: need")
    assert size.legs_out_ids == ((size.id,), (size.id, guard.id))
    assert [leg.outcome for leg in (*size.legs, *guard.legs)] == ["guarded", "overflow", "overflow"]


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=me", "-c", "user.email=me@example.org", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_from_git_show_with_no_narrowing_at_all(project, toy):
    rows, notes = toy / "src/toy/rows.py", toy / "README.md"
    for text, message in ((BEFORE, "Rows"), (AFTER, "Room for every branch")):
        rows.write_text(text)
        notes.write_text(f"# {message}\n")
        (toy / "tests").mkdir(exist_ok=True)
        (toy / "tests/test_rows.py").write_text(f"def test():\n    '''{message}'''\n")
        (toy / "data.bin").write_bytes(bytes(range(256)) + message.encode())
        (toy / f"src/toy/{message.split()[0].lower()}_.py").write_text(f"WORD = {message!r}\n")
        git(toy, *(["init", "-q"] if message == "Rows" else ["status"]))
        git(toy, "add", "-A")
        git(toy, "commit", "-qm", message)
    result = new("--source", str(toy), diff=git(toy, "show"))
    assert result.exit_code == 0, result.output
    assert [fix.name for fix in fixes.load(project / "toggles")] == ["topk-factor", "ids-assert"]
    for name in ("README.md", "data.bin", "tests/test_rows.py"):
        assert f"skipped: {name}" in result.stderr
    assert "toy.room_: a new file, left alone" in result.stderr


def test_only_and_name_and_summary(project, toy):
    more = ("--only", "*.__init__", "--name", "room", "--summary", "No room for branches: all of it")
    assert new("--source", str(toy), *more, diff=unified(BEFORE, AFTER)).exit_code == 0
    [fix] = fixes.load(project / "toggles").fixes
    assert (fix.id, fix.title, fix.summary) == ("901:room", *["No room for branches: all of it"] * 2)


def test_text_that_starts_indented_is_read_back_as_it_is(project, toy):
    old = 'def f(n):\n    return g(\n        n,\n        """a\n  b""",\n        1,\n    )\n'
    fixed = old.replace("n,", "n + 1,").replace("1,\n    )", "2,\n    )")
    (toy / "src/toy/rows.py").write_text(fixed)
    assert new("--source", str(toy), diff=unified(old, fixed)).exit_code == 0
    [fix] = fixes.load(project / "toggles").fixes
    [edit] = fix.reversals_for("toy")[0].edits
    assert edit.match == '    n + 1,\n    """a\n  b""",\n    2,\n'


def test_a_moved_file_and_line_ends(project, toy):
    (toy / "src/toy/rows.py").write_bytes(AFTER.replace("\n", "\r\n").encode())
    diff = "diff --git a/src/toy/old.py b/src/toy/rows.py\nsimilarity index 90%\nrename from src/toy/old.py\n"
    diff += "rename to src/toy/rows.py\n" + unified(BEFORE, AFTER).replace("a/src/toy/rows.py", "a/src/toy/old.py")
    assert new("--source", str(toy), diff=diff).exit_code == 0
    assert len(fixes.load(project / "toggles")) == 2


def test_what_is_installed_is_found_by_its_package(project, toy, monkeypatch):
    monkeypatch.syspath_prepend(str(toy / "src"))
    assert new(diff=unified(BEFORE, AFTER, "somewhere/else/toy/rows.py")).exit_code == 0
    assert fixes.load(project / "toggles").fixes[0].code_bases == ("toy",)


def test_a_cuda_source_names_who_loads_it(project, toy):
    old = "__global__ void store(int slot) {\n  write(slot);\n}\n"
    guarded = old.replace("  write", "  assert(slot >= 0);\n  write")
    (toy / "src/toy/csrc").mkdir()
    (toy / "src/toy/csrc/store.cuh").write_text(guarded)
    (toy / "src/toy/ops.py").write_text(
        'def _build():\n    return load("csrc/store.cuh")\n\n\ndef store(slot):\n    _build()(slot)\n'
    )
    result = new("--source", str(toy), diff=unified(old, guarded, "src/toy/csrc/store.cuh"))
    assert result.exit_code == 0, result.output
    [fix] = fixes.load(project / "toggles").fixes
    [reversal] = fix.reversals_for("toy")
    assert (fix.id, reversal.target, reversal.entered_by) == ("901:slot-assert", "toy/csrc/store.cuh", "toy.ops.store")
    assert "check entered_by" in result.stderr


GOOD = unified(BEFORE, AFTER)
LATER = AFTER.replace("topk * context", "topk * wide(context)")
REFUSED = {
    # name -> (diff, options, what the sources read, what is said)
    "does not apply": (GOOD, (), LATER, "<stdin>:3: doesn't apply to toy/rows.py: no such lines around line 6"),
    "lacks the fix": (GOOD, (), BEFORE, "these sources lack the fix"),
    "no diff": ("hello", (), AFTER, "<stdin>: no unified diff in it"),
    "cut off": (GOOD[:-60], (), AFTER, "ends too early"),
    "not in the sources": (GOOD.replace("rows.py", "cols.py"), (), AFTER, "src/toy/cols.py isn't in"),
    "only a test": (GOOD.replace("src/toy/rows.py", "tests/rows.py"), (), AFTER, "only tests/rows.py: a test"),
    "only binary": (
        "diff --git a/x.so b/x.so\nBinary files a/x.so and b/x.so differ\n",
        (),
        AFTER,
        "only x.so: binary",
    ),
    "only layout": (unified(BEFORE.replace("* context", "*  context"), BEFORE), (), BEFORE, "no change to undo"),
    "nothing is named": (GOOD, ("--only", "*.empty"), AFTER, "no change that --only '*.empty' names"),
    "no such directory": (GOOD, ("--source", "/nowhere"), AFTER, "--source /nowhere: no such directory"),
    "two sources": (GOOD, ("--release", "0.5.13"), AFTER, "--source and --release: give one of them"),
    "a bad name": (GOOD, ("--name", "Topk_Factor"), AFTER, "--name 'Topk_Factor': must be words"),
    "a bad summary": (GOOD, ("--summary", "a\nb"), AFTER, "--summary: must be one line"),
    "not Python": (GOOD, (), AFTER + "def\n", "toy.rows, before or after the diff, isn't Python: invalid syntax"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_leaves_nothing_behind(project, toy, name):
    diff, options, text, said = REFUSED[name]
    (toy / "src/toy/rows.py").write_text(text)
    source = () if "/nowhere" in options else ("--source", str(toy))
    result = new(*source, *options, diff=diff)
    assert isinstance(result.exception, UsageError), result.output
    assert said in str(result.exception) and "\n" not in str(result.exception)
    assert written(project) == []


def test_a_hunk_of_another_function_may_be_missing_when_it_is_not_asked_for(project, toy):
    gap = "    def more(self):\n        return [\n" + "            1,\n" * 9 + "        ]\n\n"
    old, now = (text.replace("    def fill", gap + "    def fill") for text in (BEFORE, AFTER))
    (toy / "src/toy/rows.py").write_text(now.replace("torch.zeros", "torch.empty"))
    assert isinstance(new("--source", str(toy), diff=unified(old, now)).exception, UsageError)
    result = new("--source", str(toy), "--only", "*.fill", diff=unified(old, now))
    assert result.exit_code == 0 and "skipped: <stdin>:3: doesn't apply" in result.stderr
    assert [fix.name for fix in fixes.load(project / "toggles")] == ["ids-assert"]


@pytest.mark.parametrize("there", FILES)
def test_nothing_is_overwritten(project, toy, there):
    (project / there).write_text("mine")
    result = new("--source", str(toy), diff=GOOD)
    assert str(result.exception) == f"{there} is there already: edit it, or remove it first"
    assert written(project) == [there] and (project / there).read_text() == "mine"


@pytest.mark.parametrize("pr", ["0", "x", "-1", "27338:a", "../1"])
def test_a_pr_is_a_number(project, toy, pr):
    app = typer.Typer()
    new_cli.register(app)
    app.callback()(lambda: None)
    result = CliRunner().invoke(app, ["new", "--diff", "-", "--source", str(toy), "--", pr], input=GOOD)
    assert "must be the PR's number, or own" in str(result.exception)


def test_a_disk_that_fills_up_half_way_leaves_nothing(project, toy, monkeypatch):
    real, calls = new_cli.report.write_text, []

    def full(path: Path, text: str) -> None:
        calls.append(path)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        real(path, text)

    monkeypatch.setattr(new_cli.report, "write_text", full)
    result = new("--source", str(toy), diff=GOOD)
    assert isinstance(result.exception, UnfixError) and "No space left" in str(result.exception)
    assert len(calls) == 3 and written(project) == []


def test_a_reversal_that_the_sources_refuse_is_rotted(project, toy, monkeypatch):
    real = new_cli.scaffold.toggle
    broken = lambda *arguments: real(*arguments).replace("topk * context", "topk * contexts")  # noqa: E731
    monkeypatch.setattr(new_cli.scaffold, "toggle", broken)
    result = new("--source", str(toy), diff=GOOD)
    assert isinstance(result.exception, RottedError) and "901:topk-factor" in str(result.exception)
    assert written(project) == []


def test_the_regression_fails_until_it_is_filled_in_and_is_then_proved(checkout, toy, unfix, python):
    diff = checkout / "fix.patch"
    diff.write_text(GOOD)
    made = unfix("new", "901", "--diff", str(diff), "--source", str(toy), cwd=checkout)
    assert made.returncode == 0, made.stderr
    pytest_ = ("-m", "pytest", "-q", "-p", "no:xdist", "regressions/test_901.py", "--unfix-device", "cpu",
               "--unfix-target", "toy", "--unfix-source", str(toy))  # fmt: skip
    ended = python(*pytest_, cwd=checkout)
    assert "unfix: 4 cases: 4 regressed" in ended.stdout and "NotImplementedError: fill in run()" in ended.stdout
    scenario, table = checkout / "regressions/scenarios/pr_901.py", checkout / "regressions/test_901.py"
    head, _, tail = scenario.read_text().partition("    raise NotImplementedError")
    scenario.write_text(head + RUN + tail.partition("\n")[2])
    rows = {
        "8  clean    1      2": "8  clean    1      8",
        "1  clean    0": "4  clean    0",
        "8  guarded": "9  guarded",
    }
    text = table.read_text()
    for drafted, right in rows.items():
        assert drafted in text
        text = text.replace(drafted, right)
    table.write_text(text)
    ended = python(*pytest_, cwd=checkout)
    assert ended.returncode == 0 and "unfix: 4 cases: 4 proved" in ended.stdout, ended.stdout
    table.write_text(text.replace("1      8 ", "1      7 "))  # a wrong prediction is a finding
    ended = python(*pytest_, cwd=checkout)
    assert "1 unexpected, 3 proved" in ended.stdout or "predicted 7 stray elements" in ended.stdout
    assert ended.returncode == 1
