"""Plans and overlays: what is copied, what is linked, and that nothing half-made is ever seen."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness import overlay
from harness.edits import Edit, Reversal
from harness.errors import InfraError, RottedError

HOUR, MONTH = 3600, 30 * 24 * 3600
MOD = b"def width(topk, n):\r\n    return topk * n\r\n\r\n\r\ndef check(n):\r\n    assert n\r\n    return n\r\n"


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A root with a package `pkg`; the cache is in the same temporary directory."""
    monkeypatch.setenv("UNFIX_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "src"
    for file, data in {
        "pkg/__init__.py": b"",
        "pkg/data.txt": b"data",
        "pkg/near/__init__.py": b"",
        "pkg/near/mod.py": MOD,
        "pkg/near/other.py": b"from pkg.near.mod import width\n",
        "pkg/near/__pycache__/mod.cpython-39.pyc": b"stale",
        "pkg/far/__init__.py": b"import pkg.near.other\n",
        "pkg/far/deep.py": b"x = 1\n",
        "pkg/csrc/k.cuh": b"void f(int i) {\n  assert(i >= 0);\n  g(i);\n}\n",
        "beside/__init__.py": b"",
    }.items():
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


SIZE = Reversal("1:size", "pkg.near.mod.width", (Edit("topk * n", "n"),))
GUARD = Reversal("1:guard", "pkg.near.mod.check", (Edit("assert n", ""),))
STORE = Reversal("2:store", "pkg/csrc/k.cuh", (Edit("assert(i >= 0);", ""),), "pkg.near.mod.width")


def test_plan_and_diff(root):
    plan = overlay.plan([SIZE, GUARD, STORE], [root])
    edited = plan[root / "pkg/near/mod.py"]
    assert edited.fixes == ("1:size", "1:guard")
    assert edited.old == MOD
    assert edited.new == MOD.replace(b"topk * n", b"n").replace(b"    assert n\r\n", b"")
    assert [location.qualname for location in edited.locations] == ["width", "check"]
    assert overlay.diff(plan).splitlines()[:2] == ["--- a/pkg/csrc/k.cuh", "+++ b/pkg/csrc/k.cuh"]


def test_patch_takes_the_diff(root):
    plan = overlay.plan([SIZE, GUARD, STORE], [root])
    subprocess.run(["git", "apply", "-p1", "-"], input=overlay.diff(plan).encode(), cwd=root, check=True)
    for edited in plan.values():
        assert edited.original.read_bytes() == edited.new
    with pytest.raises(RottedError, match="1:size in pkg.near.mod.width: match .* isn't in"):
        overlay.plan([SIZE], [root])


def test_diff_of_a_file_without_a_last_newline(root):
    (root / "pkg/near/mod.py").write_bytes(b"a = 1\nb = 2")
    plan = overlay.plan([Reversal("1:x", "pkg.near.mod", (Edit("b = 2", "b = 3"),))], [root])
    subprocess.run(["git", "apply", "-p1", "-"], input=overlay.diff(plan).encode(), cwd=root, check=True)
    assert (root / "pkg/near/mod.py").read_bytes() == b"a = 1\nb = 3"


def test_a_diff_is_text_whatever_the_file_is(root):
    (root / "pkg/far/deep.py").write_bytes(b"# coding: latin-1\nx = '\xe9'\n")
    plan = overlay.plan([Reversal("1:x", "pkg.far.deep", (Edit("x = 'é'", "x = 1"),))], [root])
    assert overlay.diff(plan).splitlines()[-2:] == ["-x = '\ufffd'", "+x = 1"]


def test_only_edited_files_are_copied(root):
    built = overlay.build(overlay.plan([SIZE, STORE], [root]))
    assert built is not None
    entries = {
        path.relative_to(built).as_posix(): os.readlink(path) if path.is_symlink() else "copy"
        for directory, names, files in os.walk(built)
        for path in (Path(directory) / name for name in [*names, *files])
        if path.is_symlink() or path.is_file()
    }
    pkg = str(root / "pkg")
    assert entries == {
        "pkg/__init__.py": f"{pkg}/__init__.py",
        "pkg/data.txt": f"{pkg}/data.txt",
        "pkg/far": f"{pkg}/far",
        "pkg/near/__init__.py": f"{pkg}/near/__init__.py",
        "pkg/near/other.py": f"{pkg}/near/other.py",
        "pkg/near/mod.py": "copy",
        "pkg/csrc/k.cuh": "copy",
    }
    assert (built / "pkg/near").stat().st_mode & 0o777 == 0o700


def test_two_files_of_one_folder(root):
    other = Reversal("1:other", "pkg.near.other", (Edit("from pkg.near.mod import width", "width = 1"),))
    built = overlay.build(overlay.plan([SIZE, other], [root]))
    assert b"return n\r\n" in (built / "pkg/near/mod.py").read_bytes()
    assert (built / "pkg/near/other.py").read_bytes() == b"width = 1\n"


def test_a_child_runs_the_overlays_file(root):
    built = overlay.build(overlay.plan([SIZE], [root]))
    code = "import pkg.far, pkg.near.mod as m; print(m.__file__, m.width(2, 5), pkg.near.other.width(2, 5))"
    environment = {**os.environ, "PYTHONPATH": f"{built}{os.pathsep}{root}"}
    child = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert child.stdout.split() == [f"{built}/pkg/near/mod.py", "5", "5"]


def test_content_addressed(root):
    first = overlay.build(overlay.plan([SIZE, GUARD], [root]))
    assert first == overlay.build(overlay.plan([GUARD, SIZE], [root]))
    assert first != overlay.build(overlay.plan([SIZE], [root]))
    (root / "pkg/near/new.py").touch()
    assert first != overlay.build(overlay.plan([SIZE, GUARD], [root]))
    assert overlay.build(overlay.plan([], [root])) is None
    assert overlay.diff({}) == ""


def test_another_place_or_another_text_is_another_overlay():
    parts = [("/r", "ab", "c"), ("/r", "a", "bc"), ("/ra", "b", "c"), ("/r", "ab", "d"), ("/r", "ac", "c")]
    files = [SimpleNamespace(root=root, relpath=relpath, new=new.encode()) for root, relpath, new in parts]
    assert len({overlay._digest([file], {}) for file in files}) == len(parts)


def test_a_failing_edit_leaves_nothing(root, tmp_path):
    gone = Reversal("1:gone", "pkg.far.deep", (Edit("y = 1", ""),))
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with pytest.raises(RottedError, match="1:gone") as caught:
        overlay.plan([SIZE, gone], [root])
    assert (caught.value.fix, caught.value.target, caught.value.exit_code) == ("1:gone", "pkg.far.deep", 3)
    assert not (tmp_path / "cache").exists()
    assert before == {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_missing_target_names_the_fix(root):
    with pytest.raises(RottedError, match=r"1:gone in pkg.near.mod.widt: .* nearest: pkg.near.mod.width, line 1"):
        overlay.plan([Reversal("1:gone", "pkg.near.mod.widt", (Edit("x", ""),))], [root])


def test_an_edit_that_the_file_s_encoding_lacks_is_refused(root):
    (root / "pkg/far/deep.py").write_bytes(b"# coding: latin-1\nx = 1\n\n\ndef f():\n    return 2\n")
    euro = Reversal("1:euro", "pkg.far.deep", (Edit("x = 1", "x = '\u20ac'"),))
    three = Reversal("1:three", "pkg.far.deep.f", (Edit("return 2", "return 3"),))
    said = "1:euro, 1:three in pkg.far.deep: the edit doesn't fit pkg/far/deep.py's encoding"
    with pytest.raises(RottedError, match=said):
        overlay.plan([euro, three], [root])


@pytest.mark.parametrize("words", [(28, "No space left on device"), ("no number",)])
def test_a_disk_s_own_words_are_said(root, tmp_path, monkeypatch, words):
    def full(original, below):
        raise OSError(*words)

    monkeypatch.setattr(overlay.os, "symlink", full)
    with pytest.raises(InfraError) as caught:
        overlay.build(overlay.plan([SIZE], [root]))
    assert str(caught.value) == f"can't build an overlay in {tmp_path / 'cache/overlays'}: {words[-1]}"


def test_a_full_disk_leaves_nothing_half_made(root, tmp_path, monkeypatch):
    plan = overlay.plan([SIZE], [root])

    def full(original, below):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(overlay.os, "symlink", full)
    with pytest.raises(InfraError, match="No space left on device"):
        overlay.build(plan)
    assert list((tmp_path / "cache/overlays").iterdir()) == []
    monkeypatch.undo()
    monkeypatch.setenv("UNFIX_CACHE", str(tmp_path / "cache"))
    assert overlay.build(plan) is not None


DAMAGES = ["edited", "link", "relinked", "unlinked", "directory", "extra", "no cache", "top", "linked", "pipe"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_overlay_is_made_again(root, damage):
    plan = overlay.plan([SIZE], [root])
    built = overlay.build(plan)
    assert built is not None
    if damage == "edited":
        (built / "pkg/near/mod.py").write_text("")
    elif damage == "link":
        (built / "pkg/data.txt").unlink()
    elif damage in ("relinked", "unlinked"):
        (built / "pkg/data.txt").unlink()
        if damage == "relinked":
            (built / "pkg/data.txt").symlink_to(root / "pkg/__init__.py")
        else:
            (built / "pkg/data.txt").write_text("other")
    elif damage == "directory":
        (built / "pkg/near/mod.py").unlink()
    elif damage == "extra":
        (built / "pkg/near/planted.py").touch()
    elif damage == "no cache":
        (built / "pkg/near/__pycache__").touch()
    elif damage == "pipe":
        (built / "pkg/near").rename(built.parent.parent / "near")
        os.mkfifo(built / "pkg/near")
    elif damage == "top":
        (built / "json").mkdir()
        (built / "json/__init__.py").touch()
    else:  # a folder of the overlay is a link to what looks like it
        (built / "pkg/near").rename(built.parent.parent / "near")
        (built / "pkg/near").symlink_to(built.parent.parent / "near")
    assert overlay.build(plan) == built
    assert os.listdir(built) == ["pkg"]
    assert sorted(os.listdir(built / "pkg/near")) == ["__init__.py", "mod.py", "other.py"]
    assert not (built / "pkg/near").is_symlink()
    assert (built / "pkg/near/mod.py").read_bytes() == plan[root / "pkg/near/mod.py"].new
    assert (built / "pkg/data.txt").read_text() == "data"
    assert [path.name for path in built.parent.iterdir()] == [built.name]


def test_an_overlay_that_is_gone_as_it_is_found_is_made_again(root, monkeypatch):
    plan, hold = overlay.plan([SIZE], [root]), overlay._hold
    built = overlay.build(plan)

    def gone(final):
        monkeypatch.setattr(overlay, "_hold", hold)
        overlay.shutil.rmtree(final)
        return False

    monkeypatch.setattr(overlay, "_hold", gone)
    assert overlay.build(plan) == built and overlay._is_whole(built, list(plan.values()), overlay._links(plan.values()))


def test_a_damaged_overlay_that_stays_in_the_way_is_one_line(root, monkeypatch):
    plan, tries = overlay.plan([SIZE], [root]), []
    built = overlay.build(plan)
    (built / "pkg/near/mod.py").write_text("")

    def rename(path, to):
        if Path(path) != built:
            tries.append(to)
            raise OSError(39, "Directory not empty")
        raise FileNotFoundError(path)  # another process was faster, and put another such there

    monkeypatch.setattr(overlay.os, "rename", rename)
    with pytest.raises(InfraError, match="can't replace the damaged overlay .*: remove it"):
        overlay.build(plan)
    assert tries == [built] * 3
    assert [path.name for path in built.parent.iterdir()] == [built.name]


def test_another_user_s_overlay_is_refused(root, tmp_path, monkeypatch):
    plan = overlay.plan([SIZE], [root])
    built = overlay.build(plan)
    monkeypatch.setattr(overlay, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(os, "getuid", lambda: 987654)
    with pytest.raises(InfraError, match=f"the overlay {built} belongs to another user: remove it"):
        overlay.build(plan)


def test_what_python_compiles_in_an_overlay_is_no_damage(root, monkeypatch):
    plan = overlay.plan([SIZE], [root])
    built = overlay.build(plan)
    before = built.stat().st_ino
    (built / "pkg/near/__pycache__").mkdir()
    (built / "pkg/near/__pycache__/mod.cpython-311.pyc").touch()
    monkeypatch.setattr(overlay.tempfile, "mkdtemp", None)  # nothing is made
    assert overlay.build(plan) == built and built.stat().st_ino == before


@pytest.mark.parametrize("kind", ["dangling", "to a folder", "a file"])
def test_what_lies_where_an_overlay_belongs_is_replaced(root, tmp_path, kind):
    plan = overlay.plan([SIZE], [root])
    built = overlay.build(plan)
    kept = tmp_path / "kept"
    built.rename(kept)
    if kind == "a file":
        built.touch()
    else:
        built.symlink_to(kept if kind == "to a folder" else tmp_path / "gone")
    assert overlay.build(plan) == built
    assert built.is_dir() and not built.is_symlink()
    assert (kept / "pkg/near/mod.py").exists()
    assert [path.name for path in built.parent.iterdir()] == [built.name]


def test_overlays_that_nobody_uses_are_swept(root):
    plans = [overlay.plan([reversal], [root]) for reversal in (SIZE, GUARD, STORE)]
    used, unused = overlay.build(plans[0]), overlay.build(plans[1])
    while overlay._held:  # as if by a process that ended
        os.close(overlay._held.popitem()[1])
    for path in (used, unused):
        os.utime(path, (0, 0))
    assert overlay.build(plans[0]) == used and used.stat().st_mtime > MONTH
    other = used.parent / "not-an-overlay"
    other.mkdir()
    os.utime(other, (0, 0))
    overlay.build(plans[2])
    assert used.exists() and other.exists() and not unused.exists()


@pytest.mark.parametrize(("name", "age"), [(".making-x", HOUR), (".damaged-x", HOUR), ("0" * 64, MONTH)])
def test_what_is_old_enough_is_swept_and_no_sooner(root, tmp_path, monkeypatch, name, age):
    overlay.build(overlay.plan([SIZE], [root]))
    now = 1_800_000_000
    monkeypatch.setattr(overlay.time, "time", lambda: float(now))
    path = tmp_path / "cache/overlays" / name
    for seconds, kept in ((age, True), (age + 1, False)):
        path.mkdir(exist_ok=True)
        os.utime(path, (now - seconds, now - seconds))
        overlay._sweep(path.parent)
        assert path.exists() == kept


def test_what_is_no_overlay_is_passed_over(tmp_path, monkeypatch):
    names, removed = ["not-an-overlay", ".making-a", "0" * 65, "0" * 64], []
    for name in names:
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, 0))
    listed = contextlib.nullcontext([SimpleNamespace(name=name) for name in names])
    monkeypatch.setattr(overlay.os, "scandir", lambda path: listed)
    monkeypatch.setattr(overlay, "_remove", removed.append)
    overlay._sweep(tmp_path)
    assert removed == [tmp_path / ".making-a", tmp_path / ("0" * 64)]


def test_one_that_can_t_be_looked_at_stops_no_sweep(root, tmp_path, monkeypatch):
    overlay.build(overlay.plan([SIZE], [root]))
    overlays = tmp_path / "cache/overlays"
    for name in (".making-a", ".making-b"):
        (overlays / name).mkdir()
        os.utime(overlays / name, (0, 0))
    looked, lstat = [], Path.lstat

    def gone(path):
        looked.append(path.name)
        if len(looked) == 1:
            raise FileNotFoundError(path)
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", gone)
    overlay._sweep(overlays)
    monkeypatch.undo()
    assert [path.name for path in overlays.glob(".making-*")] == looked[:1]


def rmtree_that_fails(path, ignore_errors=False):
    """As of a folder that can't be removed."""
    if not ignore_errors:
        raise PermissionError(13, "Permission denied")


def test_without_locks_age_is_all_that_counts(root, monkeypatch):
    def flock(handle, kind):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(overlay.fcntl, "flock", flock)
    built = overlay.build(overlay.plan([SIZE], [root]))
    handles = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(overlay.shutil, "rmtree", rmtree_that_fails)
        overlay._remove(built)
    assert built.is_dir() and len(os.listdir("/proc/self/fd")) == handles
    overlay._remove(built)
    assert not built.exists()


@pytest.mark.parametrize("kind", ["a file", "a link"])
def test_what_is_no_folder_is_not_removed(tmp_path, kind):
    path = tmp_path / "x"
    if kind == "a file":
        path.touch()
    else:
        path.symlink_to(tmp_path)
    with pytest.raises(OSError, match="directory|symbolic links"):
        overlay._remove(path)
    assert os.path.lexists(path)


def test_folders_on_the_way_have_names_that_a_sweep_finds(root, tmp_path, monkeypatch):
    made, mkdtemp = [], overlay.tempfile.mkdtemp

    def noted(**options):
        made.append(Path(mkdtemp(**options)))
        return str(made[-1])

    monkeypatch.setattr(overlay.tempfile, "mkdtemp", noted)
    monkeypatch.setattr(overlay.shutil, "rmtree", rmtree_that_fails)
    plan = overlay.plan([SIZE], [root])
    built = overlay.build(plan)
    (built / "pkg/near/mod.py").write_text("")
    assert overlay.build(plan) == built
    assert built.parent.stat().st_mode & 0o777 == 0o700
    assert {path.name.partition("-")[0] for path in made} == {".making", ".damaged"}
    assert all(path.parent == built.parent for path in made)


OTHER = """
import fcntl, os, sys
handle = os.open(sys.argv[1], os.O_RDONLY)
try:
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("held")
"""


def test_what_this_process_has_built_is_held(root):
    plan = overlay.plan([SIZE], [root])
    built = overlay.build(plan)
    handles = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert overlay.build(plan) == built
    assert len(os.listdir("/proc/self/fd")) == handles

    def other():
        command = [sys.executable, "-c", OTHER, str(built)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    handles = len(os.listdir("/proc/self/fd"))
    overlay._remove(built)
    assert other() == "held" and built.is_dir()
    os.close(overlay._held.pop(built))
    assert other() == ""
    overlay._remove(built)
    assert not built.exists() and len(os.listdir("/proc/self/fd")) == handles - 1
    assert overlay._hold(built) is False  # somebody was faster: it is built again
    assert overlay.build(plan) == built and other() == "held"


def _build(root, start, results):
    start.wait()
    try:
        results.put(str(overlay.build(overlay.plan([SIZE, GUARD], [root]))))
    except Exception as error:
        results.put(repr(error))


def test_concurrent_builders_share_one(root):
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(4), context.Queue()
    builders = [context.Process(target=_build, args=(root, start, results)) for _ in range(4)]
    for builder in builders:
        builder.start()
    built = {results.get(timeout=20) for _ in builders}
    for builder in builders:
        builder.join()
    assert len(built) == 1
    [path] = built
    assert [entry.name for entry in Path(path).parent.iterdir()] == [Path(path).name]


def test_the_cache_is_private(root, tmp_path, monkeypatch):
    overlay.build(overlay.plan([SIZE], [root]))
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(InfraError, match="others may write"):
        overlay.build(overlay.plan([SIZE], [root]))
    monkeypatch.delenv("UNFIX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert overlay.cache_dir() == tmp_path / "xdg/unfix"
    monkeypatch.setattr(os, "getuid", lambda: 987654)
    with pytest.raises(InfraError, match="belongs to user"):
        overlay.cache_dir()


def test_what_killed_builders_left_is_swept(root, tmp_path):
    left = tmp_path / "cache/overlays/.making-old"
    left.mkdir(parents=True)
    (tmp_path / "cache").chmod(0o700)
    os.utime(left, (0, 0))
    built = overlay.build(overlay.plan([SIZE], [root]))
    assert built is not None and not left.exists()
