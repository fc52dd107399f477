"""`unfix repro --script`: the file that it writes runs anywhere, with nothing of this project importable."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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
            "guarded": got.startswith(("AssertionError", "died")),
            "overflow": "stray" in got,
        }
        assert shown[want], got
    assert last in seen[-1]
    assert ("ssertion" in ran.stdout) == ("guarded" in expected)
    assert os.listdir(empty) == []


def test_of_a_case_that_did_not_run_no_script_is_written(unfix, tmp_path, checkout):
    source = checkout / "kernels/eagle_kv/backends/flashinfer.py"
    source.write_text(source.read_text().replace("self.check_row_fits(batch, kv_indices)", "pass"))
    script = tmp_path / "repro.py"
    made = unfix("repro", "27338:topk-factor", "--device", "cpu", "--script", str(script), cwd=checkout)
    assert made.returncode == 3
    assert "Traceback" not in made.stderr and "27338:capacity-assert" in made.stdout
    assert not script.exists()
