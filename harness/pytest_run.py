"""The pytest command line that runs the regressions, for every command that does."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.code_base import CodeBase
from harness.errors import UsageError


def command(
    root: Path,
    device: str,
    code_base: CodeBase,
    workers: str,
    *,
    release: str | None = None,
    source: str | None = None,
    more: Sequence[str] = (),
) -> list[str]:
    """``release`` and ``source`` as the user named them; ``more`` comes last."""
    return [
        sys.executable, "-m", "pytest", str(root / "regressions"),
        "--rootdir", str(root), "-c", str(root / "pyproject.toml"),
        "-q", "-n", workers,
        "--unfix-device", device, "--unfix-target", code_base.name,
        *(["--unfix-release", release] if release else []), *(["--unfix-source", source] if source else []),
        *more,
    ]  # fmt: skip


def workers(jobs: str, device: str) -> str:
    """How many run side by side: what ``--jobs`` says."""
    if jobs != "auto":
        if not jobs.isdecimal():  # what int() reads, which isn't every digit
            raise UsageError(f"--jobs {jobs!r}: must be a number or auto")
        return jobs
    # each worker holds a fork server (about 0.5 GB), and on a GPU its legs' contexts
    return str(min(os.cpu_count() or 1, 12 if device == "cuda" else 8))
