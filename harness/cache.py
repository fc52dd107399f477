"""Where unfix keeps what it can make again: overlays, downloads, answers."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from harness import trust
from harness.errors import InfraError


def cache_dir() -> Path:
    """The per-user cache: $UNFIX_CACHE, else $XDG_CACHE_HOME/unfix, else ~/.cache/unfix. Made if need be, mode 0700.

    Raises InfraError if it can't be made, or if others own it or may write to it: code is run from there.
    """
    if named := os.environ.get("UNFIX_CACHE"):
        cache = Path(named)
    elif home := os.environ.get("XDG_CACHE_HOME"):
        cache = Path(home) / "unfix"
    else:
        cache = Path.home() / ".cache" / "unfix"
    cache = cache.absolute()
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        status, link = cache.stat(), cache.lstat()
    except OSError as error:
        raise InfraError(f"can't make the cache {cache}: {error.strerror}; set UNFIX_CACHE to a directory") from None
    if others := {status.st_uid, link.st_uid} - {os.getuid()}:  # whoever owns a link can have it lead elsewhere
        raise InfraError(f"the cache {cache} belongs to user {others.pop()}, not to you: set UNFIX_CACHE to your own")
    if trust.others_write(status):
        raise InfraError(f"others may write to the cache {cache}: chmod go-w it, or set UNFIX_CACHE to another")
    for above in cache.resolve().parents:
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:  # they could put another in its place
            raise InfraError(f"others may write to {above}, which the cache {cache} is in: set UNFIX_CACHE to another")
    return cache
