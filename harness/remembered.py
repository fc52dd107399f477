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
_ANSWER = ("strings", "tokens", "snippets", "meaning", "edits", "outline", "pieces")  # modules
_OLD_SECONDS = 30 * 24 * 3600.0


def remembered(question: str, text: str, about: Any, work: Callable[[], Any]) -> Any:
    """What `work()` says, or said when the same was asked about this text before.

    `about` is JSON-ready, and so must the answer be; it comes back as JSON has it, with lists for tuples. What `work`
    raises is raised and forgotten. Where the cache can't be used, nothing is remembered.
    """
    if len(text) < SMALL:
        return work()
    try:
        kept = _folder() / _key(question, text, about)
        with contextlib.suppress(FileNotFoundError, ValueError):  # not asked yet, or damaged
            return json.loads(kept.read_bytes())
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


def _folder() -> Path:
    return cache_dir() / "answers"


def _key(question: str, text: str, about: Any) -> str:
    asked = json.dumps([question, about, _digest_of_text(text), _version()])
    return hashlib.sha256(asked.encode("utf-8", "surrogatepass")).hexdigest()


@lru_cache(maxsize=32)
def _digest_of_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@lru_cache(maxsize=1)
def _version() -> str:
    """Of what answers."""
    digest = hashlib.sha256(sys.version.encode())
    for name in _ANSWER:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()
