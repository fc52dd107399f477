"""No path of a target, an edit or a wheel leaves its package: nothing outside is read, written or imported."""

from __future__ import annotations

import ast
import io
import random
import stat
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import interchange, overlay, scaffold, script, upstream, yamlfile
from harness.edits import Edit, Reversal
from harness.errors import InfraError, MissingPackageError, RottedError, UnfixError, UsageError
from harness.targets import locate


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An import root with a package in it, beside what is nobody's business."""
    (tmp_path / "root/pkg/sub").mkdir(parents=True)
    (tmp_path / "root/pkg/__init__.py").touch()
    (tmp_path / "root/pkg/mod.py").write_text("def f():\n    return 1\n")
    (tmp_path / "secret.py").write_text("def f():\n    return 1\n")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/mod.py").write_text("def f():\n    return 1\n")
    (tmp_path / "root/pkg/link.py").symlink_to("../../secret.py")
    (tmp_path / "root/pkg/folder").symlink_to("../../elsewhere")
    (tmp_path / "root/pkg/sub/up").symlink_to("../..")
    (tmp_path / "root/single.py").symlink_to("../secret.py")
    return tmp_path / "root"


TARGETS = {
    "pkg/../../secret.py": (UsageError, "without '..'"),
    "../secret.py": (UsageError, "without '..'"),
    "/etc/secret.py": (UsageError, "must be a relative path"),
    "pkg//mod.py": (UsageError, "must be a relative path"),
    "pkg/./mod.py": (UsageError, "must be a relative path"),
    "pkg\\..\\secret.py": (UsageError, "must be a relative path"),
    "pkg/mod.py\0.py": (UsageError, "must be a relative path"),
    "pkg\0.mod": (UsageError, "must be a dotted path"),
    "pkg...secret": (UsageError, "must be a dotted path"),
    "pkg.mod.__globals__.os.system": (RottedError, "has no"),
    "pkg.mod.f.__globals__": (RottedError, "has no"),
    "pkg.os.system": (RottedError, "pkg has no os"),
    "pkg.link.f": (RottedError, "is a link that leaves"),
    "pkg/link.py": (RottedError, "is a link that leaves"),
    "pkg.folder.mod.f": (RottedError, "is a link that leaves"),
    "pkg/folder/mod.py": (RottedError, "is a link that leaves"),
    "pkg/sub/up/single.py": (RottedError, "is a link that leaves"),
    "single.f": (RottedError, "is a link that leaves"),
    "PKG/mod.py": (MissingPackageError, "no sources of package 'PKG'"),
    "pkg/MOD.py": (RottedError, "no such file"),
}


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_stays_in_its_package(target, root):
    kind, words = TARGETS[target]
    with pytest.raises(kind, match=words) as caught:
        overlay.plan([Reversal("1:x", target, (Edit("return 1", replacement="return 2"),))], [root])
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


@pytest.mark.parametrize("target", ["pkg.mod.f", "pkg/mod.py"])
def test_one_that_does_is_edited_in_the_overlay_alone(target, root, tmp_path, monkeypatch):
    monkeypatch.setenv("UNFIX_CACHE", str(tmp_path / "cache"))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.py")}
    built = overlay.build(overlay.plan([Reversal("1:x", target, (Edit("return 1", replacement="return 2"),))], [root]))
    assert built and built.is_relative_to(tmp_path / "cache")
    assert (built / "pkg/mod.py").read_text() == "def f():\n    return 2\n"
    assert {path: path.read_bytes() for path in before} == before
    assert [path for path in built.rglob("*") if path.is_file() and not path.is_symlink()] == [built / "pkg/mod.py"]
    folders = [path for path in (built.parent.parent, built.parent, built)]
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [0o700] * 3


def test_a_name_with_a_dot_imports_nothing(root, monkeypatch):
    """To look for `a.b`, Python imports a."""
    (root / "loud.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(root))
    with pytest.raises(UsageError, match="must start with a package's name"):
        locate("loud.x/y.py")
    assert "loud" not in sys.modules


# --- wheels ---


def wheel(*entries: tuple[str | zipfile.ZipInfo, str | bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in [("sglang/__init__.py", "x = 1\n" * 50), ("sglang/k.cuh", "int a;"), *entries]:
            archive.writestr(name, text)
    return made.getvalue()


def of_kind(name: str, mode: int) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)
    entry.create_system, entry.external_attr = 3, mode << 16
    return entry


def encrypted(data: bytes) -> bytes:
    at = data.index(b"PK\1\2") + 8
    return data[:6] + b"\1" + data[7:at] + b"\1" + data[at + 1 :]


WHEELS = {
    "dot-dot": (wheel(("../x.py", "")), "leaves the directory"),
    "dot-dot within": (wheel(("sglang/../../x.py", "")), "leaves the directory"),
    "absolute": (wheel(("/x.py", "")), "leaves the directory"),
    "drive": (wheel(("c:/x.py", "")), "leaves the directory"),
    "backslash": (wheel(("sglang\\..\\..\\x.py", "")), "leaves the directory"),
    "link": (wheel((of_kind("sglang/l.py", 0o120777), "/etc/passwd")), "is a link"),
    "link to a folder": (wheel((of_kind("sglang/d", 0o120777), "/etc"), ("sglang/d/x.py", "")), "is a link"),
    "pipe": (wheel((of_kind("sglang/l.py", 0o010777), "")), "is a link or a device"),
    "line end": (wheel(("sglang/a\n::error::b.py", "")), "can't be seen"),
    "escape": (wheel(("sglang/\x1b[2J.py", "")), "can't be seen"),
    "long name": (wheel((f"sglang/{'a' * 300}.py", "")), "name too long"),
    "file as a folder": (wheel(("sglang/a.py", ""), ("sglang/a.py/b.py", "")), "can't unpack"),
    "bomb": (wheel(("sglang/b.py", b"\0" * (upstream._MAX_FILE_BYTES + 1))), "64 MiB in one"),
    "encrypted": (encrypted(wheel()), "encrypted"),
    "empty": (b"", "broken wheel"),
    "no zip": (b"PK" * 99, "broken wheel"),
}


def unpacked(data: bytes, folder: Path) -> Path:
    file = folder / "sglang-1.0-py3-none-any.whl"
    file.write_bytes(data)
    file.with_name(f"{file.name}.sha256").unlink(missing_ok=True)
    return upstream.unpack(file)


@pytest.mark.parametrize("name", WHEELS)
def test_a_hostile_wheel_is_refused_and_leaves_nothing(name, tmp_path, monkeypatch):
    monkeypatch.setenv("UNFIX_CACHE", str(tmp_path / "cache"))
    data, words = WHEELS[name]
    with pytest.raises(InfraError, match=f"(?i){words}") as caught:
        unpacked(data, tmp_path)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500
    assert list((tmp_path / "cache/upstream/trees").iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".py") == []


def test_more_entries_than_any_release_has_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("UNFIX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(upstream, "_MAX_ENTRIES", 2)
    unpacked(wheel(), tmp_path)
    with pytest.raises(InfraError, match="over 2 entries"):
        unpacked(wheel(("sglang/a.py", "")), tmp_path)


def test_a_scribbled_wheel_is_one_line_or_whole(tmp_path, monkeypatch):
    monkeypatch.setenv("UNFIX_CACHE", str(tmp_path / "cache"))
    whole, draw = wheel(("sglang/a/b.py", "y = 2\n" * 50)), random.Random(1)
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(draw.choice([1, 2, 4])):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            unpacked(bytes(data[: draw.choice([len(data), draw.randrange(len(data))])]), tmp_path)
        except UnfixError as error:
            refused += 1
            assert str(error).isprintable()
    assert refused > 100


def test_a_wheel_that_is_none_in_the_cache_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setenv("UNFIX_CACHE", str(tmp_path))
    (tmp_path / "upstream/wheels").mkdir(parents=True)
    for name in ("sglang-1.0-py3-none-any.whl", "sglang-evil-py3-none-any.whl"):
        (tmp_path / "upstream/wheels" / name).touch()
    assert upstream.cached() == ["1.0"]


@pytest.mark.parametrize("text", ["a.py", 'a"""+exit()+""".py', "a\\", 'a"', "a\nexit()", "a\x1b.py", "é.py"])
def test_a_script_s_name_is_no_code_in_it(text):
    assert ast.literal_eval(script._string(text)) == text and script._string(text).isprintable()


@pytest.mark.parametrize("origin", ["SGLang 0.5.13", "`x: y`", "`a\nfixes: {}`", '`"`', "`\x1b\u202e`", "`#x`"])
def test_an_import_s_file_is_called_anything(origin):
    text = interchange.toggle_file("1", [Reversal("1:x", "sglang.a.f", (Edit("a", replacement="b"),))], origin)
    title = f"title: Imported from {origin}; say here what the bug was\n"
    assert (title in text) == origin.startswith("SG")
    read = yamlfile.parse(text, "1.yaml").value
    assert read["title"].startswith("Imported from ") and set(read["fixes"]) == {"imported"}


@pytest.mark.parametrize(
    "target", ['pkg/a"""+exit()+""".cuh', "pkg/a.cuh\n          edits: []", "pkg/a b.cuh", "pkg/a:.cuh"]
)
def test_a_drafted_target_is_no_code_in_what_is_drafted(target):
    edits = {target: [Edit("a", replacement="b")]}
    fix: Any = SimpleNamespace(name="x", kind="size", summary="s", guard=None, reversals=edits)
    with pytest.raises(UsageError, match="can't be named in a toggle file"):
        scaffold.toggle("1", "t", [fix], "pkg", "s", {target: "pkg.f"})
