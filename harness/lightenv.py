"""A light environment: a release of SGLang that imports without its full stack, in a directory of the per-user cache.

The directory holds SGLang itself, the packages that its draft backends import, and import stubs; torch, triton and
numpy are those of the running interpreter, which is what legs run on. It goes in front of a leg's import path, and
overlays are built from the ``sglang`` in it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from harness.errors import InfraError, MissingPackageError, UsageError
from harness.overlay import cache_dir

PINS = Path(__file__).with_name("sglang_light.txt")
STUB = Path(__file__).parent / "stubs" / "import_stub.py"
STUBBED = ("sgl_kernel", "torchvision")  # 322 MB of CUDA, and a package that must match torch to the build
_STALE_SECONDS = 3600.0


def install(release: str, wheels: Path | str | None = None) -> Path:
    """Make the environment of a release, or find it already made, and return its directory.

    ``wheels``: a directory to install from, without an index: the wheels that it holds, all others of the list being in
    the running interpreter. Safe to call from several processes at once. Raises UsageError for what is no release, and
    InfraError, with nothing half-made left, where pip or the disk won't.
    """
    final = _directory(release)
    if _is_whole(final):
        return final
    requirements = [f"sglang=={Version(release)}", *pins()]
    options: list[str] = []
    if wheels is not None:
        requirements = _carried(requirements, Path(wheels))
        options = ["--no-index", "--find-links", str(wheels)]
    try:
        final.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sweep(final.parent)
        made = Path(tempfile.mkdtemp(prefix=".making-", dir=final.parent))
        try:
            _pip([*options, "--target", str(made), *requirements], release)
            if not (made / "sglang" / "__init__.py").is_file():
                raise InfraError(f"the wheel of sglang {release} holds no package sglang: it is broken")
            for name in _stubs():
                (made / name).mkdir()
                shutil.copyfile(STUB, made / name / "__init__.py")
            _publish(made, final)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise InfraError(f"can't make an environment in {final.parent}: {error.strerror or error}") from None
    return final


def path(release: str, source: Path | str | None = None) -> list[str]:
    """What goes in front of a leg's import path for a release, or for a checkout that its environment serves.

    ``source``: a checkout of SGLang, or its ``python`` directory. Raises MissingPackageError where ``install`` has not
    been run for the release.
    """
    return [str(root) for root in dict.fromkeys([sources(release, source), _installed(release)])]


def sources(release: str, source: Path | str | None = None) -> Path:
    """The directory that holds the ``sglang`` package which overlays are built from."""
    if source is None:
        return _installed(release)
    for root in (Path(source) / "python", Path(source)):
        if (root / "sglang" / "__init__.py").is_file():
            return root.absolute()
    raise UsageError(f"--source {source}: must be a checkout of SGLang, with python/sglang/__init__.py in it")


def is_installed(release: str) -> bool:
    """Whether ``install`` has been run for this release and this interpreter."""
    return _is_whole(_directory(release))


def pins() -> list[str]:
    """The pinned packages, ``name==version``."""
    lines = (line.partition("#")[0].strip() for line in PINS.read_text().splitlines())
    return [line for line in lines if line]


def _installed(release: str) -> Path:
    directory = _directory(release)
    if not _is_whole(directory):
        raise MissingPackageError(
            f"SGLang {release} has no light environment for this interpreter: run `unfix upstream install {release}`",
            package="sglang",
        )
    return directory


def _directory(release: str) -> Path:
    """Named by everything that its content depends on."""
    try:
        version = str(Version(release))
    except InvalidVersion:
        raise UsageError(f"release {release!a}: must be a version, such as 0.5.13") from None
    content = "\n".join([*pins(), *_stubs(), STUB.read_text()])
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    return cache_dir() / "upstream" / f"sglang-{version}-{sys.implementation.cache_tag}-{digest}"


def _is_whole(directory: Path) -> bool:
    return (directory / "sglang" / "__init__.py").is_file()


def _stubs() -> list[str]:
    """Those of STUBBED that this interpreter lacks; a stub that is on the path already is no package."""
    specs = {name: importlib.util.find_spec(name) for name in STUBBED}
    stub = STUB.read_bytes()
    return [name for name, spec in specs.items() if not spec or not spec.origin or _read(spec.origin) == stub]


def _read(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError:
        return b""


def _carried(requirements: list[str], wheels: Path) -> list[str]:
    """The requirements that ``wheels`` holds. Raises InfraError where one is neither there nor in this interpreter."""
    if not wheels.is_dir():
        raise UsageError(f"--wheels {wheels}: no such directory")
    there = set()
    for file in wheels.glob("*.whl"):
        try:
            there.add(parse_wheel_filename(file.name)[0])
        except InvalidWheelFilename:
            raise UsageError(f"--wheels: {file} is no wheel's name") from None
    names = {requirement: Requirement(requirement).name for requirement in requirements}
    missing = [name for name in names.values() if canonicalize_name(name) not in there and not _has(name)]
    if missing:
        raise InfraError(f"neither {wheels} nor {sys.executable} has {', '.join(missing)}")
    return [requirement for requirement, name in names.items() if canonicalize_name(name) in there]


def _has(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


def _pip(arguments: list[str], release: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--no-input"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", *arguments]
    # a listed PYTHONPATH would let pip think that a package is installed already
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=env, stdin=subprocess.DEVNULL)
    if ended.returncode == 0:
        return
    said = ended.stderr + ended.stdout
    if f"No matching distribution found for sglang=={Version(release)}" in said and "from versions: none" not in said:
        known = re.search(r"satisfies the requirement sglang==.*\(from versions: (.*)\)", said)
        newest = f"; the newest is {known.group(1).rpartition(', ')[2]}" if known else ""
        raise UsageError(f"there is no release {release} of SGLang for this Python{newest}")
    errors = [line.partition("ERROR: ")[2] for line in said.splitlines() if line.startswith("ERROR: ")]
    line = errors[-1] if errors else (said.strip().splitlines() or [f"exit {ended.returncode}"])[-1]
    raise InfraError(f"pip could not install SGLang {release} and what it imports: {line}")


def _publish(made: Path, final: Path) -> None:
    """Rename into place. Another process may be first: then its environment is as good as ours."""
    if final.exists() and not _is_whole(final):
        shutil.rmtree(final)
    try:
        os.rename(made, final)
    except OSError:
        if not _is_whole(final):
            raise


def _sweep(directory: Path) -> None:
    """Remove what killed processes left."""
    for left in directory.glob(".making-*"):
        if time.time() - left.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
