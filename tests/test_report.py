"""Reports: counts, exit codes, and that no empty, skipped or blind matrix reads as a green one."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from harness import report
from harness.case import Case
from harness.errors import InfraError
from harness.outcome import Leg
from harness.prover import Result
from harness.verdict import VERDICTS, Expected, Verdict


def row(verdict, fix="1:a", *, tells=True, blames=None, case="c", legs=()):
    return {
        "regression": fix.partition(":")[0], "fix": fix, "blames": blames or fix, "case": case, "backend": "b",
        "verdict": verdict, "tells": tells, "reason": None, "legs": list(legs),
    }  # fmt: skip


MATRICES = {
    "nothing ran": ([], 4),
    "proved": ([row("proved")], 0),
    "proved, some skipped": ([row("proved"), row("skipped")], 0),
    "all skipped": ([row("skipped"), row("skipped", "1:b")], 4),
    "one fix skipped on all its cases": ([row("proved"), row("skipped", "1:b")], 4),
    "blind only": ([row("proved", tells=False)], 1),
    "blind, and a telling one skipped": ([row("proved", tells=False), row("skipped")], 4),
    "blind beside a telling one": ([row("proved", tells=False), row("proved")], 0),
    "blind for one fix": ([row("proved"), row("proved", "1:b", tells=False)], 1),
    "regressed": ([row("proved"), row("regressed")], 1),
    "vacuous": ([row("proved"), row("vacuous")], 1),
    "unexpected": ([row("proved"), row("unexpected")], 1),
    "not reached": ([row("proved"), row("not-reached")], 1),
    "rotted": ([row("proved"), row("rotted")], 3),
    "rotted before a finding": ([row("regressed"), row("rotted")], 3),
    "infra before all": ([row("regressed"), row("rotted"), row("infra")], 4),
    "a verdict that nobody knows": ([row("proved"), row("splendid")], 1),
}


@pytest.mark.parametrize("name", MATRICES)
def test_exit_code(name):
    records, code = MATRICES[name]
    assert report.exit_code(records) == code


def test_every_verdict_has_an_exit_code():
    codes = {kind: report.exit_code_of(kind) for kind in VERDICTS}
    assert codes == {
        "proved": 0, "skipped": 4, "regressed": 1, "vacuous": 1, "unexpected": 1, "not-reached": 1,
        "rotted": 3, "infra": 4,
    }  # fmt: skip
    for kind in set(VERDICTS) - {"proved", "skipped"}:
        assert report.exit_code([row(kind)]) == codes[kind]


def test_findings_are_counted_for_the_fix_that_is_blamed():
    records = [row("rotted", blames="1:b"), row("proved"), row("proved", tells=False), row("skipped", "2:c")]
    assert report.fixes_proved(records) == {
        "1:b": {"proved": 0, "cannot_tell": 0, "skipped": 0, "findings": 1},
        "1:a": {"proved": 1, "cannot_tell": 1, "skipped": 0, "findings": 0},
        "2:c": {"proved": 0, "cannot_tell": 0, "skipped": 1, "findings": 0},
    }
    assert report.counts(records) == {"proved": 2, "skipped": 1, "rotted": 1}
    assert report.summary_line(records) == "unfix: 4 cases: 2 proved, 1 skipped, 1 rotted"


def test_a_matrix_does_not_depend_on_the_order_of_its_workers():
    records = [row("proved", "2:c"), row("proved", case="z"), row("skipped", case="a")]
    one, other = (report.matrix({"python": "3"}, rows, []) for rows in (records, records[::-1]))
    assert one == other
    assert (one["schema_version"], one["verdicts"]) == (1, {"proved": 2, "skipped": 1})
    assert [entry["case"] for entry in one["results"]] == ["a", "z", "c"]


def test_the_table_counts_what_legs_did():
    legs = [{"outcome": "clean"}, {"outcome": "guarded"}, {"outcome": "overflow"}]
    console = Console(file=io.StringIO(), width=160)
    console.print(report.table([row("proved", legs=legs), row("proved", legs=legs), row("rotted", "1:b")]))
    text = console.file.getvalue()
    assert all(part in text for part in ("2 clean", "2 guarded > overflow", "2 proved", "1 rotted"))


def result(verdict, legs=(), expected=(), **more):
    return Result("1:a", Case(id="c", entry="m:f", params={}, **more), "eagle_kv", "cpu", verdict, legs, expected)


def test_a_case_explained():
    over = {
        "side": "after", "observed_elements": 3, "predicted_elements": 2, "first_offset_bytes": 0,
        "last_offset_bytes": 11, "buffers": ["(8,) int32 at f.py:1: x = torch.zeros(8)"],
    }  # fmt: skip
    legs = (
        Leg((), "clean", 0.25, facts={"row": 16}),
        Leg(("1:a",), "overflow", 0.5, error="x[0]: 1", overflow=over),
        Leg(("1:a", "1:b"), "error", 0.5, error="KeyError: 1", trace="Traceback\n  in f\nKeyError: 1"),
    )
    expected = (Expected("overflow"), Expected("guarded"))
    text = report.explain(result(Verdict("rotted", "the reason", "1:b"), legs, expected))
    for part in (
        "1:a on c (eagle_kv, cpu)", "every fix in\n      clean (declared: clean), 0.25 s", "row 16",
        "out: 1:a, 1:b", "3 stray elements after the buffer, predicted 2; bytes 0 to 11", "(8,) int32 at f.py:1",
        "error (declared: guarded)", "in f", "rotted: the reason", "this is about 1:b",
    ):  # fmt: skip
        assert part in text


def test_a_case_that_never_ran_is_explained_too():
    text = report.explain(result(Verdict("skipped", "needs a CUDA device", "1:a")))
    assert text.splitlines()[-1].strip() == "skipped: needs a CUDA device"


def test_a_result_as_the_json_contract_has_it():
    entry = result(Verdict("proved", None, "1:a"), regression="26340", backend="b").as_dict()
    assert json.loads(json.dumps(entry)) == entry
    assert (entry["regression"], entry["fix"], entry["blames"], entry["verdict"]) == ("26340", "1:a", "1:a", "proved")
    assert result(Verdict("proved", None, "1:a")).as_dict()["regression"] == "1"


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    target = tmp_path / "new" / "m.json"
    report.write_json(target, {"a": 1})
    assert json.loads(target.read_text()) == {"a": 1}
    with pytest.raises(UnicodeEncodeError):
        report.write_text(target, "\ud800")
    assert json.loads(target.read_text()) == {"a": 1}
    assert os.listdir(target.parent) == ["m.json"]


@pytest.mark.parametrize("where", ["a-file/m.json", "."])
def test_a_file_that_cannot_be_written_is_one_line(tmp_path, where):
    (tmp_path / "a-file").write_text("")
    with pytest.raises(InfraError, match="could not be written") as caught:
        report.write_json(Path(tmp_path, where), {})
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["a-file"]
