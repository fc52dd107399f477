"""What a run says to a reader: one case explained, a matrix as JSON, a table, one closing line."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from harness import plain, record
from harness.errors import InfraError
from harness.prover import Result
from harness.verdict import VERDICTS

SCHEMA_VERSION = 1
_MOST_PARTS = 10_000
_NEEDED = {"regression", "fix", "blames", "case", "backend", "target", "device", "tells", "verdict", "reason", "legs"}
STYLE = {"proved": "green", "skipped": "yellow"}  # everything else is red


def matrix(
    environment: dict[str, Any],
    records: list[dict[str, Any]],
    session_reverted: list[str],
    *,
    shard: dict[str, Any] | None = None,
    incomplete: Sequence[str] = (),
) -> dict[str, Any]:
    """The JSON contract. Results are sorted, so that two runs compare line by line.

    ``shard``: which part of a run this is (`harness.shards`); ``incomplete``: what is missing, a sentence each.
    """
    rows = sorted(records, key=lambda row: (row["regression"], row["fix"], row["backend"], row["case"]))
    return {
        "schema_version": SCHEMA_VERSION,
        "environment": environment,
        "session_reverted": session_reverted,
        "shard": shard,
        "incomplete": list(incomplete),
        "verdicts": counts(rows),
        "fixes": fixes_proved(rows),
        "results": rows,
    }


def record_fault(row: Any) -> str:
    """Why this is no record of a case, "" where it is one."""
    if not isinstance(row, dict):
        return "is no object"
    if lacking := sorted(_NEEDED - set(row)):
        return f"has no {lacking[0]}"
    if row["verdict"] not in VERDICTS:
        return f"has the verdict {str(row['verdict'])[:60]!r}, which is none"
    legs = row["legs"]
    if not isinstance(legs, list) or not all(
        isinstance(leg, dict) and {"outcome", "reverted"} <= set(leg) for leg in legs
    ):
        return "has legs that are no list of outcomes"
    return record.fault(row)


def shard_fault(shard: Any, records: Iterable[Mapping[str, Any]]) -> str:
    """Why this names no part of a run, "" where it does (or is None: a whole run)."""
    if shard is None:
        return ""
    index, of = (shard.get("index"), shard.get("of")) if isinstance(shard, dict) else (None, None)
    if type(index) is not int or type(of) is not int or not 1 <= index <= of <= _MOST_PARTS:
        return "shard must have index and of, integers, 1 <= index <= of"
    if not all(type(shard.get(name, 0)) is int for name in ("cases", "of_cases")):
        return "shard must have integers for cases and of_cases"
    return "" if all("test" in row for row in records) else "a shard's results must name their test"


def counts(records: Iterable[dict[str, Any]]) -> dict[str, int]:
    """How many cases got each verdict, in the order of the verdicts, zeros left out."""
    seen = Counter(row["verdict"] for row in records)
    return {kind: seen[kind] for kind in VERDICTS if seen[kind]}


def fixes_proved(records: Iterable[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """For each fix: cases proved on an input that tells it from its absence, on one that can't tell, and findings."""
    table: dict[str, dict[str, int]] = {}
    for row in records:
        fix = table.setdefault(row["blames"], {"proved": 0, "cannot_tell": 0, "skipped": 0, "findings": 0})
        if row["verdict"] == "proved":
            fix["proved" if row["tells"] else "cannot_tell"] += 1
        else:
            fix["skipped" if row["verdict"] == "skipped" else "findings"] += 1
    return table


def untouched(records: list[dict[str, Any]], chosen: Sequence[str]) -> list[str]:
    """Fixes that were chosen and that no case was about."""
    return [fix for fix in chosen if fix not in {row["fix"] for row in records}]


def exit_code(records: list[dict[str, Any]], *, incomplete: Sequence[str] = (), shard: Any = None) -> int:
    """0 all well, 1 a finding, 3 rotted, 4 infra or nothing ran (an empty or skipped matrix is not a green one).

    A part of a run (``shard``) is asked for its findings only: whether each fix is proved, all parts together say.
    """
    kinds = {row["verdict"] for row in records}
    if incomplete or "infra" in kinds or (not shard and not records):
        return 4
    if "rotted" in kinds:
        return 3
    if kinds - {"proved", "skipped"}:
        return 1
    if shard:
        return 0
    # a fix that was never once told from its absence has not been proved; where cases were skipped, it may yet be
    unproved = [row for row in fixes_proved(records).values() if not row["proved"]]
    return 0 if not unproved else 4 if any(row["skipped"] for row in unproved) else 1


def exit_code_of(verdict: str) -> int:
    """The exit code of a single case."""
    return {"proved": 0, "rotted": 3, "infra": 4, "skipped": 4}.get(verdict, 1)


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Whole or not at all; makes the folder. Raises InfraError where it can't be written."""
    write_text(path, json.dumps(document, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Whole or not at all; makes the folder. Raises InfraError where it can't be written."""
    try:
        if path.exists() and not path.is_file():  # a device or a pipe is written to, never replaced
            path.write_text(text, encoding="utf-8")
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
            os.chmod(part, 0o644)
            os.replace(part, path)
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InfraError(f"{path} could not be written: {error.strerror or error}") from error


def summary_line(records: list[dict[str, Any]]) -> str:
    """``unfix: 96 cases: 90 proved, 6 skipped``."""
    return f"unfix: {len(records)} cases: " + ", ".join(f"{n} {kind}" for kind, n in counts(records).items())


def table(records: list[dict[str, Any]]) -> Table:
    """One row a fix and backend: how many cases, and what the legs did."""
    out = Table(title="fix x backend", title_justify="left", header_style="bold")
    for name in ("fix", "backend", "cases", "fix in", "fix out", "verdict"):
        out.add_column(name, overflow="fold")
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in records:
        groups.setdefault((row["fix"], row["backend"]), []).append(row)
    for (fix, backend), rows in sorted(groups.items()):
        on = Counter(row["legs"][0]["outcome"] for row in rows if row["legs"])
        off = Counter(" > ".join(leg["outcome"] for leg in row["legs"][1:]) for row in rows if row["legs"])
        out.add_row(_text(fix), _text(backend), str(len(rows)), _tally(on), _tally(off), _verdicts(rows))
    return out


def _verdicts(rows: list[dict[str, Any]]) -> str:
    said = [f"[{STYLE.get(kind, 'red')}]{n} {kind}[/]" for kind, n in counts(rows).items()]
    blind = sum(row["verdict"] == "proved" and not row["tells"] for row in rows)
    return ", ".join(said) + (f"\n({blind} on inputs that cannot tell)" if blind else "")


def not_proved(records: list[dict[str, Any]]) -> list[str]:
    """Why cases are not proved: verdict, fix, case, reason; cases that share a reason share a line."""
    cases: dict[tuple[str, str, str], list[str]] = {}
    for row in records:
        if row["verdict"] != "proved":
            cases.setdefault((row["verdict"], row["blames"], row["reason"]), []).append(row["case"])
    return [
        f"{verdict}: {fix} on {names[0] if len(names) == 1 else f'{len(names)} cases'}: {reason}"
        for (verdict, fix, reason), names in cases.items()
    ]


def _tally(seen: Counter[str]) -> Text:
    return Text("\n").join(_text(f"{n} {what}") for what, n in seen.most_common())


def _text(text: str) -> Text:
    """What rich takes no part of for markup."""
    return Text(plain.log_line(text))


def explain(result: Result) -> str:
    """One case, leg by leg, and the verdict with its reason: for a failed test and for ``unfix repro``."""
    case = result.case
    lines = [f"{result.fix} on {case.id} ({result.target}, {result.device})"]
    wanted = [case.on, *(want.outcome for want in result.expected)]
    for leg, want in zip(result.legs, wanted, strict=bool(result.legs)):  # none ran: skipped, rotted, infra
        name = f"out: {', '.join(leg.reverted)}" if leg.reverted else "every fix in"
        lines.append(f"  {name}\n      {leg.outcome} (declared: {want}), {leg.seconds:.2f} s")
        if leg.error:
            lines.append(f"      {leg.error}")
        if over := leg.overflow:
            lines.append(
                f"      {over['observed_elements']} stray elements {over['side']} the buffer, predicted "
                f"{over['predicted_elements']}; bytes {over['first_offset_bytes']} to {over['last_offset_bytes']}"
            )
            lines += [f"      {name}" for name in over["buffers"]]
        if leg.facts:
            lines.append("      " + ", ".join(f"{key} {value}" for key, value in leg.facts.items()))
        if leg.outcome == "error" and want != "error" and leg.trace and not leg.infra:
            lines += ["      " + line for line in leg.trace.splitlines()[-12:]]
    kind = "as declared" if result.verdict.kind == "proved" and not case.tells else result.verdict.kind
    lines.append(f"  {kind}" + (f": {result.verdict.reason}" if result.verdict.reason else ""))
    if result.verdict.fix != result.fix:
        lines.append(f"  this is about {result.verdict.fix}")
    return "\n".join(map(plain.log_line, "\n".join(lines).split("\n")))
