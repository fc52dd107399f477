"""Where SGLang's sources come from: a release, whose wheel is fetched and unpacked, a checkout, or what is installed.

Nothing is installed and nothing imported. The per-user cache holds `upstream/wheels/`, and `upstream/trees/<digest>/`
with the sources out of each wheel; a release that was fetched once needs no network again.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.metadata
import lzma
import os
import re
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from packaging.version import VERSION_PATTERN, InvalidVersion, Version

from harness import plain
from harness.errors import InfraError, MissingPackageError, UsageError
from harness.overlay import cache_dir
from harness.targets import import_root
from harness.tokens import C_SUFFIXES

PACKAGE = "sglang"
_SUFFIXES = C_SUFFIXES | {".py", ".pyi"}
_ENDINGS = tuple(_SUFFIXES)
_MAX_BYTES = 1 << 30  # of sources out of one wheel; 0.5.23 has 88 MB
_MAX_FILE_BYTES = 1 << 26
_MAX_ENTRIES = 50_000
# What Python's zip reader raises for an archive that is cut, scribbled over, encrypted or packed in an unknown way.
_BROKEN = (zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError, ValueError)
_PIP_SECONDS = 900
# Only sources are read, so a wheel for another Python does as well where this one has none.
_ANY_WHEEL = ["--platform", "manylinux_2_34_x86_64", "--python-version", "3.12", "--implementation", "cp"]


@dataclass(frozen=True)
class Source:
    """A source tree. `name` is what tables call it, `root` the directory on the import path that holds `sglang/`."""

    name: str
    root: Path


def release(version: str) -> Source:
    """A published release, such as 0.5.13, fetched if need be. Raises what `wheel` and `unpack` raise."""
    return Source(_version(version), unpack(wheel(version)))


def checkout(directory: Path | str) -> Source:
    """A checkout of SGLang's repository, or its `python/` folder. Raises UsageError where neither is there."""
    directory = Path(directory)
    for root in (directory / "python", directory):
        if (root / PACKAGE / "__init__.py").is_file():
            return Source(str(directory), root.absolute())
    raise UsageError(f"--source {directory}: no python/{PACKAGE}/__init__.py in it: name a checkout of SGLang")


def installed() -> Source | None:
    """The SGLang that this interpreter would import, None where there is none."""
    try:
        root = import_root(PACKAGE, ())
    except MissingPackageError:
        return None
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        version = str(root)
    return Source(f"installed {version}", root)


def cached() -> list[str]:
    """The releases whose wheels are in the cache, in the order of their versions."""
    names = [path.name.split("-")[1] for path in _folder("wheels").glob(f"{PACKAGE}-*.whl")]
    found = {name for name in names if re.fullmatch(VERSION_PATTERN, name, re.VERBOSE | re.IGNORECASE)}
    return sorted(found, key=Version)


def wheel(version: str) -> Path:
    """The wheel of a release, from the cache, else through `pip download`.

    Raises UsageError for what is no version and for a release that isn't there, InfraError without a network or pip.
    """
    version = _version(version)
    folder = _folder("wheels")
    if found := sorted(folder.glob(f"{PACKAGE}-{version}-*.whl")):
        return found[0]
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder) as scratch:
        words = _download(version, scratch, [])
        if words and "from versions:" in words and "from versions: none" not in words:
            words = _download(version, scratch, _ANY_WHEEL) and words
        fetched = sorted(Path(scratch).glob("*.whl"))
        if not fetched:
            raise _explain(version, words)
        final = folder / fetched[0].name
        os.replace(fetched[0], final)
    return final


def unpack(path: Path) -> Path:
    """The sources out of a wheel, in a directory that the wheel's digest names. Safe to call from several processes.

    Raises InfraError, with nothing half-made left, for a broken wheel and for one whose entries leave the directory.
    """
    trees = _folder("trees")
    final = trees / _digest(path)
    if _is_whole(final):
        return final
    made = Path(tempfile.mkdtemp(prefix=".making-", dir=trees))
    try:
        with zipfile.ZipFile(path) as archive:
            _extract(archive, made)
        if not (made / PACKAGE / "__init__.py").is_file():
            raise InfraError(f"{path} has no {PACKAGE}/__init__.py: it is no wheel of SGLang; remove it")
        (made / ".files").write_text(str(_count(made)))
        if final.exists():  # a cleaner of old files took something from it
            shutil.rmtree(final, ignore_errors=True)
        try:
            os.rename(made, final)
        except OSError:
            if not _is_whole(final):  # else another process was faster
                raise
    except (*_BROKEN, struct.error, OverflowError) as error:
        raise InfraError(
            f"{path} is a broken wheel ({plain.one_line(str(error), 200)}): remove it, and it is fetched again"
        ) from None
    except OSError as error:
        raise InfraError(f"can't unpack {path} in {trees}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return final


def _version(text: str) -> str:
    try:
        return str(Version(text))
    except InvalidVersion:
        raise UsageError(f"{text[:60]!a} is no release of SGLang: must be a version such as 0.5.13.post1") from None


def _folder(name: str) -> Path:
    folder = cache_dir() / "upstream" / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InfraError(f"can't make {folder}: {error.strerror}; set UNFIX_CACHE to a directory") from None
    return folder


def _download(version: str, folder: str, options: Sequence[str]) -> str:
    """Let pip fetch the wheel into `folder`; what it said if it didn't, else ""."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", folder, *options, f"{PACKAGE}=={version}"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise InfraError(f"pip took over {_PIP_SECONDS} s to fetch {PACKAGE} {version}: is the network up?") from None
    return "" if ended.returncode == 0 else ended.stderr or f"pip ended with {ended.returncode}"


def _explain(version: str, words: str) -> InfraError | UsageError:
    if listed := re.search(r"from versions: ([^)]*)\)", words):
        there = [] if listed.group(1) == "none" else re.split(r",\s*", listed.group(1))
        if there:
            near = difflib.get_close_matches(version, there, 3, 0.5)
            newest = f", newest: {there[-1]}" if there[-1] not in near else ""
            hint = f" (nearest: {', '.join(near)}{newest})" if near else f" (newest: {there[-1]})"
            return UsageError(f"no release {version} of {PACKAGE}{hint}")
        if re.search(r"Retrying|ConnectionError|Temporary failure|timed out|ProxyError|SSLError", words):
            return InfraError(f"can't fetch {PACKAGE} {version}: pip reaches no package index; is the network up?")
        return InfraError(f"can't fetch {PACKAGE} {version}: pip's index has no {PACKAGE}, or can't be reached")
    errors = [line for line in words.splitlines() if line.startswith("ERROR:")] or words.strip().splitlines() or [""]
    return InfraError(f"can't fetch {PACKAGE} {version}: pip says: {errors[-1].removeprefix('ERROR:').strip()[:300]}")


def _digest(path: Path) -> str:
    """The wheel's SHA-256, kept beside it: eleven wheels are 250 MB to read."""
    kept = path.with_name(path.name + ".sha256")
    try:
        status = path.stat()
        stamp = f"{status.st_size} {status.st_mtime_ns} "
        if kept.is_file() and re.fullmatch(re.escape(stamp) + "[0-9a-f]{64}", known := kept.read_text()):
            return known.rpartition(" ")[2]
        with open(path, "rb") as stream:
            digest = hashlib.sha256()
            while block := stream.read(1 << 20):
                digest.update(block)
        scratch = kept.with_name(f".{kept.name}.{os.getpid()}")
        scratch.write_text(stamp + digest.hexdigest())
        os.replace(scratch, kept)
    except OSError as error:
        raise InfraError(f"can't read the wheel {path}: {error.strerror or error}") from None
    return digest.hexdigest()


def _extract(archive: zipfile.ZipFile, directory: Path) -> None:
    left = _MAX_BYTES
    if len(archive.infolist()) > _MAX_ENTRIES:
        raise ValueError(f"over {_MAX_ENTRIES} entries")
    for entry in archive.infolist():
        name = PurePosixPath(entry.filename)
        parts = entry.filename.split("/")
        if name.is_absolute() or ".." in parts or "\\" in entry.filename or ":" in parts[0]:
            raise ValueError(f"its entry {entry.filename[:80]!a} leaves the directory")
        if stat.S_IFMT(entry.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise ValueError(f"its entry {entry.filename[:80]!a} is a link or a device")
        if entry.is_dir() or name.suffix not in _SUFFIXES:
            continue
        if not entry.filename.isprintable():
            raise ValueError(f"its entry {entry.filename[:80]!a} has characters that can't be seen")
        if (
            left := left - entry.file_size
        ) < 0 or entry.file_size > _MAX_FILE_BYTES:  # no more is ever read than it says
            raise ValueError(f"over {_MAX_BYTES >> 20} MiB of sources, or {_MAX_FILE_BYTES >> 20} MiB in one")
        file = directory.joinpath(*name.parts)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(archive.read(entry))


def _count(directory: Path) -> int:
    """How many sources are there. Others, such as compiled modules of one who imported from here, don't count."""
    return sum(name.endswith(_ENDINGS) for _, _, files in os.walk(directory) for name in files)


def _is_whole(directory: Path) -> bool:
    """Whether a tree is there and nobody, such as a cleaner of old files, took anything from it."""
    try:
        return int((directory / ".files").read_text()) == _count(directory)
    except (OSError, ValueError):
        return False
