"""Joins the shards of one run into its matrix. A shard that is missing is said to be, and never passed over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness import report
from harness.errors import UsageError
from harness.runlog import IDENTITY

Document = Mapping[str, Any]


def merge(parts: Sequence[tuple[str, Document]]) -> dict[str, Any]:
    """``parts``: each with a name for messages. Raises UsageError where they are not parts of one run."""
    (first, one), *others = parts
    for name, part in parts:
        if not part.get("shard"):
            raise UsageError(f"{name} is no shard: only what `unfix run --shard I/N` wrote can be joined")
    for name, part in others:
        for what, mine, theirs in _differences(one, part):
            raise UsageError(f"{first} and {name} are of two runs: {what} {mine} and {theirs}")
    by_index: dict[int, tuple[str, Document]] = {}
    for name, part in parts:
        other, _ = by_index.setdefault(part["shard"]["index"], (name, part))
        if other != name:
            raise UsageError(f"{other} and {name} are both shard {part['shard']['index']} of {part['shard']['of']}")
    return report.matrix(
        _environment([part["environment"] for _, part in parts]),
        _results([by_index[index] for index in sorted(by_index)]),
        list(one["session_reverted"]),
        incomplete=_incomplete({index: part for index, (_, part) in by_index.items()}, one["shard"]["of"]),
    )


def _differences(one: Document, other: Document) -> list[tuple[str, Any, Any]]:
    # anything else of the environment two machines may differ in
    pairs = [(name, one["environment"].get(name), other["environment"].get(name)) for name in IDENTITY]
    pairs.append(("taken out of every leg:", one["session_reverted"], other["session_reverted"]))
    pairs.append(("cut into", one["shard"]["of"], other["shard"]["of"]))
    plans = one["shard"].get("plan"), other["shard"].get("plan")
    if None not in plans:  # a killed run's log has none
        pairs.append(("the cases were cut by different --baseline durations:", *plans))
    return [pair for pair in pairs if pair[1] != pair[2]]


def _environment(environments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all say; where two machines differ, both."""
    names = dict.fromkeys(name for each in environments for name in each)
    said = {name: list(dict.fromkeys(each[name] for each in environments if name in each)) for name in names}
    return {name: values[0] if len(values) == 1 else " / ".join(map(str, values)) for name, values in said.items()}


def _results(parts: Sequence[tuple[str, Document]]) -> list[dict[str, Any]]:
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, part in parts:
        for record in part["results"]:
            other, _ = found.setdefault(record["test"], (name, record))
            if other != name:
                raise UsageError(f"{other} and {name} both ran {record['test']}")
    return [record for _, record in found.values()]


def _incomplete(parts: Mapping[int, Document], of: int) -> list[str]:
    said = [
        f"shard {index} of {of}: {sentence}"
        for index, part in sorted(parts.items())
        for sentence in part.get("incomplete", ())
    ]
    missing = [index for index in range(1, of + 1) if index not in parts]
    counts = [part["shard"] for part in parts.values() if "of_cases" in part["shard"]]
    if missing:
        which = f"shard{'s' if missing[1:] else ''} {', '.join(map(str, missing))} of {of}"
        # how many cases are missing is known where every other shard says how many it had
        left = counts[0]["of_cases"] - sum(each["cases"] for each in counts) if len(counts) == len(parts) else None
        tail = "did not run" if left is None else f"{left} of {counts[0]['of_cases']} cases did not run"
        said.insert(0, f"{which} {'are' if missing[1:] else 'is'} missing: {tail}")
    return said
