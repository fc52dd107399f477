"""The command in somebody else's directory, and what a terminal is told: one line, and never more than text."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from harness import cli, output, rerun, root, trust
from harness.errors import UsageError
from regressions.scenarios import draft

ROOT = Path(__file__).parents[1]
UNFIX = "import sys; sys.path[:1] = []; from harness.cli import main; main()"  # as its console script has it
LOUD = "raise SystemExit('code of theirs was run')\n"
FILE = """\
pr: 1
title: t
fixes:
  x: {kind: size, summary: "[red]s[/] [/no]", reversals: {a: [{target: a.b, edits: [{match: m, replacement: n}]}]}}
"""


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A checkout that this unfix is not from, and whose every module says so when it is imported."""
    for name in ("toggles", "regressions/scenarios", "kernels/eagle_kv", "below"):
        (tmp_path / "theirs" / name).mkdir(parents=True)
    for name in ("regressions/__init__.py", "conftest.py", "kernels/eagle_kv/__init__.py", "secrets.py", "torch.py"):
        (tmp_path / "theirs" / name).write_text(LOUD)
    (tmp_path / "theirs/toggles/1.yaml").write_text(FILE)
    return tmp_path / "theirs"


def run(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command, without the working directory on its path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    env = {**kept, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", **environment}
    command = [sys.executable, "-c", UNFIX, *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("where", [".", "below"])
@pytest.mark.parametrize(
    "command", [["list"], ["diff", "1"], ["check"], ["run"], ["repro", "1"], ["report", "n.json", "--html", "r.html"]]
)
def test_a_checkout_of_somebody_else_s_is_refused(command, where, theirs):
    (theirs / where / "n.json").write_text((ROOT / "tests/nights/2-fix-deleted.json").read_text())
    ended = run(*command, cwd=theirs / where)
    said = [line for line in ended.stderr.splitlines() if "has toggles/ and regressions/, which are code" in line]
    assert len(said) == 1 and f"unfix --trust {theirs}" in said[0]
    assert "code of theirs" not in ended.stdout + ended.stderr
    if command[0] != "report":  # which goes on without diffs
        assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize("how", ["option", "variable"])
def test_one_that_is_trusted_is_used(how, theirs):
    for name in ("secrets.py", "torch.py"):
        (theirs / name).unlink()
    option = ["--trust", str(theirs)] if how == "option" else []
    ended = run(*option, "list", cwd=theirs, **({} if option else {trust.VARIABLE: str(theirs)}))
    assert ended.returncode == 0, ended.stderr
    assert "1:x" in ended.stdout and "[red]s[/] [/no]" in ended.stdout  # as it stands, and no style of it


def test_nothing_is_put_on_the_path_for_one_that_is_refused(theirs, monkeypatch):
    monkeypatch.chdir(theirs)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(UsageError, match="which are code"):
        root.project_root()
    assert not [entry for entry in sys.path if entry.startswith(str(theirs))]
    monkeypatch.setenv(trust.VARIABLE, str(theirs))
    assert root.project_root() == theirs and str(theirs) in sys.path


def test_a_note_is_text(capsys):
    output.note("a\x1b[2J\u202e\n::error::x\n##[add-mask]y\r")
    assert capsys.readouterr().err == "unfix: a\\x1b[2J\\u202e\n\\x3a:error::x\n#\\x23[add-mask]y\\r\n"


HOSTILE = "\x1b[2J\x1b]0;t\x07\u202e\n::error::x\n##[add-mask]y"


@pytest.mark.parametrize(
    "arguments",
    [
        ("list", HOSTILE),
        ("diff", HOSTILE),
        ("repro", "27338", f"--backend={HOSTILE}"),
        ("report", HOSTILE),
        ("merge", HOSTILE),
        ("import", HOSTILE, "1"),
        ("import", "--source", HOSTILE),
        ("check", "--source", HOSTILE),
        ("check", "--release", HOSTILE),
        ("new", "1", "--diff", HOSTILE),
        ("exec", "--revert", "27338", "--", HOSTILE),
        ("run", "--target", HOSTILE),
        ("run", "--baseline", HOSTILE, "--github"),
        ("list", "--json", f"/dev/null/{HOSTILE}"),
        ("--trust", HOSTILE, "list"),
        (HOSTILE,),
    ],
    ids=lambda arguments: " ".join(arguments).replace(HOSTILE, "X"),
)
def test_what_was_typed_is_shown_as_text(arguments, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["unfix", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (2, 4)
    lines = capfd.readouterr().err.rstrip("\n").split("\n")
    assert len(lines) <= 3 and lines[0].startswith("unfix: ")
    assert all(line.isprintable() and not line.startswith("::") and "##[" not in line for line in lines), lines


def test_a_diff_is_safe_on_a_terminal_and_exact_in_a_pipe(checkout, unfix):
    source = checkout / "kernels/eagle_kv/backends/flashinfer.py"
    text = source.read_text()
    at = text.index("width = draft_kv_indices_buffer_width(")
    line = text[text.rindex("\n", 0, at) + 1 : at]
    source.write_text(f"{text[: at - len(line)]}{line}# \x1b[31mred\n{text[at - len(line) :]}")
    environment = {**os.environ, "PYTHONPATH": f"{checkout}:{checkout / 'kernels'}"}
    command = [sys.executable, "-m", "harness.cli", "diff", "27338:topk-factor"]
    ours, theirs = pty.openpty()
    ended = subprocess.run(command, cwd=checkout, env=environment, stdout=theirs, check=False)
    os.close(theirs)
    shown = b""
    try:
        while more := os.read(ours, 1 << 16):
            shown += more
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert ended.returncode == 0 and b"\\x1b[31mred" in shown and b"\x1b" not in shown
    assert "# \x1b[31mred" in unfix("diff", "27338:topk-factor", cwd=checkout).stdout


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
@pytest.mark.parametrize("kind", ["pipe", "device", "huge"])
def test_a_file_that_would_never_end_is_refused(kind, suffix, tmp_path, unfix):
    path = tmp_path / f"m{suffix}"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with open(path, "wb") as stream:
            stream.truncate((1 << 28) + 1)
    ended = unfix("report", str(path))
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1
    assert ("it has more than 256 MiB" if kind == "huge" else "it isn't a regular file") in ended.stderr


LINES = {
    "no end": ('{"collected": {"cases": 1e999}}', "OverflowError"),
    "deep": ("[" * 100_000, "RecursionError"),
    "a long number": ('{"ended": ' + "9" * 10_000 + "}", "ValueError"),
    "no record": ('{"result": {"fix": 1}}', "ValueError"),
}


@pytest.mark.parametrize("name", LINES)
def test_a_hostile_line_of_a_log_is_named(name, tmp_path, unfix):
    line, wanted = LINES[name]
    run = dict.fromkeys(("target", "target_version", "target_commit", "commit", "sources", "shard"))
    first = json.dumps({"schema_version": 1, "run": {**run, "session_reverted": []}})
    (tmp_path / "l.jsonl").write_text(f"{first}\n{line}\n")
    ended = unfix("report", str(tmp_path / "l.jsonl"))
    assert (
        ended.returncode == 2 and f"l.jsonl:2: is no line of a run's log (unfix run --jsonl): {wanted}" in ended.stderr
    )
    assert len(ended.stderr.splitlines()) == 1 and len(ended.stderr) < 600


def test_a_command_to_show_a_case_again_is_made_of_any_record(catalogue):
    """A scenario is asked whether it builds that case."""
    night = json.loads((ROOT / "tests/nights/2-fix-deleted.json").read_text())
    row = next(row for row in night["results"] if row["fix"] == "27338:topk-factor" and row["regression"] == "27338")
    takes = set(draft.OPTIONS)
    for name in row["params"]:
        for value in (None, True, 0, -1, 10**400, 1e308, "x", [], {}, [[]], "[/red]"):
            made = {**row, "params": {**row["params"], name: value}}
            assert rerun.command(made, None, catalogue, takes).startswith("unfix r")
