"""Faults of disks and caches: full, read-only, half-written, somebody else's, somewhere else.

What can be made again is made again, or done without; what can't be written is one line, exit code 4, and nothing
half-made. Beside these: a damaged overlay, `test_overlay.py`; a log that was cut off, `test_runlog.py`; a killed build,
`test_eagle_kv_jit.py`; a page that can't be written, `test_run_cli.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from harness import overlay, remembered
from harness.cache import cache_dir
from harness.edits import Edit, Reversal
from harness.errors import InfraError

CASES = ("27486:draft-tokens-assert", "--device", "cpu", "-n", "0")  # six
LONG = "x = 1\n" * remembered.SMALL


def _may_mount() -> bool:
    try:
        return subprocess.run(["unshare", "-rm", "true"], capture_output=True, timeout=60).returncode == 0
    except OSError:
        return False


DISK = pytest.mark.skipif(not _may_mount(), reason="needs unshare -rm, to mount a small disk that is nobody else's")


@pytest.fixture
def on_a_disk(tmp_path, root):
    """``on_a_disk(script, *command)``: a command, after what a shell does to the small disk DISK.

    Returns how it ended, and what was on the disk then: file -> bytes.
    """

    def run(script, *command, kilobytes=256, on=()):
        disk, kept = tmp_path / "disk", tmp_path / "kept"
        for folder in (disk, kept):
            folder.mkdir()
        mount = f"mount -t tmpfs -o size={kilobytes}k,mode=0700 none {disk} && cd {root} || exit 99; {script}; "
        line = mount + f'"$@"; code=$?; umask 0; cp -r {disk}/. {kept} 2>/dev/null; exit $code'
        drop = {name for name in os.environ if name.startswith(("SGLANG_", "UNFIX_", "PYTEST_"))}
        env = {name: value for name, value in os.environ.items() if name not in drop}
        env |= {"PYTHONPATH": str(root), "UNFIX_CACHE": os.environ.get("UNFIX_CACHE", str(tmp_path / "cache"))}
        env |= {"DISK": str(disk), **{name: str(disk) for name in on}}
        command = ["unshare", "-rm", "sh", "-c", line, "sh", *(word.replace("DISK", str(disk)) for word in command)]
        ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
        assert ended.returncode != 99, ended.stderr
        left = {str(file.relative_to(kept)): file.read_bytes() for file in kept.rglob("*") if file.is_file()}
        return ended, left

    return run


FILL = "cat /dev/zero > $DISK/zeros 2>/dev/null"


@DISK
def test_a_disk_that_is_full_before_a_run_ends_it_before_any_work(on_a_disk):
    room_for_one = f"{FILL}; truncate -s -4096 $DISK/zeros"  # with none, Python takes another folder for temporary ones
    ended, left = on_a_disk(room_for_one, sys.executable, "-m", "harness", "run", *CASES, on=["TMPDIR"])
    assert (ended.returncode, ended.stdout) == (4, "")
    assert ended.stderr.count("\n") == 1 and "No space left on device" in ended.stderr
    assert set(left) == {"zeros"}


@DISK
def test_a_disk_that_fills_up_loses_what_it_cannot_hold_and_says_so(on_a_disk):
    files = ["--jsonl", "DISK/a.jsonl", "--json", "DISK/a.json"]
    ended, left = on_a_disk(":", sys.executable, "-m", "harness", "run", *CASES, *files, kilobytes=12)
    assert ended.returncode == 4, ended.stderr
    assert "could not be written: No space left on device" in ended.stderr and "Traceback" not in ended.stderr
    assert "a.json" not in left, "whole or not at all"
    assert left["a.jsonl"]
    for line in left["a.jsonl"].splitlines(keepends=True):
        assert not line.endswith(b"\n") or json.loads(line)


def test_what_pytest_can_t_write_is_one_line_and_the_matrix_is_kept(unfix, tmp_path):
    ended = unfix("run", *CASES, "--junit", "/dev/full", "--json", str(tmp_path / "a.json"))
    assert ended.returncode == 4 and "INTERNALERROR" not in ended.stderr and "Traceback" not in ended.stderr
    assert "unfix: /dev/full could not be written: No space left on device\n" in ended.stderr
    assert len(json.loads((tmp_path / "a.json").read_text())["results"]) == 6


BUILD = """
import pathlib, sys
from harness import overlay, remembered
from harness.edits import Edit, Reversal
root = pathlib.Path(sys.argv[1])
said = []
for _ in range(2):
    plan = overlay.plan([Reversal("1:a", "pkg.mod.width", (Edit("return 2", "return 1"),))], [root])
    try: said.append(overlay.build(plan) is not None)
    except Exception as error: said.append(f"{type(error).__name__}: {error}")
    if (zeros := root.parent / "disk/zeros").exists(): zeros.unlink()
print(*said, sep="\\n")
"""


@pytest.fixture
def package(tmp_path):
    (tmp_path / "root/pkg").mkdir(parents=True)
    (tmp_path / "root/pkg/__init__.py").touch()
    (tmp_path / "root/pkg/mod.py").write_text("def width():\n    return 2\n" + LONG)
    return tmp_path / "root"


def plan(package):
    return overlay.plan([Reversal("1:a", "pkg.mod.width", (Edit("return 2", "return 1"),))], [package])


@DISK
def test_a_cache_on_a_full_disk_keeps_nothing_half_made_and_is_used_once_there_is_room(on_a_disk, package):
    fill = f"mkdir $DISK/overlays $DISK/answers; {FILL}"
    ended, left = on_a_disk(fill, sys.executable, "-c", BUILD, str(package), kilobytes=64, on=["UNFIX_CACHE"])
    first, second = ended.stdout.splitlines()
    assert first.startswith("InfraError: can't build an overlay in ") and first.endswith(": No space left on device")
    assert second == "True" and not any(".making-" in name for name in left)
    assert all(json.loads(text) is not None for name, text in left.items() if name.startswith("answers/"))


@DISK
@pytest.mark.parametrize("warm", [False, True])
def test_a_cache_that_can_only_be_read_serves_what_it_has(on_a_disk, package, tmp_path, warm, monkeypatch):
    monkeypatch.setenv("UNFIX_CACHE", str(tmp_path / "warm"))
    overlay.build(plan(package))
    # links and times as they are; what there was is what there is
    fill = f"{f'cp -a {tmp_path}/warm/. $DISK' if warm else ':'}; mount -o remount,ro $DISK"
    ended, _ = on_a_disk(fill, sys.executable, "-c", BUILD, str(package), on=["UNFIX_CACHE"])
    said = ended.stdout.splitlines()
    assert len(said) == 2, ended.stderr
    assert said == ["True"] * 2 if warm else all("Read-only file system" in line for line in said)


@pytest.mark.parametrize("damage", [b"", b"[1, 2", bytes(range(256)), b"\xff" * 100])
def test_an_answer_that_is_half_written_is_worked_out_again(tmp_path, monkeypatch, damage):
    monkeypatch.setenv("UNFIX_CACHE", str(tmp_path / "cache"))
    assert remembered.remembered("q", LONG, None, lambda: [1, 2]) == [1, 2]
    [kept] = (tmp_path / "cache/answers").iterdir()
    kept.write_bytes(damage)
    assert remembered.remembered("q", LONG, None, lambda: [1, 2, 3]) == [1, 2, 3]
    assert remembered.remembered("q", LONG, None, lambda: pytest.fail("it is known")) == [1, 2, 3]
    assert len(os.listdir(tmp_path / "cache/answers")) == 1


# where the cache is a link to -> what is said of that
LINKS = {"a folder of mine": None, "nothing": "can't make the cache", "a file": "can't make the cache"}
LINKS["a folder that others may write to"] = "others may write to the cache"


@pytest.mark.parametrize("where", LINKS)
def test_a_cache_elsewhere_is_as_good_as_what_is_there(tmp_path, monkeypatch, package, where):
    there = tmp_path / "there"
    if where == "a file":
        there.touch()
    elif where != "nothing":
        there.mkdir()
        there.chmod(0o777 if "others" in where else 0o700)
    (tmp_path / "cache").symlink_to(there)
    monkeypatch.setenv("UNFIX_CACHE", str(tmp_path / "cache"))
    if said := LINKS[where]:
        with pytest.raises(InfraError, match=said):
            cache_dir()
        assert not there.is_dir() or os.listdir(there) == []
    else:
        assert overlay.build(plan(package)).is_relative_to(tmp_path / "cache")


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_a_cache_or_an_overlay_that_another_user_owns_is_refused(tmp_path, monkeypatch, package):
    monkeypatch.setenv("UNFIX_CACHE", str(tmp_path / "cache"))
    built = overlay.build(plan(package))
    for theirs, said in ((built, "belongs to another user"), (tmp_path / "cache", "belongs to user 12345")):
        os.chown(theirs, 12345, 12345)
        with pytest.raises(InfraError, match=said):
            overlay.build(plan(package))


def test_an_overlay_that_a_process_uses_is_not_swept_whatever_the_clock_says(tmp_path, monkeypatch, package):
    monkeypatch.setenv("UNFIX_CACHE", str(tmp_path / "cache"))
    used = overlay.build(plan(package))
    monkeypatch.setattr(time, "time", lambda: 9e9)  # in the year 2255
    (package / "pkg/other.py").touch()  # so that it is another overlay
    other = overlay.build(plan(package))
    assert other != used and used.exists()
