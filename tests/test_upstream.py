"""Releases of SGLang: fetched by the real pip out of a folder of small wheels, unpacked, and refused when broken."""

from __future__ import annotations

import os
import stat
import sys
import zipfile
from pathlib import Path

import pytest

from harness import upstream
from harness.errors import InfraError, UsageError

INIT = "sglang/__init__.py"


def make_wheel(folder: Path, version: str, files: dict[str, str] | None = None) -> Path:
    """A wheel of `sglang` as small as pip takes it."""
    info = f"sglang-{version}.dist-info"
    content = {
        **(files if files is not None else {INIT: f"version = {version!r}\n"}),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    path = folder / f"sglang-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in content.items():
            archive.writestr(name, text)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("UNFIX_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache/upstream/wheels").mkdir(parents=True, mode=0o700)
    (tmp_path / "cache").chmod(0o700)
    return tmp_path / "cache/upstream"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip looks for wheels in, and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_a_release_is_fetched_once_and_only_its_sources_are_unpacked(index, cache, monkeypatch):
    names = [INIT, "sglang/k.cuh", "sglang/native.so", "sglang/data.json", "sglang/README.md"]
    make_wheel(index, "0.5.13.post1", {name: f"# {name}\n" for name in names})
    source = upstream.release("v0.5.13.post1")
    assert source.name == "0.5.13.post1" and source.root.parent == cache / "trees"
    found = {path.relative_to(source.root).as_posix() for path in source.root.rglob("*") if path.is_file()}
    assert found == {".files", INIT, "sglang/k.cuh"}
    assert (source.root / INIT).read_text() == f"# {INIT}\n"
    monkeypatch.setattr(sys, "executable", "/no/python")  # from here on, pip can't be asked
    assert upstream.release("0.5.13.post1") == source
    assert upstream.cached() == ["0.5.13.post1"]
    assert sorted(os.listdir(cache / "trees")) == [source.root.name]
    (source.root / "sglang/__pycache__").mkdir()  # as an import from there leaves it
    (source.root / "sglang/__pycache__/__init__.pyc").touch()
    assert upstream.release("0.5.13.post1") == source and (source.root / "sglang/__pycache__").exists()
    (source.root / "sglang/k.cuh").unlink()
    assert upstream.release("0.5.13.post1") == source and (source.root / "sglang/k.cuh").is_file()


def test_a_wheel_that_changes_gets_a_tree_of_its_own(cache):
    first = upstream.unpack(make_wheel(cache / "wheels", "1.0"))
    second = upstream.unpack(make_wheel(cache / "wheels", "1.0", {INIT: "changed = True\n"}))
    assert first != second and (second / INIT).read_text() == "changed = True\n"


def test_the_order_is_by_version(cache):
    for version in ("0.5.9", "0.5.10", "0.5.10.post1", "0.10.0"):
        make_wheel(cache / "wheels", version)
    assert upstream.cached() == ["0.5.9", "0.5.10", "0.5.10.post1", "0.10.0"]


def test_unknown_releases(index, cache):
    for version in ("0.5.12", "0.5.13"):
        make_wheel(index, version)
    with pytest.raises(UsageError, match=r"^no release 0.5.19 of sglang \(nearest: 0.5.13, 0.5.12\)$"):
        upstream.release("0.5.19")
    for text in ("latest", "0.5.13 --pre", "-r/etc/passwd", "../0.5.13", ""):
        with pytest.raises(UsageError, match="is no release of SGLang: must be a version such as"):
            upstream.release(text)
    assert os.listdir(cache / "wheels") == []


def test_no_network_and_no_index(index, monkeypatch):
    with pytest.raises(
        InfraError, match=r"^can't fetch sglang 0.5.13: pip's index has no sglang, or can't be reached$"
    ):
        upstream.release("0.5.13")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nothing listens there
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(InfraError, match=r"pip reaches no package index; is the network up\?$"):
        upstream.release("0.5.13")


def test_a_pip_that_fails_is_quoted_in_one_line(index):
    (index / "sglang-0.5.13-py3-none-any.whl").write_bytes(b"no zip at all")
    with pytest.raises(InfraError, match=r"^can't fetch sglang 0.5.13: pip says: [^\n]*$"):
        upstream.release("0.5.13")


@pytest.mark.parametrize(
    "name", ["../evil.py", "/evil.py", "sglang/../../evil.py", "sglang\\..\\evil.py", "C:/evil.py"]
)
def test_entries_that_leave_the_directory(cache, tmp_path, name):
    path = make_wheel(cache / "wheels", "1.0", {INIT: "", "sglang/placeholder.py": "x = 1\n"})
    data = path.read_bytes()
    with zipfile.ZipFile(path, "a") as archive:
        entry = zipfile.ZipInfo("x" * len(name))
        archive.writestr(entry, "bad = True\n")
    path.write_bytes(path.read_bytes().replace(b"x" * len(name), name.encode()))
    assert path.read_bytes() != data
    with pytest.raises(InfraError, match=r"is a broken wheel \(its entry .* leaves the directory\): remove it"):
        upstream.unpack(path)
    assert os.listdir(cache / "trees") == [] and not list(tmp_path.rglob("evil.py"))


def test_links_in_a_wheel(cache):
    path = make_wheel(cache / "wheels", "1.0")
    with zipfile.ZipFile(path, "a") as archive:
        entry = zipfile.ZipInfo("sglang/link.py")
        entry.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(entry, "/etc/passwd")
    with pytest.raises(InfraError, match=r"its entry 'sglang/link.py' is a link"):
        upstream.unpack(path)


def test_broken_wheels(cache, monkeypatch):
    path = make_wheel(cache / "wheels", "1.0", {INIT: "x = 1\n" * 100})
    whole = path.read_bytes()
    damaged = whole.replace(b"x = 1\nx", b"x = 2\nx", 1)
    assert damaged != whole
    for data in (b"", whole[: len(whole) // 2], damaged):
        path.write_bytes(data)
        with pytest.raises(InfraError, match=r"sglang-1.0-py3-none-any.whl is a broken wheel \(.*\): remove it, and"):
            upstream.release("1.0")
        assert os.listdir(cache / "trees") == []
    with pytest.raises(InfraError, match=r"has no sglang/__init__.py: it is no wheel of SGLang"):
        upstream.unpack(make_wheel(cache / "wheels", "1.1", {"other/__init__.py": ""}))
    monkeypatch.setattr(upstream, "_MAX_BYTES", 99)
    with pytest.raises(InfraError, match="of sources"):
        upstream.unpack(make_wheel(cache / "wheels", "1.2", {INIT: "x" * 100}))


@pytest.mark.parametrize("below", ["python/sglang", "sglang"])
def test_checkouts(tmp_path, below):
    (tmp_path / "repo" / below).mkdir(parents=True)
    with pytest.raises(UsageError, match=r"no python/sglang/__init__.py in it: name a checkout of SGLang$"):
        upstream.checkout(tmp_path / "repo")
    (tmp_path / "repo" / below / "__init__.py").touch()
    source = upstream.checkout(tmp_path / "repo")
    assert source.root == (tmp_path / "repo" / below).parent and source.name == str(tmp_path / "repo")


def test_what_is_installed(tmp_path, monkeypatch):
    package = tmp_path / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    info = tmp_path / "site" / "sglang-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert upstream.installed() == upstream.Source("installed 9.9", tmp_path / "site")
