"""What these tests share: one fork server, a checkout that may be changed, and the command line run on it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import fixes
from harness.sandbox import Sandbox

# a shell's background job ignores Ctrl-C, and so would all that a test starts to interrupt it
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parents[1]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout that these tests are in."""
    return ROOT


@pytest.fixture(scope="session")
def catalogue() -> fixes.Catalogue:
    return fixes.load(ROOT / "toggles")


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox("cpu") as sandbox:
        yield sandbox


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the project that a test may change."""
    return _copied(tmp_path / "checkout")


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project that stays as it is, for runs that must be of the same sources."""
    return _copied(tmp_path_factory.mktemp("steady") / "checkout")


def _copied(copy: Path) -> Path:
    for name in ("harness", "kernels", "toggles", "audits", "regressions"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="session")
def python() -> Run:
    """``python(*arguments, cwd=…, **environment)``: this interpreter on the project in ``cwd``, its output kept."""

    def run(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
        path = environment.pop("PYTHONPATH", None)
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SGLANG_", "UNFIX_", "PYTEST_"))}
        env = {**kept, "PYTHONPATH": os.pathsep.join(filter(None, [path, str(cwd), str(cwd / "kernels")]))}
        if cache := os.environ.get("UNFIX_CACHE"):
            env["UNFIX_CACHE"] = cache
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=cwd, env={**env, **environment}, capture_output=True, text=True, timeout=240, check=False
        )

    return run


@pytest.fixture(scope="session")
def unfix(python: Run) -> Run:
    """``unfix(*arguments, cwd=…, **environment)``: the command line."""
    return lambda *arguments, **options: python("-m", "harness.cli", *arguments, **options)
