"""The digest: one headline and one colour for all reports, and never green where the exit code is not 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import history, report
from harness.digest import Digest
from harness.history import Night

NIGHTS = Path(__file__).parent / "nights"


def row(verdict, fix="1:a", case="c", *, tells=True, blames=None):
    return {
        "regression": "1", "fix": fix, "blames": blames or fix, "case": case, "backend": "b", "target": "t",
        "device": "cpu", "tells": tells, "verdict": verdict, "reason": None, "legs": [],
    }  # fmt: skip


def document(*rows, incomplete=(), shard=None, target="t"):
    return {
        "schema_version": 1, "environment": {"target": target, "device": "cpu"}, "session_reverted": [],
        "incomplete": list(incomplete), "shard": shard, "results": [{**each, "target": target} for each in rows],
    }  # fmt: skip


def digest(*documents):
    return Digest(Night("n", documents))


GONE = "shard 3 of 4 is missing: 120 of 480 cases did not run"
SHARD = {"index": 2, "of": 4}
# documents -> state, headline, exit code
HEADLINES = {
    "proved": ([document(row("proved"))], "well", "All well", 0),
    "nothing ran": ([document()], "infra", "Nothing ran", 4),
    "two findings": ([document(row("regressed"), row("vacuous", "1:b"))], "finding", "Regressed: 1:a and 1 more", 1),
    "rotted": ([document(row("rotted"))], "rotted", "Rotted: 1:a", 3),
    "infra": ([document(row("infra"))], "infra", "Nothing learnt: 1:a", 4),
    "only skipped": ([document(row("skipped"))], "infra", "Not proved: 1:a", 4),
    "on inputs that cannot tell": ([document(row("proved", tells=False))], "infra", "Not proved: 1:a", 1),
    "incomplete": ([document(row("proved"), incomplete=[GONE])], "infra", "Incomplete: shard 3 of 4 is missing", 4),
    "incomplete twice": (
        [document(row("proved"), incomplete=["shard 2 of 4: the run was cut short: 1 of 9 cases did not run", GONE])],
        "infra", "Incomplete: shard 2 of 4: the run was cut short and 1 more", 4,
    ),
    "incomplete, and no more is known": (
        [document(incomplete=["the run was cut short before it knew its cases"])],
        "infra", "Incomplete: the run was cut short before it knew its cases", 4,
    ),
    "a finding in what ran": (
        [document(row("regressed"), row("skipped", "1:b"), incomplete=[GONE])],
        "infra", "Incomplete: regressed: 1:a", 4,
    ),
    "what is not proved may not have run": (
        [document(row("skipped"), incomplete=[GONE])], "infra", "Incomplete: shard 3 of 4 is missing", 4,
    ),
    "a shard proves nothing alone": (
        [document(row("proved"), row("skipped", "1:b"), shard=SHARD)], "infra", "Shard 2 of 4: no finding", 0,
    ),
    "a shard that is all": ([document(row("proved"), shard={"index": 1, "of": 1})], "well", "All well", 0),
    "an empty shard": ([document(shard=SHARD)], "infra", "Shard 2 of 4: nothing ran", 0),
    "a shard with a finding": (
        [document(row("regressed"), shard=SHARD)], "finding", "Shard 2 of 4: regressed: 1:a", 1,
    ),
    "a shard that was cut short": (
        [document(row("proved"), shard=SHARD, incomplete=["the run was cut short: 1 of 2 cases did not run"])],
        "infra", "Incomplete: the run was cut short", 4,
    ),
    "shards that nobody joined": (
        [document(row("proved"), shard=SHARD), document(row("proved", case="d"), shard={"index": 1, "of": 4})],
        "infra", "Incomplete: shard 2 of 4 stands alone and 1 more", 4,
    ),
    "one of two runs is incomplete": (
        [document(row("proved")), document(row("proved"), target="u", incomplete=[GONE])],
        "infra", "Incomplete: shard 3 of 4 is missing", 4,
    ),
    "a fix that only a neighbour was proved for": (
        [document(row("proved"), row("skipped", case="d", blames="1:b"))], "infra", "Not proved", 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADLINES)
def test_a_headline(name):
    documents, *expected = HEADLINES[name]
    told = digest(*documents)
    assert [told.state, told.headline, told.exit_code] == expected


@pytest.mark.parametrize("name", HEADLINES)
def test_only_what_ends_with_0_and_is_whole_is_well(name):
    told = digest(*HEADLINES[name][0])
    whole = not told.incomplete and not told.part
    assert (told.state == "well") == (told.exit_code == 0 and whole) == (told.headline == "All well")


def test_of_several_documents_each_sentence_says_which_it_is_about():
    told = digest(document(row("proved")), document(row("proved"), target="u", incomplete=[GONE]))
    assert told.incomplete == [f"{GONE} (u on cpu)"] and told.places == ["t on cpu", "u on cpu"]
    assert digest(document(incomplete=[GONE])).incomplete == [GONE]
    told = digest(document(row("proved")), {"environment": {"target": "u"}, "results": [], "incomplete": ["none"]})
    assert told.incomplete == ["none (u)"]


def test_a_document_from_before_there_were_shards_is_whole():
    old = document(row("proved"))
    del old["incomplete"], old["shard"]
    assert (digest(old).incomplete, digest(old).part, digest(old).state) == ([], "", "well")


def test_a_case_that_is_missing_where_not_all_ran_may_still_be_there():
    clean, missing = (history.read_night([NIGHTS / f"{name}.json"]) for name in ("1-clean", "4-shard-missing"))
    since = history.compare(missing, [clean])
    assert since.counts() == {"gone": 12} and Digest(missing, since).title("gone") == "Gone or not run"
    assert Digest(clean).title("gone") == "Gone"


def test_the_night_made_of_the_clean_one():
    """As tests/nights/README.md says."""
    clean, missing = (history.read_document(NIGHTS / f"{name}.json") for name in ("1-clean", "4-shard-missing"))
    kept = [each for at, each in enumerate(clean["results"]) if at % 4 != 2]
    assert missing == report.matrix(
        clean["environment"], kept, [], incomplete=["shard 3 of 4 is missing: 12 of 48 cases did not run"]
    )
