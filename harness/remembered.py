"""Answers about texts, kept in the cache: a file of thousands of lines is parsed once, and not by each process.

An answer lies under the digest of all that it was worked out from: the question, the text, the modules that answer, and
Python's version. So none is ever wrong, and one that a newer version would give differently is not found.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from harness.cache import cache_dir
from harness.errors import InfraError

SMALL = 512  # characters: such a text is parsed as fast as an answer about it is found
_ANSWER = ("strings", "tokens", "snippets", "meaning", "edits", "glance", "outline", "pieces")  # modules
_PLACES = ("UNFIX_CACHE", "XDG_CACHE_HOME", "HOME")  # what says where the cache is
_OLD_SECONDS = 30 * 24 * 3600.0


def remembered(question: str, text: str, about: Any, work: Callable[[], Any], data: bytes | None = None) -> Any:
    """What `work()` says, or said when the same was asked about this text before.

    `about` is JSON-ready, and so must the answer be; it comes back as JSON has it, with lists for tuples. What `work`
    raises is raised and forgotten. Where the cache can't be used, nothing is remembered. `data`: the bytes that the
    text was read from, where they are at hand: to make them anew takes as long as all the rest.
    """
    if len(text) < SMALL:
        return work()
    try:
        kept = _folder(*map(os.environ.get, _PLACES)) / _key(question, text if data is None else data, about)
        with contextlib.suppress(FileNotFoundError, ValueError), open(kept, "rb") as file:  # not asked yet, or damaged
            return json.loads(file.read())
    except (InfraError, OSError):
        return work()
    answer = work()
    with contextlib.suppress(OSError):
        _keep(kept, answer)
    return json.loads(json.dumps(answer))


def _keep(kept: Path, answer: Any) -> None:
    kept.parent.mkdir(mode=0o700, exist_ok=True)
    handle, made = tempfile.mkstemp(prefix=".making-", dir=kept.parent)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(answer, file)
        os.replace(made, kept)
    except OSError:
        os.unlink(made)
        raise
    if kept.name.startswith("00"):  # one in 256 looks for those that are too old
        for other in os.scandir(kept.parent):
            with contextlib.suppress(OSError):
                if time.time() - other.stat().st_mtime > _OLD_SECONDS:
                    os.unlink(other.path)


@lru_cache(maxsize=4)  # looking at who may write there takes as long as an answer
def _folder(*places: str | None) -> Path:
    return cache_dir() / "answers"


def _key(question: str, text: str | bytes, about: Any) -> str:
    kind = "text" if isinstance(text, str) else "bytes"
    asked = json.dumps([question, about, kind, _digest(text), _version()])
    return hashlib.blake2b(asked.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()


@lru_cache(maxsize=32)
def _digest(text: str | bytes) -> str:
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return hashlib.blake2b(data, digest_size=32).hexdigest()


@lru_cache(maxsize=1)
def _version() -> str:
    """Of what answers."""
    digest = hashlib.blake2b(sys.version.encode(), digest_size=32)
    for name in _ANSWER:
        with open(f"{os.path.dirname(__file__)}/{name}.py", "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()
