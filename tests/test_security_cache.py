"""What is loaded from a cache is one's own: nobody else could have put it there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from eagle_kv import jit

from harness.cache import cache_dir
from harness.errors import InfraError


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def another_s(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.getuid() == 0:
        os.chown(path, 4711, -1, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 4711)


def test_a_cache_is_made_for_oneself_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("UNFIX_CACHE", str(tmp_path / "c"))
    assert mode(cache_dir()) == 0o700


def test_a_link_that_is_one_s_own_is_followed(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    monkeypatch.setenv("UNFIX_CACHE", str(tmp_path / "link"))
    assert cache_dir() == tmp_path / "link"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a link away")
def test_a_link_of_another_user_s_is_refused(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    another_s(tmp_path / "link", monkeypatch)
    monkeypatch.setenv("UNFIX_CACHE", str(tmp_path / "link"))
    with pytest.raises(InfraError, match="belongs to user 4711, not to you"):
        cache_dir()


@pytest.mark.parametrize(("above", "fine"), [(0o757, False), (0o1777, True), (0o755, True)])
def test_a_cache_that_others_could_replace_is_refused(above, fine, tmp_path, monkeypatch):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a").chmod(above)
    monkeypatch.setenv("UNFIX_CACHE", str(tmp_path / "a/b/c"))
    if fine:
        assert cache_dir() == tmp_path / "a/b/c"
    else:
        with pytest.raises(InfraError, match=f"others may write to {tmp_path / 'a'}, which the cache"):
            cache_dir()


@pytest.mark.parametrize("spoilt", ["all of them", "the folder of a build", "another user's"])
def test_a_build_that_others_could_have_made_is_not_loaded(spoilt, tmp_path, monkeypatch):
    """A library that lies where a build's would: it must not even be opened."""
    monkeypatch.setenv("EAGLE_KV_CACHE", str(tmp_path / "builds"))
    source = tmp_path / "k.cuh"
    source.write_text("int a;")
    cpu = torch.device("cpu")
    home = tmp_path / "builds" / f"k-cpu-{jit._key(source.read_bytes(), cpu, jit._Tools(cpu, 'k'))}"
    home.mkdir(parents=True, mode=0o700)
    (home / "k.so").write_bytes(b"theirs")
    for folder in (home, home.parent):
        folder.chmod(0o755)
    assert jit.build(source, cpu, "k") == home / "k.so"
    if spoilt == "another user's":
        another_s(home, monkeypatch)
    else:
        (home if spoilt == "the folder of a build" else home.parent).chmod(0o775)
    with pytest.raises(jit.ToolchainError, match="^k can't use .*, whose builds others could change: remove it"):
        jit.load(source, cpu, "k")


def test_a_folder_for_a_build_is_made_for_oneself_alone(tmp_path):
    jit._owned(tmp_path / "builds/k-cpu-0", "k")
    assert mode(tmp_path / "builds") == mode(tmp_path / "builds/k-cpu-0") == 0o700
