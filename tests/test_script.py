"""`unfix repro --script`: the file that it writes runs anywhere, with nothing of this project importable."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.errors import UsageError
from harness.script import write

# options -> what each leg is expected to do, a part of what the last one is seen to do
SCRIPTS = {
    "27338:topk-factor": (["--seq-lens", "3"], ["clean", "guarded", "overflow"], "2 stray elements after"),
    "27486:slot-assert": (["--slots", "-1"], ["guarded", "overflow"], "64 stray elements before"),
}


@pytest.mark.parametrize("fix", SCRIPTS)
def test_a_script_shows_what_repro_showed(fix, unfix, tmp_path):
    options, expected, last = SCRIPTS[fix]
    script, empty = tmp_path / "out" / "repro.py", tmp_path / "empty"
    empty.mkdir()
    made = unfix("repro", fix, *options, "--device", "cpu", "--script", str(script))
    assert made.returncode == 0, made.stderr
    assert f"wrote {script}" in made.stderr
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "UNFIX_", "SGLANG_"))}
    ran = subprocess.run(
        [sys.executable, "-I", str(script)],
        cwd=empty,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    lines = [line.strip() for line in ran.stdout.splitlines()]
    seen = [line.removeprefix("seen:").strip() for line in lines if line.startswith("seen:")]
    assert [line.removeprefix("expected:").strip() for line in lines if line.startswith("expected:")] == expected
    assert len(seen) == len(expected)
    for want, got in zip(expected, seen, strict=True):
        # a guard in C++ ends the leg: what it said is on the lines below
        shown = {
            "clean": got == "clean",
            "guarded": got.startswith(("guarded: AssertionError", "guarded: killed by SIGABRT")),
            "overflow": got.startswith("overflow: ") and "stray" in got,
        }
        assert shown[want], got
    assert last in seen[-1]
    assert ("ssertion" in ran.stdout) == ("guarded" in expected)
    assert os.listdir(empty) == []


@pytest.fixture(scope="module")
def script(unfix, tmp_path_factory):
    """A script's text, of a case whose legs are clean, guarded and overflow."""
    path = tmp_path_factory.mktemp("script") / "repro.py"
    made = unfix("repro", "27338:topk-factor", "--seq-lens", "3", "--device", "cpu", "--script", str(path))
    assert made.returncode == 0, made.stderr
    return path.read_text(encoding="utf-8")


def test_a_leg_that_does_something_else_is_told_by_the_exit_code(script, tmp_path):
    changed = tmp_path / "repro.py"
    assert script.count("'guarded', {") == 1
    changed.write_text(script.replace("'guarded', {", "'crashed', {"), encoding="utf-8")
    ran = subprocess.run([sys.executable, "-I", str(changed)], capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 1
    assert ran.stderr == "1 of 3 legs did not do what was expected of them\n"


# what a leg left -> its outcome
SEEN = {
    "nothing": ({}, "clean"),
    "a stray write and an error after it": ({"hits": [1], "raised": ("RuntimeError", "")}, "overflow"),
    "a guard": ({"raised": ("AssertionError", "too small")}, "guarded"),
    "a guard in a kernel": ({"raised": ("AcceleratorError", "CUDA error: device-side assert triggered")}, "guarded"),
    "a device error": ({"raised": ("AcceleratorError", "CUDA error: an illegal memory access")}, "crashed"),
    "an error": ({"raised": ("SystemExit", "3")}, "error"),
    "other values": ({"wrong": "x[0]: 1, reference 2"}, "wrong"),
    "an abort by an assertion": ((-6, "Assertion `x' failed."), "guarded"),
    "another abort": ((-6, "free(): invalid pointer"), "crashed"),
    "a segmentation fault": ((-11, ""), "crashed"),
    "an exit": ((70, ""), "error"),
}


@pytest.mark.parametrize("name", SEEN)
def test_a_script_s_own_words_for_an_outcome(name, script):
    left, expected = SEEN[name]
    space: dict[str, Any] = {"__name__": "script"}
    exec(compile(script, "repro.py", "exec"), space)
    if isinstance(left, tuple):
        assert space["outcome"](None, *left)[0] == expected
        return
    hit = {"elements": 2, "side": "after", "allocation": {"label": "x"}}
    kind, message = left.get("raised", (None, None))
    report = {
        "raised": {"type": kind, "message": message} if kind else None,
        "wrong": left.get("wrong"),
        "hits": [hit for _ in left.get("hits", [])],
    }
    assert space["outcome"](report, 0, "")[0] == expected


def test_a_leg_of_a_script_that_hangs_is_ended_with_what_it_started(script, tmp_path):
    space: dict[str, Any] = {"__name__": "script"}
    exec(compile(script, "repro.py", "exec"), space)
    note = tmp_path / "pid"
    hangs = f"import os, time\nopen({str(note)!r}, 'w').write(str(os.getpid()))\ntime.sleep(300)\n"
    space["TIMEOUT"] = 3
    word, why = space["leg_of"]("0", {"harness/leg.py": hangs}, str(tmp_path))
    assert (word, why) == ("hung", "did not end within 3 s")
    assert not os.path.exists(f"/proc/{note.read_text()}")


def test_of_sglang_s_own_classes_no_script_is_written(tmp_path):
    prover = cast(Any, SimpleNamespace(target="sglang"))
    with pytest.raises(UsageError, match="would embed SGLang; use unfix exec") as caught:
        write(tmp_path / "repro.py", prover, cast(Any, None))
    assert "\n" not in str(caught.value) and os.listdir(tmp_path) == []


def test_of_a_case_that_did_not_run_no_script_is_written(unfix, tmp_path, checkout):
    source = checkout / "kernels/eagle_kv/backends/flashinfer.py"
    source.write_text(source.read_text().replace("self.check_row_fits(batch, kv_indices)", "pass"))
    script = tmp_path / "repro.py"
    made = unfix("repro", "27338:topk-factor", "--device", "cpu", "--script", str(script), cwd=checkout)
    assert made.returncode == 3
    assert "Traceback" not in made.stderr and "27338:capacity-assert" in made.stdout
    assert not script.exists()
