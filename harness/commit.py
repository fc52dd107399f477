"""What made a result: the checkout's commit for a reader, and a digest of the sources for a program.

Two results belong to one run only where their digests are equal. The commit alone would not do: a checkout may be
changed, or be no git repository at all.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable
from pathlib import Path

from harness.code_base import CodeBase

_PARTS = ("harness", "kernels", "regressions", "toggles", "conftest.py")  # of the project: what decides a verdict
_MADE = ("__pycache__", ".so", ".pyc")  # by running it


def commit(folder: Path) -> str | None:
    """``1a2b3c4d5e6f``, or ``1a2b3c4d5e6f, changed``; None where ``folder`` is no git checkout."""
    head = _git(folder, "rev-parse", "--short=12", "HEAD")
    if not head:
        return None
    return f"{head}, changed" if _git(folder, "status", "--porcelain", "--untracked-files=no") else head


def digest(project: Path, code_base: CodeBase) -> str:
    """Of the project's own files, and of those of the code base under test, by name and content."""
    seen = hashlib.sha256()
    for name, file in _files(project, code_base):
        seen.update(name.encode("utf-8", "surrogateescape") + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return seen.hexdigest()[:16]


def _files(project: Path, code_base: CodeBase) -> Iterable[tuple[str, Path]]:
    for folder, parts in ((project, _PARTS), (code_base.sources, (code_base.name,))):
        for part in parts:
            top = folder / part
            for file in sorted(top.rglob("*")) if top.is_dir() else [top]:
                if file.is_file() and not set(file.parts) & set(_MADE) and file.suffix not in _MADE:
                    yield file.relative_to(folder).as_posix(), file


def _git(folder: Path, *words: str) -> str:
    try:
        ended = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
    except OSError:  # no git here
        return ""
    return ended.stdout.strip() if ended.returncode == 0 else ""
