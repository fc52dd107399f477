"""Whose files may say what code is run: others' toggle files are refused, unless they are trusted by name."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from harness import fixes, trust
from harness.errors import ToggleError, UsageError

ROOT = Path(__file__).parents[1]
FILE = """\
pr: 1
title: t
fixes:
  x: {kind: size, summary: s, reversals: {a: [{target: a.b, edits: [{match: m, replacement: n}]}]}}
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one toggle file, which this unfix is not from."""
    monkeypatch.delenv(trust.VARIABLE, raising=False)
    for name in ("toggles", "regressions/scenarios", "kernels"):
        (tmp_path / "mine" / name).mkdir(parents=True, mode=0o755)
    for folder in [tmp_path / "mine", *(tmp_path / "mine").rglob("*")]:
        folder.chmod(0o755)
    (tmp_path / "mine/toggles/1.yaml").write_text(FILE)
    (tmp_path / "mine/toggles/1.yaml").chmod(0o644)
    return tmp_path / "mine"


def linked(path: Path, to: Path) -> None:
    path.rename(to)
    path.symlink_to(to)


SPOILT = {  # what is wrong with the toggle file, or with its folder
    "all may write to the file": (lambda top: (top / "toggles/1.yaml").chmod(0o646), "may be written to by others"),
    "all may write to the folder": (lambda top: (top / "toggles").chmod(0o757), "may be written to by others"),
    "the file is a link": (lambda top: linked(top / "toggles/1.yaml", top / "1.yaml"), "leads out of it"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_toggle_files_that_others_decide_on_are_refused(name, mine, monkeypatch):
    assert fixes.load(mine / "toggles").ids == ("1:x",)
    spoil, wanted = SPOILT[name]
    spoil(mine)
    with pytest.raises(
        UsageError, match=f"{wanted}, and it is code: .* unfix --trust {re.escape(str(mine))}"
    ) as caught:
        fixes.load(mine / "toggles")
    assert "\n" not in str(caught.value)
    monkeypatch.setenv(trust.VARIABLE, f"/nowhere:{mine}")
    assert fixes.load(mine / "toggles").ids == ("1:x",)
    monkeypatch.setenv(trust.VARIABLE, str(mine.parent))  # a folder above is another folder
    with pytest.raises(UsageError, match=wanted):
        fixes.load(mine / "toggles")


@pytest.mark.parametrize("path", ["toggles/1.yaml", "toggles"])
def test_another_user_s_are_refused(path, mine, monkeypatch):
    if os.getuid() == 0:
        os.chown(mine / path, 4711, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(UsageError, match="belongs to user [0-9]+, not to you"):
        fixes.load(mine / "toggles")


def test_what_root_owns_is_as_good_as_one_s_own(monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    trust.check_files(Path("/usr"), [Path("/usr/bin")])


@pytest.mark.parametrize(("group", "fine"), [("me", True), ("users", False), (None, False)])
def test_a_group_that_is_one_s_own_may_write(group, fine, mine, monkeypatch):
    """Where each user has a group of his own, as with most distributions, files are writable by it."""

    def named(gid: int) -> object:
        if group is None:
            raise KeyError(gid)
        return type("Group", (), {"gr_name": group})

    monkeypatch.setattr(trust.grp, "getgrgid", named)
    monkeypatch.setattr(trust.pwd, "getpwuid", lambda uid: type("User", (), {"pw_name": "me"}))
    (mine / "toggles/1.yaml").chmod(0o664)
    if fine:
        assert len(fixes.load(mine / "toggles")) == 1
    else:
        with pytest.raises(UsageError, match="may be written to by others"):
            fixes.load(mine / "toggles")


def test_a_checkout_that_this_unfix_is_not_from_is_refused(mine, monkeypatch):
    trust.check_checkout(ROOT)
    with pytest.raises(
        UsageError, match=f"^{mine} has toggles/ and regressions/, which are code, and this unfix is from"
    ):
        trust.check_checkout(mine)
    monkeypatch.setattr(trust, "OWN", mine.parent / "site-packages")  # installed outside of any
    trust.check_checkout(mine)
    monkeypatch.setattr(trust, "OWN", ROOT)
    monkeypatch.setenv(trust.VARIABLE, str(mine))
    trust.check_checkout(mine)


@pytest.mark.parametrize("path", [".", "toggles", "regressions", "regressions/scenarios", "kernels"])
def test_every_folder_of_a_checkout_that_code_is_imported_from_is_looked_at(path, mine, monkeypatch):
    monkeypatch.setattr(trust, "OWN", mine)
    trust.check_checkout(mine)
    (mine / path).chmod(0o757)
    with pytest.raises(UsageError, match="may be written to by others"):
        trust.check_checkout(mine)


def test_a_folder_that_leads_elsewhere_is_refused(mine, monkeypatch):
    monkeypatch.setattr(trust, "OWN", mine)
    linked(mine / "regressions", mine.parent / "theirs")
    with pytest.raises(UsageError, match="regressions leads out of it"):
        trust.check_checkout(mine)


def test_a_link_to_itself_is_told_by_who_reads_it(mine):
    (mine / "toggles/2.yaml").symlink_to("2.yaml")
    with pytest.raises(ToggleError, match=r"2.yaml:1: can't be read: Too many levels"):
        fixes.load(mine / "toggles")


@pytest.mark.parametrize("name", ["nowhere", "a:b"])
def test_what_is_trusted_is_a_folder(name, tmp_path):
    (tmp_path / "a:b").mkdir()
    with pytest.raises(UsageError, match=f"--trust .*{name}: must be a folder"):
        trust.name([tmp_path / name])
