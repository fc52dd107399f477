"""The command line: exit codes, one line for every error, JSON on stdout and nothing else there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

SMALL = ("27338:topk-factor", "--topk", "2", "--num-steps", "2", "--max-context-len", "8", "--seq-lens", "3")
CPU = ("--device", "cpu")


def one_line(ended, code, *parts):
    """It ended with ``code`` after one line on stderr, with nothing on stdout and no traceback."""
    said = [line for line in ended.stderr.splitlines() if line.strip()]
    assert ended.returncode == code, ended.stderr + ended.stdout
    assert len(said) == 1 and said[0].startswith("unfix: "), ended.stderr
    assert all(part in said[0] for part in parts), said[0]
    assert ended.stdout == ""


def test_list(unfix, catalogue):
    document = json.loads(unfix("list", "--json", "-").stdout)
    assert document["schema_version"] == 1
    assert [row["fix"] for row in document["fixes"]] == list(catalogue.ids)
    [size] = [row for row in document["fixes"] if row["fix"] == "27338:topk-factor"]
    assert size["legs"][1]["out"] == ["27338:topk-factor", "27338:capacity-assert"]
    shown = unfix("list")
    assert shown.returncode == 0 and all(fix in shown.stdout for fix in catalogue.ids)


def test_diff(unfix):
    ended = unfix("diff", "27338:topk-factor")
    assert (ended.returncode, ended.stderr) == (0, "")
    changed = [line for line in ended.stdout.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert [line[0] for line in changed] == ["-", "+"]
    assert "max_bs, self.topk" in changed[0] and "max_bs, 1" in changed[1]
    assert unfix("diff", "0").stdout == ""
    assert unfix("diff", "all").stdout.count("\n+++ ") == 8


def test_repro(unfix, tmp_path):
    out = tmp_path / "new" / "r.json"
    ended = unfix("repro", *SMALL, *CPU, "--json", str(out))
    assert ended.returncode == 0, ended.stderr
    assert "2 stray elements after the buffer, predicted 2" in ended.stdout and "  proved" in ended.stdout
    document = json.loads(out.read_text())
    [row] = document["results"]
    assert (row["verdict"], [leg["outcome"] for leg in row["legs"]]) == ("proved", ["clean", "guarded", "overflow"])
    assert row["legs"][2]["overflow"]["predicted_elements"] == row["legs"][2]["overflow"]["observed_elements"] == 2
    assert document["environment"]["target"] == "eagle_kv" and document["environment"]["device"] == "cpu"


def test_repro_of_an_input_that_cannot_tell(unfix):
    ended = unfix("repro", "27338", *CPU, "--topk", "1", "--seq-lens", "3", "--json", "-")
    assert ended.returncode == 0 and "this shows 27338:topk-factor" in ended.stderr
    [row] = json.loads(ended.stdout)["results"]  # and nothing but JSON on stdout
    assert (row["tells"], row["verdict"]) == (False, "proved") and "cannot tell" in row["reason"]


def test_run(unfix, tmp_path):
    junit = tmp_path / "j.xml"
    ended = unfix("run", "27486:draft-tokens-assert", *CPU, "-n", "0", "--json", "-", "--junit", str(junit))
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    assert document["verdicts"] == {"proved": 6} and document["session_reverted"] == []
    assert document["fixes"] == {
        "27486:draft-tokens-assert": {"proved": 4, "cannot_tell": 2, "skipped": 0, "findings": 0}
    }
    assert junit.read_text().count("<testcase ") == 6


# arguments -> parts of the one line; all end with 2
BAD_USAGE = {
    "an unknown word": (("diff", "nonsense"), ["SEL: unknown fix 'nonsense'", "known: ", "27338:topk-factor"]),
    "an unknown PR": (("diff", "27339"), ["'27339'", "did you mean 27338"]),
    "half a name": (("repro", "27338:topk"), ["'27338:topk'", "did you mean 27338:topk-factor?"]),
    "a list with a hole": (("diff", "27338,,27460"), ["nothing between two commas"]),
    "a zero in a list": (("run", "0", "27338"), ["'0' means no fix"]),
    "nothing to repro": (("repro", "0"), ["selects no fix"]),
    "nothing to run": (("run", "0"), ["selects no fix"]),
    "no SEL": (("diff",), ["SEL"]),
    "no such command": (("unrun",), ["unrun"]),
    "no such option": (("list", "--jsn", "-"), ["--jsn"]),
    "no integer": (("repro", "27338", "--topk", "two"), ["--topk", "integer"]),
    "no integers": (("repro", SMALL[0], "--seq-lens", "3,x"), ["--seq-lens '3,x'", "5,3,8"]),
    "an option of another scenario": (("repro", SMALL[0], "--slots", "1"), ["--slots does not fit", "--topk"]),
    "a shape that makes no batch": (("repro", SMALL[0], "--topk", "0"), ["topk 0: must be at least 1"]),
    "an unknown device": (("repro", SMALL[0], "--device", "tpu"), ["'tpu'", "auto, cpu or cuda"]),
    "an unknown target": (("run", "--target", "other"), ["--target 'other'"]),
    "an unknown code base": (("diff", "27338", "--target", "other"), ["other"]),
    "no number of jobs": (("run", "27338", "-n", "many", *CPU), ["--jobs 'many'"]),
}


@pytest.mark.parametrize("name", BAD_USAGE)
def test_bad_usage_is_one_line(unfix, name):
    arguments, parts = BAD_USAGE[name]
    one_line(unfix(*arguments), 2, *parts)


# what is done to a toggle file -> parts of the one line
BAD_TOGGLES = {
    "a field is missing": ("    kind: size\n", "", ["27338.yaml:8: fixes.topk-factor.kind: field required"]),
    "an unknown key": ("    kind: size\n", "    kind: size\n    knid: x\n", ["27338.yaml:10", "did you mean kind?"]),
    "no YAML": ("pr: 27338", "pr: [27338", ["27338.yaml:"]),
    "another PR's number": ("pr: 27338", "pr: 27339", ["27338.yaml:2", "27339"]),
    "an unknown leg": ("out: [topk-factor, capacity-assert]", "out: [topk-factor, nope]", ["no fix 27338:nope"]),
}


@pytest.mark.parametrize("name", BAD_TOGGLES)
def test_a_bad_toggle_file_is_one_line_with_its_place(unfix, checkout, name):
    old, new, parts = BAD_TOGGLES[name]
    file = checkout / "toggles/27338.yaml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    one_line(unfix("list", cwd=checkout), 2, *parts)


CALL = "        self.check_row_fits(batch, kv_indices)\n"
# what is done to FlashInfer's backend -> parts of the one line
ROTTED = {
    "twice": (CALL, CALL * 2, ["appears 2 times", "lines 37, 38"]),
    "gone": (CALL, "", ["27338:capacity-assert", "isn't in eagle_kv/backends/flashinfer.py"]),
    "renamed": ("def fill(", "def fill_row(", ["27338:capacity-assert", "nearest"]),
}


@pytest.mark.parametrize("name", ROTTED)
def test_a_rotted_reversal_ends_with_3(unfix, checkout, name):
    old, new, parts = ROTTED[name]
    file = checkout / "kernels/eagle_kv/backends/flashinfer.py"
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))
    if "lines" in parts[-1]:
        first = text[: text.index(old)].count("\n") + 1
        parts = [parts[0], f"lines {first}, {first + 1}"]
    one_line(unfix("diff", "27338:capacity-assert", cwd=checkout), 3, *parts)


def test_a_rotted_reversal_is_a_verdict_of_repro(unfix, checkout):
    file = checkout / "kernels/eagle_kv/backends/flashinfer.py"
    file.write_text(file.read_text().replace(CALL, CALL * 2))
    ended = unfix("repro", "27338:topk-factor", *CPU, cwd=checkout)
    assert ended.returncode == 3 and "Traceback" not in ended.stderr
    assert "rotted: 27338:capacity-assert" in ended.stdout and "appears 2 times" in ended.stdout


def test_a_finding_ends_with_1(unfix, checkout):
    """The guard lets one element too many through."""
    file = checkout / "kernels/eagle_kv/sizing.py"
    text = file.read_text()
    assert text.count("if used_len > row_width:") == 1
    file.write_text(text.replace("if used_len > row_width:", "if used_len > row_width + 2:"))
    ended = unfix(
        *("repro", "27338:capacity-assert", *CPU, "--topk", "2", "--num-steps", "3", "--max-context-len", "8"),
        *("--seq-lens", "6"),
        cwd=checkout,
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "regressed: with every fix in: must be guarded, is overflow (2 elements after a buffer)" in ended.stdout


def test_without_a_compiler_a_store_case_is_infra(unfix, tmp_path):
    """Neither an error of the fix nor a traceback: this machine can't build the kernel."""
    bare = tmp_path / "bin"
    bare.mkdir()
    ended = unfix("repro", "27486:slot-assert", *CPU, PATH=str(bare), CXX="", EAGLE_KV_CACHE=str(tmp_path / "empty"))
    assert ended.returncode == 4 and "Traceback" not in ended.stdout + ended.stderr, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1].startswith("  infra: ") and "needs a C++ compiler" in ended.stdout


@pytest.mark.parametrize("command", [("repro", "27338", *CPU), ("run", "27338", *CPU)])
def test_without_triton_it_is_one_line(unfix, tmp_path, command):
    (tmp_path / "triton.py").write_text("raise ModuleNotFoundError(\"No module named 'triton'\", name='triton')\n")
    ended = unfix(*command, PYTHONPATH=str(tmp_path))
    said = ended.stdout + ended.stderr
    assert ended.returncode == 4 and "Traceback" not in said, said
    assert "No module named 'triton'" in said and sys.executable in said


@pytest.mark.parametrize("command", [("list",), ("repro", *SMALL, *CPU)])
def test_a_file_that_cannot_be_written_is_infra(unfix, tmp_path, command):
    (tmp_path / "file").write_text("")
    ended = unfix(*command, "--json", str(tmp_path / "file" / "m.json"))
    assert ended.returncode == 4
    said = [line for line in ended.stderr.splitlines() if line.strip()]
    assert len(said) == 1 and "could not be written" in said[0]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_behind_stdout_is_infra(root):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "harness.cli", "list", "--json", "-"]
        ended = subprocess.run(command, cwd=root, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 4 and "Traceback" not in ended.stderr, ended.stderr
    assert "No space left" in ended.stderr


def test_outside_of_a_checkout_it_is_one_line(python, checkout, tmp_path):
    """The package alone, as a wheel would have it: no toggles anywhere above."""
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.move(checkout / "harness", alone / "harness")
    ended = python("-m", "harness.cli", "list", cwd=alone)
    one_line(ended, 2, "no toggles/ and regressions/")


def test_help_names_every_command_and_an_example(unfix):
    text = unfix("--help").stdout
    for command in ("list", "run", "repro", "diff"):
        assert f" {command} " in text
        ended = unfix(command, "--help")
        assert ended.returncode == 0 and f"unfix {command}" in ended.stdout and "Example" in ended.stdout


@pytest.mark.parametrize("arguments", [("list",), ("list", "--json", "-"), ("diff", "all")])
def test_a_reader_that_goes_away_is_no_error(root, arguments):
    command = [sys.executable, "-m", "harness.cli", *arguments]
    listing = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    listing.stdout.close()
    assert listing.wait(timeout=60) == 0
    assert listing.stderr.read() == ""
    listing.stderr.close()
