"""Shards: every test in exactly one, about the same length, and the same cut on every machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import shards
from harness.errors import UsageError
from harness.shards import Shard

TESTS = [f"t.py::test_{name}[{case}]" for name in "abc" for case in range(4)]


@pytest.mark.parametrize(("text", "expected"), [("", None), ("1/1", Shard(1, 1)), ("2/4", Shard(2, 4))])
def test_a_shard_is_named(text, expected):
    assert shards.parse(text) == expected
    assert text == ("" if expected is None else str(expected))


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "1/0", "a/b", "1/4 ", "-1/4", "1/4/2", "٣/4", "1/99999"])
def test_what_is_no_shard_is_refused(text):
    with pytest.raises(UsageError, match=r"must be I/N, the I-th of N parts, like 1/4"):
        shards.parse(text)


@given(
    st.lists(st.sampled_from(TESTS), unique=True),
    st.integers(1, 6),
    st.dictionaries(st.sampled_from(TESTS), st.floats(0, 100)),
)
def test_every_test_is_in_exactly_one_part_and_the_order_does_not_matter(tests, of, seconds):
    parts = shards.cut(tests, of, seconds, str)
    assert len(parts) == of and sorted(sum(parts, [])) == sorted(tests)
    again = shards.cut(tests[::-1], of, seconds, str)
    assert [sorted(part) for part in again] == [sorted(part) for part in parts]


@given(st.dictionaries(st.sampled_from(TESTS), st.floats(0.1, 100), min_size=6), st.integers(2, 4))
def test_no_part_is_longer_than_another_by_more_than_its_own_shortest_test(seconds, of):
    parts = shards.cut(sorted(seconds), of, seconds, str)
    lengths = [sum(seconds[test] for test in part) for part in parts]
    for part, length in zip(parts, lengths, strict=True):
        if part:
            assert length - min(seconds[test] for test in part) <= min(lengths) + 1e-9


# durations of four tests -> which of two parts each is in
CUTS = [
    ({}, "0101"),  # nothing known: turn by turn
    ({"a": 10.0, "b": 1.0, "c": 1.0, "d": 1.0}, "0111"),
    ({"a": 3.0, "b": 3.0, "c": 2.0, "d": 2.0}, "0101"),
    ({"a": 8.0}, "0101"),  # one known: it is the median that the others count as
    ({"a": 9.0, "b": 1.0, "c": 1.0}, "0111"),  # d counts as 1
]


@pytest.mark.parametrize(("seconds", "expected"), CUTS)
def test_the_cut(seconds, expected):
    parts = shards.cut(list("abcd"), 2, seconds, str)
    assert "".join(str(next(at for at, part in enumerate(parts) if test in part)) for test in "abcd") == expected


def test_tests_of_one_unit_stay_together():
    parts = shards.cut(TESTS, 2, {}, lambda test: test.partition("[")[0])
    assert sorted(len({test.partition("[")[0] for test in part}) for part in parts) == [1, 2]
    assert sorted(map(len, parts)) == [4, 8]


def test_a_cut_by_other_durations_has_another_plan():
    one, two = (shards.cut(list("abcd"), 2, seconds, str) for seconds in ({}, {"a": 9.0, "b": 1.0}))
    first, second = shards.facts(Shard(1, 2), one), shards.facts(Shard(2, 2), one)
    assert first == {"index": 1, "of": 2, "cases": 2, "of_cases": 4, "plan": second["plan"]}
    assert shards.facts(Shard(1, 2), two)["plan"] != first["plan"]


def test_durations_are_the_legs_of_the_latest_record():
    def record(test, *seconds):
        return {"test": test, "legs": [{"seconds": each} for each in seconds]}

    older = {"legs": [{"seconds": 3.0}]}  # before records named their test
    assert shards.durations([record("a", 1.0, 2.0), record("a", 0.5), record("b"), older]) == {"a": 0.5}
