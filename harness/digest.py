"""A digest: what a reader is told of a night first, on the page, on GitHub, on a badge and in a terminal alike.

incomplete  what did not run, a sentence each: said before all else, and never all well
part        the shard that this is, alone: it tells findings, but not whether all is well
state       one word for the colour: well, finding, rotted, infra; well only where the exit code is 0
headline    one line that says whether to worry
news        whether the findings about a fix are new
grouped     changes since last night, those of one fix that went the same way in one line
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from harness import diagnosis, report
from harness.diagnosis import Diagnosis
from harness.history import Change, History, Key, Night

CHANGES = {
    "broken": "Newly broken", "changed": "Broken in another way", "still": "Still broken", "unproved": "No longer run",
    "gone": "Gone", "flaky": "Flaky", "slower": "Slower", "proved": "Newly proved", "new": "New",
}  # fmt: skip
_STATES = {"infra": "infra", "stale": "rotted", "rotted": "rotted", "unproved": "infra"}  # all others: a finding


@dataclass(frozen=True)
class Line:
    """Changes of one kind, about one fix in one code base."""

    fix: str
    where: str
    said: str  # of its first case
    changes: tuple[Change, ...]

    @property
    def text(self) -> str:
        """``22 cases, proved → rotted``."""
        others = self.changes[1:] and self.changes[0].detail  # each case has its own words
        more = ", and less" if self.changes[0].kind == "slower" else ", and others"
        return f"{cases(len(self.changes))}, {self.said}{more if others else ''}"


@dataclass(frozen=True)
class Digest:
    """Raises UsageError, once it is read, where a case is in the night twice."""

    night: Night
    since: History = History()

    @cached_property
    def records(self) -> dict[Key, dict[str, Any]]:
        return self.night.records()

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        return list(self.records.values())

    @cached_property
    def incomplete(self) -> list[str]:
        """Where there are several documents, each sentence says which it is about."""
        several, said = len(self.night.documents) > 1, []
        for document in self.night.documents:
            sentences = list(document.get("incomplete") or ())
            if several and (part := _part(document)):
                sentences.append(f"{part} stands alone: `unfix merge` joins the shards of a run")
            where = f" ({_place(document)})" if several else ""
            said += [f"{sentence}{where}" for sentence in sentences]
        return said

    @cached_property
    def part(self) -> str:
        """``shard 2 of 4``; "" for a whole run."""
        return _part(self.night.documents[0]) if len(self.night.documents) == 1 else ""

    @cached_property
    def found(self) -> list[Diagnosis]:
        """The worst first. Whether a fix was proved, all parts together say."""
        return [each for each in diagnosis.diagnose(self.rows) if not self.part or each.kind != "unproved"]

    @cached_property
    def exit_code(self) -> int:
        return report.exit_code(self.rows, incomplete=self.incomplete, shard=self.part)

    @property
    def state(self) -> str:
        if self.incomplete:
            return "infra"
        if self.found:
            return tone(self.found[0])
        return "well" if self.exit_code == 0 and not self.part else "infra"

    @property
    def headline(self) -> str:
        # a fix that is not proved may be so because its cases are among those that did not run
        worst = [each for each in self.found if not self.incomplete or each.kind != "unproved"]
        if worst:
            said = f"{worst[0].word}: {worst[0].fix}{_more(worst)}"
        elif self.incomplete:
            said = (self.incomplete[0].rpartition(": ")[0] or self.incomplete[0]) + _more(self.incomplete)
        elif not self.rows:
            said = "Nothing ran"
        elif self.part:
            said = "No finding"
        else:
            said = "All well" if self.state == "well" else "Not proved"
        first = "Incomplete" if self.incomplete else self.part.capitalize()
        return f"{first}: {lower(said)}" if first else said

    @property
    def blind(self) -> int:
        return sum(row["verdict"] == "proved" and not row["tells"] for row in self.rows)

    @property
    def reverted(self) -> list[str]:
        """What was out in every leg."""
        return sorted({fix for document in self.night.documents for fix in document.get("session_reverted", ())})

    @property
    def places(self) -> list[str]:
        """``sglang 0.5.13 on cuda``."""
        return list(dict.fromkeys(_place(document) for document in self.night.documents))

    def news(self, fix: str) -> str:
        """``22 newly broken, 3 still broken``; "" where the findings about a fix are compared with nothing."""
        kinds = Counter(
            change.kind
            for change in self.since.changes
            if change.key in self.records and self.records[change.key]["blames"] == fix
        )
        said = [kind for kind in ("broken", "changed", "still") if kinds[kind]]
        return ", ".join(f"{kinds[kind]} {CHANGES[kind].lower()}" for kind in said)

    def title(self, kind: str) -> str:
        """A kind of change in words. A case that is missing where not all ran may still be there."""
        return "Gone or not run" if kind == "gone" and (self.incomplete or self.part) else CHANGES[kind]


def tone(found: Diagnosis) -> str:
    """The state that a diagnosis alone makes."""
    return _STATES.get(found.kind, "finding")


def grouped(changes: Sequence[Change]) -> list[Line]:
    groups: dict[tuple[str, str, str], list[Change]] = {}
    for change in changes:
        where = f"{change.key.target} {change.key.version}".strip()
        said = "" if change.detail else f"{change.was or 'absent'} → {change.now or 'absent'}"
        groups.setdefault((change.key.fix, where, said), []).append(change)
    return [Line(fix, where, said or group[0].detail, tuple(group)) for (fix, where, said), group in groups.items()]


def cases(count: int) -> str:
    return f"{count} case{'' if count == 1 else 's'}"


def lower(text: str) -> str:
    """As it reads behind a colon."""
    return text[:1].lower() + text[1:]


def _more(found: Sequence[Any]) -> str:
    return f" and {len(found) - 1} more" if found[1:] else ""


def _part(document: Mapping[str, Any]) -> str:
    shard = document.get("shard")
    return f"shard {shard['index']} of {shard['of']}" if shard and shard["of"] > 1 else ""


def _place(document: Mapping[str, Any]) -> str:
    here = document["environment"]
    named = " ".join(str(here[name]) for name in ("target", "target_version") if here.get(name))
    return f"{named} on {here['device']}" if here.get("device") else named
