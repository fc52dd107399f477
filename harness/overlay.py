"""An overlay: a directory that goes in front of the import path, in which some fixes are undone.

It holds real copies of the edited files only. Every other entry on the way down to them is a link to the original, so
imports, includes, tracebacks and `inspect.getsource` all see real files.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.cache import cache_dir
from harness.edits import Reversal
from harness.errors import InfraError, RottedError
from harness.pieces import join, pieces
from harness.targets import Location, locate

_FORMAT = b"unfix overlay 1\0"
_STALE_SECONDS = 3600.0
_UNUSED_SECONDS = 30 * 24 * 3600.0
_held: dict[Path, int] = {}  # what this process has built or found, open and locked: no other one sweeps it


@dataclass(frozen=True)
class EditedFile:
    """A file as it is and as the overlay has it.

    `root` is the directory on the import path, `relpath` the path below it (`pkg/mod.py`), `fixes` the ids of the
    fixes undone here, `locations` where each reversal's target was found in the original.
    """

    original: Path
    root: Path
    relpath: Path
    old: bytes
    new: bytes
    fixes: tuple[str, ...]
    locations: tuple[Location, ...]


Plan = dict[Path, EditedFile]


def plan(reversals: Iterable[Reversal], roots: Sequence[Path | str] = ()) -> Plan:
    """Work out every edited file, by its original's path. Writes nothing; raises RottedError if any edit won't go.

    `roots` are directories to look for packages in before the import path.
    """
    located: dict[Path, list[tuple[Reversal, Location]]] = {}
    for reversal in reversals:
        try:
            location = locate(reversal.target, roots)
        except RottedError as error:
            error.fix = reversal.fix
            raise
        located.setdefault(location.file, []).append((reversal, location))
    result: Plan = {}
    for file, items in located.items():
        first = items[0][1]
        source = first.source
        text = join(source.text, pieces(items))
        fixes = tuple(dict.fromkeys(reversal.fix for reversal, _ in items))
        try:
            new = source.encode(text)
        except UnicodeEncodeError as error:
            raise RottedError(
                f"the edit doesn't fit {first.relpath}'s encoding: {error}", fix=", ".join(fixes), target=first.target
            ) from None
        locations = tuple(location for _, location in items)
        result[file] = EditedFile(file, first.root, first.relpath, source.data, new, fixes, locations)
    return result


def diff(plan: Plan) -> str:
    """The plan as a unified diff, "" if empty. Its a/ and b/ paths are below the import root, for `patch -p1`."""
    parts: list[bytes] = []
    for edited in sorted(plan.values(), key=lambda edited: edited.relpath):
        old, new = edited.old.splitlines(keepends=True), edited.new.splitlines(keepends=True)
        path = edited.relpath.as_posix().encode()
        for line in difflib.diff_bytes(difflib.unified_diff, old, new, b"a/" + path, b"b/" + path):
            parts.append(line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n")
    return b"".join(parts).decode("utf-8", "replace")


def build(plan: Plan) -> Path | None:
    """Make the overlay, or find it already made, and return its directory; None for an empty plan.

    Safe to call from several processes at once. Raises InfraError, with nothing half-made left, if the disk won't.
    """
    if not plan:
        return None
    files = sorted(plan.values(), key=lambda edited: edited.relpath)
    overlays = cache_dir() / "overlays"
    try:
        entries = _links(files)
        final = overlays / _digest(files, entries)
        overlays.mkdir(mode=0o700, exist_ok=True)
        if _is_whole(final, files, entries):
            with contextlib.suppress(OSError):  # a cache that can only be read serves as well
                os.utime(final)  # the sweep goes by when it was last used
            if _hold(final):
                return final
        _sweep(overlays)
        made = Path(tempfile.mkdtemp(prefix=".making-", dir=overlays))
        try:
            _fill(made, files, entries)
            _publish(made, final, files, entries)
        finally:
            shutil.rmtree(made, ignore_errors=True)
        _hold(final)
    except OSError as error:
        raise InfraError(f"can't build an overlay in {overlays}: {error.strerror or error}") from None
    return final


_Links = dict[str, str]  # a path below the overlay -> what it links to


def _links(files: Sequence[EditedFile]) -> _Links:
    """All siblings on the way down to the edited files."""
    edited, ways = {str(file.relpath) for file in files}, _ways(files)
    links = {}
    for way, original in ways.items():
        for name in os.listdir(original):
            below = f"{way}/{name}"
            if name != "__pycache__" and below not in edited and below not in ways:
                links[below] = f"{original}/{name}"
    return links


def _ways(files: Sequence[EditedFile]) -> dict[str, str]:
    """The folders that an overlay has of its own: path below it -> the original."""
    paths = [(file.root, file.relpath.parts) for file in files]
    ways = [(root, "/".join(parts[:at])) for root, parts in paths for at in range(1, len(parts))]
    return {way: f"{root}/{way}" for root, way in ways}


def _digest(files: Sequence[EditedFile], links: _Links) -> str:
    digest = hashlib.blake2b(_FORMAT, digest_size=32)
    for file in files:
        for part in (os.fsencode(file.root), os.fsencode(file.relpath), file.new):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    digest.update(os.fsencode("\0".join(map("\0".join, sorted(links.items())))))
    return digest.hexdigest()


def _fill(directory: Path, files: Sequence[EditedFile], links: _Links) -> None:
    for file in files:
        copy = directory / file.relpath
        copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        copy.write_bytes(file.new)
    for below, original in links.items():
        os.symlink(original, f"{directory}/{below}")


def _is_whole(directory: Path, files: Sequence[EditedFile], links: _Links) -> bool:
    """Whether an overlay of this name is there and nobody took anything from it, such as a cleaner, or put any in."""
    try:
        status = directory.lstat()
        if status.st_uid != os.getuid():
            raise InfraError(f"the overlay {directory} belongs to another user: remove it")
        copies, folders = {str(file.relpath): file.new for file in files}, _ways(files)
        return (
            stat.S_ISDIR(status.st_mode)
            and dict(_entries(str(directory), folders)) == links | dict.fromkeys([*folders, *copies])
            and all((directory / below).read_bytes() == new for below, new in copies.items())
        )
    except OSError:
        return False


def _entries(directory: str, folders: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """All that is in these folders of an overlay, but for what Python compiles there: where it links to, or None."""
    for folder in ("", *folders):
        with os.scandir(f"{directory}/{folder}") as entries:
            for entry in entries:
                below = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_symlink():
                    yield below, os.readlink(entry.path)
                elif entry.name != "__pycache__" or not entry.is_dir(follow_symlinks=False):
                    yield below, None


def _publish(made: Path, final: Path, files: Sequence[EditedFile], links: _Links) -> None:
    """Rename into place. Another process may be first: then its overlay is as good as ours."""
    for _ in range(3):
        try:
            os.rename(made, final)
            return
        except OSError:
            if _is_whole(final, files, links):
                return
            if not os.path.lexists(final):
                raise
        # A damaged one is in the way: move it aside. Who uses it keeps what was open.
        aside = Path(tempfile.mkdtemp(prefix=".damaged-", dir=final.parent))
        try:
            os.rename(final, aside / "overlay")
        except FileNotFoundError:
            pass  # another process was faster
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    raise InfraError(f"can't replace the damaged overlay {final}: remove it")


def _hold(overlay: Path) -> bool:
    """As long as this process lives; whatever a clock says, which may be set a month ahead. False where it has gone."""
    with contextlib.suppress(OSError):  # a file system without locks: then its age is all that counts
        handle = os.open(overlay, os.O_RDONLY | os.O_DIRECTORY)
        if (before := _held.pop(overlay, None)) is not None:
            os.close(before)  # another may lie there by now
        _held[overlay] = handle
        fcntl.flock(handle, fcntl.LOCK_SH)  # who removes it has it alone until it is gone
    return overlay.is_dir()


def _remove(overlay: Path) -> None:
    """But for one that a process uses. Raises OSError where it is no folder."""
    handle = os.open(overlay, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return
    except OSError:  # a file system without locks
        pass
    shutil.rmtree(overlay, ignore_errors=True)
    os.close(handle)


def _sweep(overlays: Path) -> None:
    """Remove what killed processes left, and overlays that nobody has used for a month."""
    for name in sorted(os.listdir(overlays)):
        left = name.startswith((".making-", ".damaged-"))
        if left or re.fullmatch("[0-9a-f]{64}", name):
            with contextlib.suppress(OSError):
                path = overlays / name
                if time.time() - path.lstat().st_mtime > (_STALE_SECONDS if left else _UNUSED_SECONDS):
                    _remove(path)
