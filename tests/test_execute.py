"""`unfix exec`: what a command, its subprocesses and its spawned children import, and what it is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import execute, fixes, selection
from harness.errors import MissingPackageError, RottedError, UnfixError, UsageError

TOGGLES = """\
pr: 7
title: t
fixes:
  wide:
    kind: size
    summary: s
    reversals:
      boxes:
        variants: [{name: v, patches: [{target: boxes.row.width, edits: [{match: n * topk, replacement: n}]}]}]
      other: [{target: other.width, edits: [{match: n * topk, replacement: n}]}]
  bare:
    kind: arithmetic
    summary: s
    reversals:
      boxes:
        unfixed: [{name: u, patches: [{target: boxes.row.at, edits: [{match: return i, replacement: return int(i)}]}]}]
  gone:
    kind: arithmetic
    summary: s
    reversals:
      boxes:
        variants: [{name: v, patches: [{target: boxes.row.nowhere, edits: [{match: a, replacement: b}]}]}]
        unfixed: [{name: u, patches: [{target: boxes.row.nowhere, edits: [{match: b, replacement: a}]}]}]
"""
SOURCE = "def width(n, topk):\n    return n * topk\n\n\ndef at(i):\n    return i\n"
WIDE, BARE = "7:wide", "7:bare"


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> fixes.Catalogue:
    monkeypatch.setenv("UNFIX_CACHE", str(tmp_path / "cache"))
    for name in ("PYTHONPATH", "PYTHONSAFEPATH"):
        monkeypatch.delenv(name, raising=False)
    for name in ("boxes", "other"):
        package = tmp_path / f"site-{name}" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(SOURCE if name == "other" else "")
        (package / "row.py").write_text(SOURCE)
    (tmp_path / "toggles").mkdir()
    (tmp_path / "toggles/7.yaml").write_text(TOGGLES)
    (tmp_path / "regressions").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return fixes.load(tmp_path / "toggles")


def environment(tmp_path: Path, *names: str, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    return {**kept, "PYTHONPATH": os.pathsep.join(str(tmp_path / f"site-{name}") for name in names), **more}


def output(prepared: execute.Prepared) -> list[str]:
    ended = subprocess.run(prepared.command, env=prepared.environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


CHILDREN = """\
import multiprocessing, os, subprocess, sys
def show():
    import boxes.row as row
    print(row.width(3, 5), row.__file__, os.environ.get("SGLANG_DEBUG_REVERT_PR"), flush=True)
if __name__ == "__main__":
    show()
    subprocess.run([sys.executable, "-c", "from script import show; show()"], check=True)
    child = multiprocessing.get_context("spawn").Process(target=show)
    child.start(); child.join(); sys.exit(child.exitcode)
"""


def test_a_script_and_its_children_see_the_overlay(tmp_path, registered):
    Path("script.py").write_text(CHILDREN)
    env = environment(tmp_path, "boxes", SGLANG_DEBUG_REVERT_PR="7:wide")
    prepared = execute.prepare([sys.executable, "script.py"], registered, [WIDE], environment=env)
    [tree] = prepared.overlays
    assert output(prepared) == [f"3 {tree}/boxes/row.py None"] * 3
    assert prepared.notes[0] == f"out of boxes: 7:wide ({tmp_path}/site-boxes, overlay {tree})"
    assert prepared.environment["PYTHONPATH"] == f"{tree}{os.pathsep}{env['PYTHONPATH']}"
    assert prepared.environment["UNFIX_REVERT"] == WIDE
    assert (tmp_path / "site-boxes/boxes/row.py").read_text() == SOURCE


SHOW = "import boxes.row as r, other.row, other; print(r.width(3, 5), other.width(3, 5), r.at('4'))"


def test_every_code_base_forward_and_back(tmp_path, registered):
    env = environment(tmp_path, "boxes", "other")
    command = [sys.executable, "-c", SHOW.replace("r.at('4')", "repr(r.at('4'))")]
    none = execute.prepare(command, registered, environment={**env, "UNFIX_REVERT": "7"})
    assert "UNFIX_REVERT" not in none.environment
    assert output(none) == ["15 15 '4'"] and none.notes == ("nothing is out",) and none.overlays == ()
    both = execute.prepare(command, registered, [WIDE], [BARE], environment=env)
    assert output(both) == ["3 3 4"] and len(both.overlays) == 2
    assert [note.partition(" (")[0] for note in both.notes[:3]] == [
        "out of boxes: 7:wide", "put into boxes: 7:bare", "out of other: 7:wide"
    ]  # fmt: skip
    one = execute.prepare(command, registered, [WIDE], target="other", environment=env)
    assert output(one) == ["15 3 '4'"]


def test_what_is_not_there_is_noted_unless_nothing_is_left(tmp_path, registered):
    env = environment(tmp_path, "boxes")
    command = [sys.executable, "-c", "0"]
    prepared = execute.prepare(command, registered, [WIDE, BARE], environment=env)
    assert prepared.environment["UNFIX_REVERT"] == WIDE
    assert any("7:bare isn't in this boxes (it reads like 'u'), nor in any release known" in n for n in prepared.notes)
    assert any("can't import other: no fix of other can be out" in note for note in prepared.notes)
    with pytest.raises(UnfixError, match=r"7:bare isn't in this boxes .*: nothing to take out$") as caught:
        execute.prepare(command, registered, [BARE], environment=env)
    assert caught.value.exit_code == 1
    with pytest.raises(UnfixError, match=r"7:wide is in this boxes .*: nothing to put in"):
        execute.prepare(command, registered, [], [WIDE], target="boxes", environment=env)
    with pytest.raises(RottedError, match=r"^7:gone in boxes: v: boxes.row.nowhere: .* has no nowhere"):
        execute.prepare(command, registered, ["7:gone"], environment=env)
    with pytest.raises(MissingPackageError, match=f"{sys.executable} can't import boxes"):
        execute.prepare(command, registered, [WIDE], target="boxes", environment=environment(tmp_path))
    with pytest.raises(UsageError, match="7:wide can't be both taken out and put in"):
        execute.prepare(command, registered, [WIDE], [WIDE], environment=env)
    with pytest.raises(UsageError, match="nothing says how in moon"):
        execute.prepare(command, registered, [WIDE], target="moon", environment=env)
    with pytest.raises(UsageError, match="no command 'no-such-command' to run"):
        execute.prepare(["no-such-command"], registered, [WIDE], environment=env)


@pytest.mark.parametrize("flags", [["-I"], ["-E"], ["-uE"], ["-W", "ignore", "-I"]])
def test_flags_that_ignore_the_path(tmp_path, registered, flags):
    with pytest.raises(UsageError, match="Python would ignore PYTHONPATH"):
        execute.prepare([sys.executable, *flags, "-c", "0"], registered, [WIDE], environment=environment(tmp_path))


def test_a_copy_that_would_come_first(tmp_path, registered, monkeypatch):
    env = environment(tmp_path, "boxes")
    monkeypatch.chdir(tmp_path / "site-boxes")
    with pytest.raises(UsageError, match=r"site-boxes/boxes comes before the overlay on the command's path"):
        execute.prepare([sys.executable, "-m", "boxes.row"], registered, [WIDE], environment=env)
    Path(tmp_path / "work/script.py").write_text("import boxes.row as r; print(r.width(3, 5))")
    prepared = execute.prepare([sys.executable, "../work/script.py"], registered, [WIDE], environment=env)
    assert output(prepared) == ["3"]  # a script's path starts with its own folder, not with this one


@pytest.mark.parametrize(
    ("head", "exact"),
    [("#!{python}\n", True), ("#!/usr/bin/env python3.x\n", False), ("#!/usr/bin/env -S python -u\n", True),
     ("#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n", True), ("#!/bin/bash\n", True), ("", True)],
)  # fmt: skip
def test_the_python_of_a_script(tmp_path, registered, head, exact):
    binary = tmp_path / "bin"
    binary.mkdir()
    (binary / "python").symlink_to(sys.executable)
    script = binary / "tool"
    script.write_text(head.format(python=sys.executable) + "import sys\n")
    script.chmod(0o755)
    path = {"PATH": f"{binary}{os.pathsep}/usr/bin{os.pathsep}/bin"}
    python, first = execute._python(str(script), ["tool"], path)
    names = (sys.executable, str(binary / "python"))
    assert python in names if exact else python == str(binary / "python")
    assert first == (str(binary) if "exec" in head or "python" in head and exact else "-")


def test_the_command_line(tmp_path, registered, root):
    driver = "import sys; from harness import cli, upstream_cli; upstream_cli.register(cli.app); cli.main()"
    body = "import sys, boxes.row as r; print(r.width(3, 5), sys.argv[1:]); sys.exit(9)"
    env = environment(tmp_path, "boxes")
    env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(root)])
    env["UNFIX_TRUST"] = str(tmp_path)

    def unfix(*arguments: str, **more: str) -> tuple[int, str, str]:
        command = [sys.executable, "-c", driver, "exec", *arguments, "--", sys.executable, "-c", body, "-x"]
        ended = subprocess.run(command, env={**env, **more}, capture_output=True, text=True, check=False)
        return ended.returncode, ended.stdout, ended.stderr

    code, stdout, stderr = unfix("--revert", "7:wide", "--target", "boxes")
    assert (code, stdout) == (9, "3 ['-x']\n"), stderr
    assert stderr.startswith("unfix: out of boxes: 7:wide")
    code, stdout, _ = unfix(SGLANG_DEBUG_REVERT_PR="7:wide")
    assert (code, stdout) == (9, "3 ['-x']\n")
    code, stdout, stderr = unfix("--revert", "7:wid")
    assert (code, stdout) == (2, "") and "unknown fix '7:wid', did you mean 7:wide?" in stderr
    assert unfix("--revert", "7:bare", "--target", "boxes")[0] == 1


@pytest.mark.parametrize(
    ("variables", "name", "ids"),
    [
        ({}, selection.VARIABLE, ()),
        ({"UNFIX_REVERT": "7:wide"}, "UNFIX_REVERT", (WIDE,)),
        ({"UNFIX_REVERT": "7:wide", "SGLANG_DEBUG_REVERT_PR": ""}, "UNFIX_REVERT", (WIDE,)),
        ({"UNFIX_REVERT": "7:wide", "SGLANG_DEBUG_REVERT_PR": "7:bare"}, selection.VARIABLE, (BARE,)),
        ({"UNFIX_REVERT": "7:wide", "SGLANG_DEBUG_REVERT_PR": "0"}, selection.VARIABLE, ()),
    ],
)
def test_what_is_out_of_a_session(registered, variables, name, ids):
    assert selection.of_session(registered, variables) == (name, ids)


def test_a_bad_variable_says_which_it_is(registered):
    with pytest.raises(UsageError, match="^UNFIX_REVERT: unknown fix '7:wid', did you mean 7:wide"):
        selection.of_session(registered, {"UNFIX_REVERT": "7:wid"})


SIZE, GUARD = "27338:topk-factor", "27338:capacity-assert"


@pytest.mark.parametrize(
    ("out", "code", "seen", "unseen"),
    [
        # a test is a plain one here: one leg, with nothing out but what exec took out
        (GUARD, 0, "1 cases: 1 proved", "REVERT ACTIVE in every leg (SGLANG"),
        (SIZE, 1, "must be clean, is guarded", "IndexError"),
        (f"{SIZE},{GUARD}", 1, "IndexError: index out of range", "is guarded"),
    ],
)
def test_the_project_s_own_tests_take_it_for_a_session_s_revert(unfix, out, code, seen, unseen):
    test = ("-m", "pytest", "regressions/test_26340.py", "-k", "topk2-", "-p", "no:cacheprovider", "-n", "0")
    ended = unfix("exec", "--revert", out, "--", sys.executable, *test)
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert f"REVERT ACTIVE in every leg (UNFIX_REVERT): {out.replace(',', ', ')}" in ended.stdout
    assert seen in ended.stdout and unseen not in ended.stdout
