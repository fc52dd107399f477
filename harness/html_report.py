"""The HTML report: one night, and what changed since those before it, as one file that needs no network and no script.

What is on it, in this order: whether to worry (one line, coloured, in words, too), what did not run, how many cases got
which verdict, what each finding amounts to, what changed since last night (:mod:`harness.digest`); then fix x backend x
case. A case opens to its legs, what they printed, its memory map (:mod:`harness.memory_map`), what was taken out as a
diff, and the command to run it again.

Everything that a run captured is escaped, and control characters are spelt out: what a dying process prints must not
change what a report says. Pure: documents in, text out.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from harness import diagnosis, digest, history, memory_map, memory_svg, plain, report
from harness.digest import Digest
from harness.extras import NOTHING, Extras
from harness.history import Change, History, Key, Night
from harness.memory_map import MemoryMap

SCRIPT = """\
for (const button of document.querySelectorAll("button.copy")) {
  if (!navigator.clipboard) break;
  button.hidden = false;
  button.addEventListener("click", async () => {
    const said = button.nextElementSibling;
    try {
      await navigator.clipboard.writeText(button.previousElementSibling.textContent);
      said.textContent = "copied";
    } catch { said.textContent = "not copied: select the text"; }
    setTimeout(() => { said.textContent = ""; }, 3000);
  });
}
"""
_SHOWN = 8  # cases named in a line of what changed


def visible(value: Any) -> Any:
    """For all that the template puts out."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else plain.visible(value)


def render(told: Digest, extras: Extras = NOTHING) -> str:
    """The page. Raises UsageError where a case is in the night twice."""
    environment = Environment(
        loader=PackageLoader("harness", "."),
        autoescape=True,
        finalize=visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script_digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return environment.get_template("report.html.j2").render(
        script=Markup(SCRIPT),  # nosec B704
        script_digest=script_digest,
        told=told,
        night=told.night.name,
        cases=len(told.rows),
        counts=report.counts(told.rows),
        since=told.since,
        findings=[(each, digest.tone(each), told.news(each.fix)) for each in told.found],
        changes=[(told.title(kind), kind, _lines(told.since.of(kind)), n) for kind, n in told.since.counts().items()],
        sections=_sections(told, extras),
        total=sum(history.seconds(row) for row in told.rows),
    )


def _lines(changes: Sequence[Change]) -> list[dict[str, Any]]:
    """Changes of one kind, a line each; a line opens to its cases."""
    return [
        {
            "fix": line.fix, "where": line.where, "text": line.text, "more": len(line.changes) - _SHOWN,
            "cases": [
                (each.key.case, _anchor(each.key), each.now is not None, each.detail)
                for each in line.changes[:_SHOWN]
            ],
        }
        for line in digest.grouped(changes)
    ]  # fmt: skip


def _sections(told: Digest, extras: Extras) -> list[dict[str, Any]]:
    """One for each code base and device; the groups (fix x backend) with findings come first."""
    changed: dict[Key, list[Change]] = {}
    for change in told.since.changes:
        changed.setdefault(change.key, []).append(change)
    sections: dict[tuple[str, str, str], dict[tuple[str, str], list[dict[str, Any]]]] = {}
    for key, record in told.records.items():
        groups = sections.setdefault((key.target, key.version, key.device), {})
        case = _case(key, record, changed.get(key, []), told.since, extras)
        groups.setdefault((key.fix, key.backend), []).append(case)
    return [
        {
            "title": f"{target} {version}".strip(), "device": device,
            "environment": _environment(told.night, target, version),
            "groups": sorted(
                (_group(fix, backend, cases) for (fix, backend), cases in groups.items()),
                key=lambda group: (not group["findings"], group["fix"], group["backend"]),
            ),
        }
        for (target, version, device), groups in sections.items()
    ]  # fmt: skip


def _environment(night: Night, target: str, version: str) -> list[tuple[str, str]]:
    for document in night.documents:
        here = document["environment"]
        if here.get("target") == target and str(here.get("target_version") or "") == version:
            return [(name, str(value)) for name, value in here.items() if value is not None]
    return []


def _group(fix: str, backend: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    rows = [case["record"] for case in cases]
    ran = [row["legs"] for row in rows if row["legs"]]
    return {
        "fix": fix,
        "backend": backend,
        "cases": sorted(cases, key=lambda case: (not case["finding"], not case["changes"], case["record"]["case"])),
        "counts": report.counts(rows),
        "findings": sum(case["finding"] for case in cases),
        "blind": sum(row["verdict"] == "proved" and not row["tells"] for row in rows),
        "on": Counter(legs[0]["outcome"] for legs in ran).most_common(),
        "off": Counter(" › ".join(leg["outcome"] for leg in legs[1:]) for legs in ran if legs[1:]).most_common(),
        "changed": Counter(title for case in cases for title, _, _ in case["changes"]).most_common(),
    }


def _case(
    key: Key, record: dict[str, Any], changes: Sequence[Change], since: History, extras: Extras
) -> dict[str, Any]:
    declared = [record.get("on", ""), *record.get("expected", ())]
    declared += [""] * len(record["legs"])
    out = dict.fromkeys([record["fix"], record["blames"], *(fix for leg in record["legs"] for fix in leg["reverted"])])
    wheres = [(key.target, key.version, fix) for fix in out]
    return {
        "anchor": _anchor(key),
        "record": record,
        "finding": diagnosis.is_finding(record),
        "seconds": history.seconds(record),
        "changes": [(digest.CHANGES[change.kind], change.kind, change.detail) for change in changes],
        "strip": since.strips.get(key, ()),
        "legs": [_leg(leg, want) for leg, want in zip(record["legs"], declared, strict=False)],
        "maps": _maps(record),
        "no_map": _no_map(record),
        "diffs": [(at[2], _marked(extras.diffs[at])) for at in wheres if extras.diffs.get(at)],
        "notes": [(at[2], extras.notes[at]) for at in wheres if at in extras.notes],
        "command": extras.commands.get(key, ""),
    }


def _leg(leg: Mapping[str, Any], declared: str) -> dict[str, Any]:
    over = leg.get("overflow")
    stray = (
        f"{over['observed_elements']:,} stray elements {over['side']} the buffer"
        + (f", predicted {over['predicted_elements']:,}" if over["predicted_elements"] is not None else "")
        + f"; bytes {over['first_offset_bytes']:+,} to {over['last_offset_bytes']:+,} ({over['detector']})"
        if over
        else ""
    )
    blank = {"error": "", "trace": ""}
    return {**blank, **leg, "declared": declared, "as_declared": declared in ("", leg["outcome"]), "stray": stray}


def _maps(record: Mapping[str, Any]) -> list[tuple[MemoryMap, Markup]]:
    """None where the numbers of a case, which are its scenario's own, can't be drawn."""
    try:
        return [(each, memory_svg.draw(each)) for each in memory_map.maps(record)]
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError):
        return []


def _no_map(record: Mapping[str, Any]) -> str:
    if "params" not in record:
        return "This run was recorded before matrices kept buffers' shapes."
    return "No leg ran." if not record["legs"] else "No leg reported a buffer with its shape."


def _marked(diff: str) -> list[tuple[str, str]]:
    """Each line of a diff with the class that colours it."""
    kinds = {"+": "ins", "-": "del", "@": "at"}
    return [
        ("head" if line.startswith(("--- ", "+++ ")) else kinds.get(line[:1], "same"), line)
        for line in diff.splitlines()
    ]


def _anchor(key: Key) -> str:
    """An id that needs no escaping, in HTML or in a link."""
    return "c" + hashlib.sha256("\0".join(key).encode("utf-8", "replace")).hexdigest()[:12]
