"""History: what changed between a night and those before it. Plain JSON files, as ``unfix run --json`` writes them.

A night is a file, or a folder of files (one for each release, say). ``--baseline`` names one earlier night as a file,
or a folder of nights: each file and each folder in it is one, in the order of their names (2025-11-9 before
2025-11-10). The last is last night; the last N, tonight counted, are what a case's record is read off:

    broken    a finding now, and last night none
    proved    proved now, and last night not
    unproved  proved last night, and skipped now
    changed   a finding last night and now, but another one
    still     the same finding as last night
    slower    proved both times, and its legs took RATIO times as long as in the slowest earlier night, and FLOOR s
              more; where all of tonight is slow, beyond its pace: how many times as long its cases took, at the median
    gone      a case of last night that is not here
    new       a case that last night did not have
    flaky     proved and a finding by turns: at least two switches within the last N nights, this one counted; its rate
              is the share of findings in the nights that ran it

A fault that was there for some nights and then repaired has two switches, too: the strip of nights shows which it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from harness import report, runlog
from harness.diagnosis import Record, is_finding
from harness.errors import UsageError

KINDS = ("broken", "changed", "still", "unproved", "gone", "flaky", "slower", "proved", "new")
RATIO, FLOOR = 1.5, 1.0  # times as long; seconds
PACE_CASES = 8  # fewer say nothing of the pace of a night
NIGHTS = 14
_NOT_COMPARED = ("target", "target_version")
_NOT_SAID = ("sources",)  # the commit says it to a reader


class Key(NamedTuple):
    """The same case in another night."""

    target: str
    version: str
    device: str
    regression: str
    fix: str
    backend: str
    case: str


@dataclass(frozen=True)
class Night:
    name: str
    documents: tuple[dict[str, Any], ...]

    def records(self) -> dict[Key, dict[str, Any]]:
        """All its cases. Raises UsageError where one is in it twice."""
        found: dict[Key, dict[str, Any]] = {}
        for document in self.documents:
            for row in document["results"]:
                key = _key(document, row)
                if key in found:
                    where = f"{key.target} {key.version}".strip()
                    raise UsageError(f"{self.name}: {key.fix} on {key.case} ({where}, {key.device}) is in it twice")
                found[key] = row
        return found


def _key(document: dict[str, Any], row: Record) -> Key:
    version = str(document["environment"].get("target_version") or "")
    return Key(row["target"], version, *(row[name] for name in Key._fields[2:]))


@dataclass(frozen=True)
class Change:
    kind: str
    key: Key
    was: str | None  # the verdict of last night
    now: str | None
    detail: str = ""
    rate: float = 0.0  # flaky: the share of findings; slower: how many times as long
    strip: tuple[str | None, ...] = ()  # the verdicts of the last N nights, oldest first, this one last

    def as_dict(self) -> dict[str, Any]:
        row: dict[str, Any] = {"kind": self.kind, **self.key._asdict(), "was": self.was, "now": self.now}
        return row | {"detail": self.detail, "rate": round(self.rate, 3), "nights": list(self.strip)}


@dataclass(frozen=True)
class History:
    """``last``: the name of last night, None where there was none."""

    last: str | None = None
    nights: int = 0
    changes: tuple[Change, ...] = ()
    environment: tuple[str, ...] = ()
    strips: dict[Key, tuple[str | None, ...]] = field(default_factory=dict)

    def of(self, kind: str) -> list[Change]:
        return [change for change in self.changes if change.kind == kind]

    def counts(self) -> dict[str, int]:
        return {kind: len(found) for kind in KINDS if (found := self.of(kind))}

    def as_dict(self) -> dict[str, Any]:
        return {
            "last_night": self.last,
            "nights": self.nights,
            "counts": self.counts(),
            "environment": list(self.environment),
            "changes": [change.as_dict() for change in self.changes],
        }


def read_night(paths: Sequence[Path], name: str = "") -> Night:
    """One night of these files. Raises UsageError for what is no matrix."""
    return Night(name or (paths[0].stem if paths else ""), tuple(read_document(path) for path in paths))


def read_baseline(where: Path, but: Iterable[Path] = ()) -> list[Night]:
    """The earlier nights, oldest first. ``but``: the files of tonight, which may lie in the same folder."""
    if not where.exists():
        raise UsageError(f"--baseline {where}: no such file or folder")
    if where.is_file():
        return [read_night([where])]
    tonight = {path.resolve() for path in but}
    nights = []
    for entry in sorted(where.iterdir(), key=_natural):
        files = sorted(entry.glob("*.json"), key=_natural) if entry.is_dir() else [entry]
        files = [file for file in files if file.suffix == ".json" and file.resolve() not in tonight]
        if files:
            nights.append(read_night(files, entry.name if entry.is_dir() else entry.stem))
    return nights


def records(nights: Iterable[Night], target: str, device: str) -> Iterator[Record]:
    """Of one code base and device, the last night's last."""
    for night in nights:
        for document in night.documents:
            yield from (row for row in document["results"] if (row["target"], row["device"]) == (target, device))


def like(night: Night, earlier: Sequence[Night], fixes: Collection[str], *, whole: bool) -> list[Night]:
    """Of earlier nights, the cases that this one might have: of these fixes, on its code base and device.

    A part of a run (not ``whole``) might have those only that it has.
    """
    mine = night.records()
    places = {(key.target, key.version, key.device) for key in mine}

    def kept(document: dict[str, Any], row: Record) -> bool:
        key = _key(document, row)
        return key in mine if not whole else row["fix"] in fixes and (key.target, key.version, key.device) in places

    return [
        Night(
            old.name,
            tuple({**each, "results": [row for row in each["results"] if kept(each, row)]} for each in old.documents),
        )
        for old in earlier
    ]


def _natural(path: Path) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", path.name)]


def read_document(path: Path) -> dict[str, Any]:
    """A matrix, or the log of a run as one. Raises UsageError for what is neither."""
    if path.suffix == ".jsonl":
        return runlog.document(path)
    try:
        found = json.loads(runlog.bytes_of(path).decode("utf-8"))
    except OSError as error:
        raise UsageError(f"{path} could not be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON: {str(error)[:200]}") from None
    whole = isinstance(found, dict) and found.get("schema_version") == 1
    if not whole or not isinstance(found.get("results"), list) or not isinstance(found.get("environment"), dict):
        raise UsageError(f"{path} is no matrix: must be what `unfix run --json` writes, schema_version 1")
    for name in ("incomplete", "session_reverted"):
        if not isinstance(found.setdefault(name, []), list) or not all(isinstance(each, str) for each in found[name]):
            raise UsageError(f"{path}: {name} must be a list of strings")
    for at, row in enumerate(found["results"]):
        if fault := report.record_fault(row):
            raise UsageError(f"{path}: results[{at}] {fault}")
    if fault := report.shard_fault(found.get("shard"), found["results"]):
        raise UsageError(f"{path}: {fault}")
    return found


def seconds(record: Record) -> float:
    """How long all its legs took together."""
    return float(sum(leg.get("seconds", 0) for leg in record["legs"]))


def compare(now: Night, before: Sequence[Night], nights: int = NIGHTS) -> History:
    """``before``: oldest first; the last of them is last night. Only the last ``nights`` are read."""
    if not before:
        return History()
    before = before[-(nights - 1) :] if nights > 1 else before[-1:]
    tables = [night.records() for night in before]
    here = now.records()
    earlier = {key: [table.get(key) for table in tables] for key in dict.fromkeys([*here, *tables[-1]])}
    strips = {
        key: tuple(row["verdict"] if row else None for row in [*old, here.get(key)]) for key, old in earlier.items()
    }
    ratios = {key: ratio for key, row in here.items() if (ratio := _ratio(row, earlier[key]))}
    pace = max(1.0, median(ratios.values())) if len(ratios) >= PACE_CASES else 1.0
    changes = [
        Change(kind, key, strip[-2], strip[-1], detail, rate, strip)
        for key, strip in strips.items()
        for kind, detail, rate in _kinds(here.get(key), earlier[key], strip, ratios.get(key, 0.0), pace)
    ]
    changes.sort(key=lambda change: (KINDS.index(change.kind), -change.rate, change.key))
    around = [*_environments(before[-1], now)]
    if pace >= RATIO:
        around.append(f"pace: at the median a case took {pace:.1f} times as long as in its slowest earlier night")
    return History(before[-1].name, len(before), tuple(changes), tuple(around), strips)


def _kinds(
    row: Record | None, earlier: Sequence[Record | None], strip: Sequence[str | None], ratio: float, pace: float
) -> Iterator[tuple[str, str, float]]:
    """Kind, what there is to say of it, rate."""
    if row is None:
        yield "gone", "", 0.0
        return
    if earlier[-1] is None:
        yield "new", "", 0.0
    elif step := _step(row, earlier[-1]):
        yield step, "", 0.0
    ran = [verdict != "proved" for verdict in strip if verdict not in (None, "skipped")]
    if sum(one != other for one, other in zip(ran, ran[1:], strict=False)) >= 2:
        rate = sum(ran) / len(ran)
        yield "flaky", f"a finding in {sum(ran)} of {len(ran)} nights ({rate:.0%})", rate
    if ratio > RATIO * pace and (took := seconds(row)) > took / ratio * pace + FLOOR:
        yield "slower", f"{took:.1f} s, at most {took / ratio:.1f} s before ({ratio:.1f} times)", ratio


def _ratio(row: Record, earlier: Sequence[Record | None]) -> float:
    """How many times as long as in the slowest earlier night; 0 where one of them proved nothing."""
    times = [seconds(old) for old in earlier if old and old["verdict"] == "proved"]
    slowest = max(times, default=0.0)
    return seconds(row) / slowest if slowest and row["verdict"] == "proved" else 0.0


def _step(row: Record, was: Record) -> str:
    if is_finding(row):
        if not is_finding(was):
            return "broken"
        return "still" if row["verdict"] == was["verdict"] else "changed"
    if row["verdict"] == was["verdict"]:
        return ""
    return "proved" if row["verdict"] == "proved" else "unproved" if was["verdict"] == "proved" else ""


def _environments(last: Night, now: Night) -> Iterable[str]:
    """What differs around the code under test: another torch may be why everything moved."""
    for document in now.documents:
        here = document["environment"]
        same = [each["environment"] for each in last.documents]
        same = [old for old in same if all(old.get(name) == here.get(name) for name in _NOT_COMPARED)]
        for old in same[:1]:
            for name in dict.fromkeys([*old, *here]):
                if old.get(name) != here.get(name) and name not in _NOT_SAID:
                    yield f"{name}: {old.get(name)} before, {here.get(name)} now"
    then, here_out = _reverted(last), _reverted(now)
    if then != here_out:
        yield f"taken out of every leg: {then} before, {here_out} now"


def _reverted(night: Night) -> str:
    return ", ".join(sorted({fix for each in night.documents for fix in each.get("session_reverted", ())})) or "nothing"
