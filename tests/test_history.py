"""History: what changed between nights, on nights made of a letter a case, and on three that were recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness import history
from harness.errors import UsageError
from harness.history import Night

NIGHTS = Path(__file__).parent / "nights"
VERDICT = {"p": "proved", "r": "regressed", "o": "rotted", "s": "skipped", "i": "infra"}


def record(verdict, case="c", seconds=(1.0, 1.0), **more):
    legs = [{"reverted": [], "outcome": "clean", "seconds": each} for each in seconds]
    return {
        "regression": "1", "fix": "1:a", "blames": "1:a", "case": case, "backend": "b", "target": "eagle_kv",
        "device": "cpu", "tells": True, "verdict": verdict, "reason": None, "legs": legs, **more,
    }  # fmt: skip


def document(*records, reverted=(), **environment):
    return {
        "schema_version": 1, "environment": {"target": "eagle_kv", "target_version": None, **environment},
        "session_reverted": list(reverted), "results": list(records),
    }  # fmt: skip


def night(*records, name="n", **more):
    return Night(name, (document(*records, **more),))


def nights(strip):
    """One case, a letter a night; a dot where it is absent. The last letter is tonight."""
    return [night(*([] if letter == "." else [record(VERDICT[letter])])) for letter in strip]


# one letter a night, the last is tonight -> what is said of it
STRIPS = {
    "pp": [],
    "ss": [],
    "pr": ["broken"],
    "sr": ["broken"],
    "pi": ["broken"],
    "rp": ["proved"],
    "sp": ["proved"],
    "ps": ["unproved"],
    "rs": [],
    "ro": ["changed"],
    "rr": ["still"],
    "p.": ["gone"],
    ".p": ["new"],
    ".r": ["new"],
    "pprr": ["still"],  # broken once, and not by turns
    "prp": ["flaky", "proved"],
    "rpr": ["broken", "flaky"],
    "prpp": ["flaky"],
    "p.p": ["new"],
    "psp": ["proved"],  # a skip is no switch
    "rsr": ["broken"],
    "..": [],
}


@pytest.mark.parametrize("strip", STRIPS)
def test_what_changed(strip):
    *before, now = nights(strip)
    found = history.compare(now, before)
    assert [change.kind for change in found.changes] == STRIPS[strip]
    assert found.counts() == {kind: 1 for kind in STRIPS[strip]}


def test_every_kind_is_told_by_some_strip():
    told = {kind for kinds in STRIPS.values() for kind in kinds}
    assert told == set(history.KINDS) - {"slower"}


def test_a_flaky_case_has_its_rate_over_the_nights_that_ran_it():
    *before, now = nights("rpsp.rpp")
    [change] = history.compare(now, before).changes
    assert (change.kind, change.detail) == ("flaky", "a finding in 2 of 6 nights (33%)")
    assert change.rate == pytest.approx(1 / 3)
    assert change.strip[2:6] == ("skipped", "proved", None, "regressed")
    assert history.compare(now, before, nights=4).of("flaky") == []  # older than the last four: .rpp


# seconds of the earlier nights, seconds tonight -> whether that is slower
TIMES = [
    ([2.0], 2.9, False),  # less than 1.5 times
    ([2.0], 3.1, True),
    ([0.1], 0.9, False),  # nine times, and below the floor
    ([0.1], 1.2, True),
    ([10.0], 14.9, False),
    ([2.0, 9.0, 2.0], 8.0, False),  # it has been slower before
    ([2.0, 2.5], 4.0, True),
]


@pytest.mark.parametrize(("earlier", "now", "slower"), TIMES)
def test_slower_is_a_ratio_with_a_floor(earlier, now, slower):
    before = [night(record("proved", seconds=(took / 2, took / 2))) for took in earlier]
    found = history.compare(night(record("proved", seconds=(now / 2, now / 2))), before)
    assert [change.kind for change in found.changes] == ["slower"] * slower
    if slower:
        assert f"{now:.1f} s" in found.changes[0].detail
    broken = history.compare(night(record("regressed", seconds=(now,))), before)
    assert [change.kind for change in broken.changes] == ["broken"]  # its time says nothing


def test_a_slow_night_is_not_a_slow_case():
    def made(*times):
        return night(*(record("proved", case=f"c{at}", seconds=(took,)) for at, took in enumerate(times)))

    found = history.compare(made(*[6.0] * 8, 20.0), [made(*[2.0] * 9)])
    assert [(change.kind, change.key.case, change.rate) for change in found.changes] == [("slower", "c8", 10.0)]
    assert found.environment == ("pace: at the median a case took 3.0 times as long as in its slowest earlier night",)
    found = history.compare(made(*[6.0] * 7), [made(*[2.0] * 7)])  # too few to speak of a night
    assert len(found.of("slower")) == 7 and found.environment == ()


def test_the_same_case_on_another_release_or_device_is_another_case():
    def made(version, device):
        return night(record("proved", target="sglang", device=device), target="sglang", target_version=version)

    found = history.compare(made("0.5.23", "cpu"), [made("0.5.13", "cpu")])
    assert [(change.kind, change.key.version) for change in found.changes] == [("gone", "0.5.13"), ("new", "0.5.23")]
    found = history.compare(made("0.5.13", "cuda"), [made("0.5.13", "cpu")])
    assert [change.kind for change in found.changes] == ["gone", "new"]
    assert history.compare(made("0.5.13", "cpu"), [made("0.5.13", "cpu")]).changes == ()


def test_what_moved_around_the_code_is_said():
    found = history.compare(night(torch="2.12", reverted=["1:a"]), [night(torch="2.11")])
    assert found.environment == ("torch: 2.11 before, 2.12 now", "taken out of every leg: nothing before, 1:a now")


def test_without_an_earlier_night_nothing_is_said():
    found = history.compare(night(record("regressed")), [])
    assert (found.last, found.nights, found.changes, found.counts()) == (None, 0, (), {})


def test_three_recorded_nights():
    clean, deleted, rotted, _ = history.read_baseline(NIGHTS)
    assert [each.name for each in (clean, deleted, rotted)] == ["1-clean", "2-fix-deleted", "3-toggle-rotted"]
    for broken in (deleted, rotted):
        found = history.compare(broken, [clean])
        assert {change.key.fix for change in found.of("broken")} == {"27486:slot-assert"}
        assert len(found.of("broken")) == 22 and not found.of("gone") and not found.of("new")
        assert len(history.compare(clean, [broken]).of("proved")) == 22
    assert len(history.compare(rotted, [clean, deleted]).of("still")) == 22
    assert json.loads(json.dumps(found.as_dict())) == found.as_dict()


def write(path, *documents):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(documents[0]))


def test_nights_of_a_folder_are_in_the_order_of_their_names_and_tonight_is_not_one(tmp_path):
    for name in ("n-10.json", "n-9.json", "n-2/b.json", "n-2/a.json", "tonight.json"):
        write(tmp_path / name, document(record("proved", case=name)))
    (tmp_path / "notes.txt").write_text("no night")
    (tmp_path / "empty").mkdir()
    found = history.read_baseline(tmp_path, but=[tmp_path / "tonight.json"])
    assert [(each.name, len(each.documents)) for each in found] == [("n-2", 2), ("n-9", 1), ("n-10", 1)]
    assert [each.name for each in history.read_baseline(tmp_path / "n-9.json")] == ["n-9"]
    assert history.read_baseline(tmp_path / "empty") == []


BAD = {
    "no JSON": ("{", "is no JSON"),
    "a list": ("[]", "is no matrix"),
    "another schema": ('{"schema_version": 2, "results": []}', "is no matrix"),
    "no results": ('{"schema_version": 1, "environment": {}}', "is no matrix"),
    "no environment": ('{"schema_version": 1, "results": []}', "is no matrix"),
    "a row without a verdict": (
        json.dumps(document({name: value for name, value in record("proved").items() if name != "verdict"})),
        r"results\[0\] has no verdict",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_matrix_is_one_line(tmp_path, name):
    text, said = BAD[name]
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(UsageError, match=said) as caught:
        history.read_night([tmp_path / "m.json"])
    assert "m.json" in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(UsageError, match="could not be read"):
        history.read_night([tmp_path / "none.json"])
    with pytest.raises(UsageError, match="no such file or folder"):
        history.read_baseline(tmp_path / "none")


def test_a_case_twice_in_a_night_is_refused():
    both = Night("n", (document(record("proved")), document(record("regressed"))))
    with pytest.raises(UsageError, match="1:a on c .* is in it twice"):
        both.records()


def test_of_earlier_nights_only_what_this_run_might_have_is_compared():
    def made(*rows, name="n"):
        return Night(name, (document(*(record("proved", case=case, fix=fix, device=on) for fix, case, on in rows)),))

    before = [made(("1:a", "x", "cpu"), ("1:a", "y", "cpu"), ("1:b", "x", "cpu"), ("1:a", "x", "cuda"))]
    now = made(("1:a", "x", "cpu"))

    def gone(fixes, *, whole):
        found = history.compare(now, history.like(now, before, fixes, whole=whole))
        return [(change.kind, change.key.fix, change.key.case, change.key.device) for change in found.changes]

    assert gone(["1:a"], whole=True) == [("gone", "1:a", "y", "cpu")]
    assert gone(["1:a", "1:b"], whole=True) == [("gone", "1:a", "y", "cpu"), ("gone", "1:b", "x", "cpu")]
    assert gone(["1:a"], whole=False) == []
