"""Trust: whose files may say what code is run.

A checkout is code: its toggle files say what stands in the code that is then run, and its regressions are imported. So
it is used only where it is the one that this unfix is from, or, where unfix is installed outside of any, the one around
the working directory; and only where nobody but you and root owns or may write to it, its folders and its toggle files,
and where these are in it, and no links that lead out.

`unfix --trust DIR` or $UNFIX_TRUST (directories, with colons between) names further ones: these aren't looked at.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterable
from pathlib import Path

from harness.errors import UsageError

VARIABLE = "UNFIX_TRUST"
OWN = Path(__file__).resolve().parents[1]


def is_checkout(folder: Path) -> bool:
    return (folder / "toggles").is_dir() and (folder / "regressions").is_dir()


def check_checkout(folder: Path) -> None:
    """Raises UsageError for a checkout whose code is not to be run."""
    if _named(folder):
        return
    if folder.resolve() != OWN and is_checkout(OWN):
        raise UsageError(
            f"{folder} has toggles/ and regressions/, which are code, and this unfix is from {OWN}: run it elsewhere,"
            f" or as unfix --trust {folder} …"
        )
    check_files(folder, [folder / name for name in ("toggles", "regressions", "regressions/scenarios", "kernels")])


def check_files(folder: Path, paths: Iterable[Path]) -> None:
    """That nobody else decides what is in `folder` and in these paths below it. Raises UsageError."""
    if _named(folder) or (folder.name == "toggles" and _named(folder.parent)):
        return
    inside = folder.resolve()
    for path in (folder, *paths):
        try:
            real = path.resolve(strict=True)
            status = real.stat()
        except (OSError, RuntimeError):  # not there, or a link to itself: whoever reads it says so
            continue
        why = "leads out of it" if not real.is_relative_to(inside) else _why(status)
        if why:
            raise UsageError(
                f"{path} {why}, and it is code: mend that, or trust it: unfix --trust {folder}, or {VARIABLE}"
            )


def _named(folder: Path) -> bool:
    named = filter(None, os.environ.get(VARIABLE, "").split(os.pathsep))
    return folder.resolve() in {Path(each).resolve() for each in named}


def _why(status: os.stat_result) -> str:
    """Why somebody else decides what is in a file, "" where nobody does."""
    if status.st_uid not in (os.getuid(), 0):
        return f"belongs to user {status.st_uid}, not to you"
    if others_write(status):
        return "may be written to by others"
    return ""


def others_write(status: os.stat_result) -> bool:
    """Whether anybody but its owner may write to it."""
    return bool(status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _private(status)))


def _private(status: os.stat_result) -> bool:
    """Whether its group is its owner's own, of the same name: where that is usual, files are writable by it."""
    try:
        return grp.getgrgid(status.st_gid).gr_name == pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        return False


def name(folders: Iterable[Path]) -> None:
    """Trust these, in this process and those that it starts. Raises UsageError for what is no folder."""
    for folder in folders:
        if not folder.is_dir() or os.pathsep in str(folder.resolve()):
            raise UsageError(f"--trust {folder}: must be a folder" + ", without a colon in its path" * folder.is_dir())
        os.environ[VARIABLE] = os.pathsep.join(filter(None, [str(folder.resolve()), os.environ.get(VARIABLE, "")]))
