"""A hostile matrix or log: whatever stands in it, it is shown as it is or refused with one line, and nothing breaks."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness import badge, github, history, html_report, report, report_cli
from harness.digest import Digest
from harness.errors import UsageError

NIGHT = json.loads((Path(__file__).parent / "nights/2-fix-deleted.json").read_text())
NIGHT["results"] = [
    next(row for row in NIGHT["results"] if any("overflow" in leg for leg in row["legs"])),
    next(
        row for row in NIGHT["results"] if row["verdict"] == "rotted"
    ),  # a finding, so that there is something to tell
]
INSTEAD: tuple[Any, ...] = (*(None, True, -1, 10**400, float("nan"), "[/red]\x1b[2J\u202e\ud800", {}, [[]], {"a": 1}),)


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for name in value if isinstance(value, dict) else range(min(1, len(value))) if isinstance(value, list) else ():
        yield from paths(value[name], (*path, name))


def put(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    document = copy.deepcopy(NIGHT)
    at = document
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    return document


def show(file: Path) -> None:
    """All that is made of a night."""
    night = history.read_night([file])
    rows = night.documents[0]["results"]
    before = history.Night("before", (NIGHT,))
    told = Digest(night, history.compare(night, [before]))
    html_report.render(told).encode()
    github.summary(told).encode()
    "\n".join(github.annotate(told)).encode()
    json.dumps(badge.badge(told))
    Console(file=io.StringIO(), width=100).print(report.table(rows))
    _ = list(report_cli.lines(told)), report.not_proved(rows), report.exit_code(rows), report.matrix({}, rows, [])


@pytest.mark.parametrize("top", ["results", "environment", "incomplete", "shard", "verdicts", "schema_version"])
def test_whatever_stands_anywhere_is_shown_or_refused(top, tmp_path):
    file, refused = tmp_path / "night.json", 0
    for path in paths({top: NIGHT.get(top)}):
        for value in INSTEAD:
            file.write_text(json.dumps(put(path, value)))
            try:
                show(file)
            except UsageError as error:
                refused += 1
                assert str(error).isprintable() and len(str(error)) < 600, (path, value)
            except Exception as error:
                raise AssertionError(f"{path} = {str(value)[:40]!r}: {error!r}") from error
    assert refused or top in ("environment", "verdicts")


FAULTS = {  # a path in a record, what stands there, and what is said
    "a huge number of steps": (("params", "num_steps"), 10**9, "'params.num_steps'.*less than or equal to 65536"),
    "a number of no width": (("zone_bytes",), 2**80, "'zone_bytes'.*less than"),
    "no number": (("legs", 0, "seconds"), float("nan"), "'legs.0.seconds'.*finite"),
    "time that runs back": (("legs", 0, "seconds"), -1.0, "'legs.0.seconds'.*greater than or equal to 0"),
    "no text": (("case",), 1, "'case'.*valid string"),
    "half a leg": (("legs", 0), {"outcome": "clean", "reverted": "x"}, "'legs.0.reverted'.*valid list"),
    "no verdict": (("verdict",), "[red]" * 99, r"has the verdict '\[red\].{55}', which is none"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_is_said_with_its_place(name, tmp_path):
    path, value, wanted = FAULTS[name]
    (tmp_path / "night.json").write_text(json.dumps(put(("results", 0, *path), value)))
    with pytest.raises(UsageError, match=rf"night.json: results\[0\] has .*{wanted.removeprefix('has ')}"):
        show(tmp_path / "night.json")


TEXTS = {
    "deep": ("[" * 200_000, "is no JSON"),
    "deep within": ('{"schema_version": 1, "results": ' + "[" * 200_000, "is no JSON"),
    "a long number": ("9" * 10_000, "is no JSON"),
    "not UTF-8": ("\udcff", "is no JSON"),
    "nothing": ("", "is no JSON"),
    "a shard of a billion": (json.dumps({**NIGHT, "shard": {"index": 1, "of": 10**9}}), "shard must have index and of"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_no_matrix_is_one_line(name, tmp_path):
    text, wanted = TEXTS[name]
    (tmp_path / "night.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError, match=f"night.json:? {wanted}") as caught:
        show(tmp_path / "night.json")
    assert "\n" not in str(caught.value)
