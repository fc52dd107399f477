"""Shards: one run's cases cut into N parts of about the same length, for N machines.

Each machine cuts for itself, and all must cut alike: the cut depends on the collected tests and on recorded durations
alone, and its digest is kept, so that parts of different cuts are not joined.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from harness.errors import UsageError


@dataclass(frozen=True)
class Shard:
    """The ``index``-th of ``of`` parts, from 1."""

    index: int
    of: int

    def __str__(self) -> str:
        return f"{self.index}/{self.of}"


def parse(text: str) -> Shard | None:
    """``2/4``; "" is none. Raises UsageError."""
    if not text:
        return None
    found = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise UsageError(f"--shard {text!r}: must be I/N, the I-th of N parts, like 1/4")
    return Shard(int(found[1]), int(found[2]))


def durations(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds that each test took, by node id: the latest where it is there more than once."""
    return {
        record["test"]: float(sum(leg.get("seconds", 0) for leg in record["legs"]))
        for record in records
        if "test" in record and record["legs"]
    }


def cut(tests: Sequence[str], of: int, seconds: Mapping[str, float], unit: Callable[[str], str]) -> list[list[str]]:
    """The tests of each shard, in the order collected. Tests with one ``unit`` stay together.

    The longest first, each to the shard that is shortest so far. A test without a duration counts as the median.
    """
    known = [seconds[test] for test in tests if test in seconds]
    usual = median(known) if known else 1.0
    units: dict[str, list[str]] = {}
    for test in tests:
        units.setdefault(unit(test), []).append(test)
    lengths = {name: sum(seconds.get(test, usual) for test in members) for name, members in units.items()}
    loads = [(0.0, 0, at) for at in range(of)]  # where two are as short, the one with fewer tests
    shard_of: dict[str, int] = {}
    for name in sorted(units, key=lambda name: (-lengths[name], name)):
        load, count, at = min(loads)
        loads[at] = (load + lengths[name], count + len(units[name]), at)
        shard_of.update(dict.fromkeys(units[name], at))
    return [[test for test in tests if shard_of[test] == at] for at in range(of)]


def facts(shard: Shard, parts: Sequence[Sequence[str]]) -> dict[str, Any]:
    """What a part's matrix says of the cut that it is a part of."""
    plan = hashlib.sha256(json.dumps([sorted(part) for part in parts]).encode()).hexdigest()[:16]
    mine = parts[shard.index - 1]
    return {
        "index": shard.index,
        "of": shard.of,
        "cases": len(mine),
        "of_cases": sum(map(len, parts)),
        "plan": plan,
    }
