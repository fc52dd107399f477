"""Merging shards: the whole, or what is missing of it, or one line on why these parts are no whole."""

from __future__ import annotations

import json

import pytest

from harness import report
from harness.errors import UsageError
from harness.merge import merge


def record(test, verdict="proved"):
    return {
        "regression": "1", "fix": "1:a", "blames": "1:a", "case": test, "backend": "b", "target": "eagle_kv",
        "device": "cpu", "tells": True, "verdict": verdict, "reason": None, "legs": [], "test": test,
    }  # fmt: skip


def part(index, tests, *, of=2, of_cases=4, plan="p", incomplete=(), reverted=(), **environment):
    shard = {"index": index, "of": of, "cases": len(tests), "of_cases": of_cases, "plan": plan}
    around = {"commit": "c", "sources": "s", "target": "eagle_kv", "target_version": None, "device": "H200"}
    records = [record(test) for test in tests]
    return report.matrix({**around, **environment}, records, list(reverted), shard=shard, incomplete=incomplete)


def joined(*parts):
    return merge([(f"{at}.json", each) for at, each in enumerate(parts, 1)])


def test_all_parts_are_the_whole_in_any_order():
    whole = report.matrix(part(1, "")["environment"], [record(test) for test in "abcd"], [])
    assert joined(part(1, "ac"), part(2, "bd")) == joined(part(2, "bd"), part(1, "ac")) == whole


def test_a_missing_shard_is_said_to_be_missing():
    found = joined(part(1, "ab", of=4, of_cases=9), part(3, "cde", of=4, of_cases=9))
    assert found["incomplete"] == ["shards 2, 4 of 4 are missing: 4 of 9 cases did not run"]
    assert len(found["results"]) == 5 and report.exit_code(found["results"], incomplete=found["incomplete"]) == 4
    assert joined(part(2, "ab"))["incomplete"] == ["shard 1 of 2 is missing: 2 of 4 cases did not run"]


def test_a_shard_that_was_cut_short_stays_so():
    killed = part(1, "a", incomplete=["the run was cut short: 1 of 2 cases did not run"])
    del killed["shard"]["plan"], killed["shard"]["of_cases"], killed["shard"]["cases"]  # its log has none
    assert joined(killed, part(2, "bd"))["incomplete"] == [
        "shard 1 of 2: the run was cut short: 1 of 2 cases did not run"
    ]
    assert joined(killed)["incomplete"][0] == "shard 2 of 2 is missing: did not run"


def test_two_machines_may_differ_in_what_is_around_the_code():
    found = joined(part(1, "ac"), part(2, "bd", device="H100", driver="580"))
    assert (found["environment"]["device"], found["environment"]["driver"]) == ("H200 / H100", "580")


OTHERS = [
    (part(2, "bd", commit="d"), "1.json and 2.json are of two runs: commit c and d"),
    (part(2, "bd", sources="t"), "of two runs: sources s and t"),
    (part(2, "bd", target="sglang"), "of two runs: target eagle_kv and sglang"),
    (part(2, "bd", target_version="0.5.23"), "of two runs: target_version None and 0.5.23"),
    (part(2, "bd", reverted=["1:a"]), r"of two runs: taken out of every leg: \[\] and \['1:a'\]"),
    (part(2, "bd", of=4), "of two runs: cut into 2 and 4"),
    (part(2, "bd", plan="q"), "cut by different --baseline durations: p and q"),
    (part(1, "bd"), "1.json and 2.json are both shard 1 of 2"),
    (part(2, "ad"), "1.json and 2.json both ran a"),
    ({**part(2, "bd"), "shard": None}, "2.json is no shard: only what `unfix run --shard I/N` wrote can be joined"),
]


@pytest.mark.parametrize(("other", "said"), OTHERS)
def test_parts_of_two_runs_are_refused(other, said):
    with pytest.raises(UsageError, match=said):
        joined(part(1, "ac"), other)


def test_the_command(unfix, tmp_path):
    for index, tests in ((1, "ac"), (2, "bd")):
        (tmp_path / f"{index}.json").write_text(json.dumps(part(index, tests)))
    whole = tmp_path / "whole.json"
    ended = unfix("merge", str(tmp_path / "1.json"), str(tmp_path / "2.json"), "--json", str(whole))
    assert (ended.returncode, ended.stdout) == (0, "unfix: 4 cases: 4 proved\n")
    assert len(json.loads(whole.read_text())["results"]) == 4
    ended = unfix("merge", str(tmp_path / "2.json"))
    assert ended.returncode == 4
    assert ended.stdout == "shard 1 of 2 is missing: 2 of 4 cases did not run\nunfix: 2 cases: 2 proved\n"
    (tmp_path / "torn.jsonl").write_text('{"schema_version": 1, "ru')
    ended = unfix("merge", *(str(tmp_path / name) for name in ("1.json", "2.json", "torn.jsonl")))
    assert ended.returncode == 4 and "torn.jsonl:1: is no run's log" in ended.stdout and "4 proved" in ended.stdout
    ended = unfix("merge", str(tmp_path / "torn.jsonl"))
    assert ended.returncode == 2 and "torn.jsonl:1: is no run's log" in ended.stderr
    ended = unfix("merge", str(whole))
    assert ended.returncode == 2 and ended.stderr.startswith(f"unfix: {whole} is no shard") and not ended.stdout
