"""The badge: what a night is in a few words, and its colour."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import history
from harness.badge import badge
from harness.digest import Digest
from harness.history import Night

NIGHTS = Path(__file__).parent / "nights"
BADGES = {
    "1-clean": ("2 fixes proved", "green"),
    "2-fix-deleted": ("fix gone: 27486:slot-assert", "red"),
    "3-toggle-rotted": ("toggle rotted: 27486:slot-assert", "orange"),
    "4-shard-missing": ("incomplete: shard 3 of 4 is missing", "lightgrey"),
}


@pytest.mark.parametrize("name", BADGES)
def test_a_recorded_night(name):
    message, colour = BADGES[name]
    made = badge(Digest(history.read_night([NIGHTS / f"{name}.json"])))
    assert made == {"schemaVersion": 1, "label": "unfix", "message": message, "color": colour}


def night(*verdicts, shard=None, fix="1:f{}"):
    rows = [
        {
            "regression": "1", "fix": fix.format(at), "blames": fix.format(at), "case": "c", "backend": "b",
            "target": "t", "device": "cpu", "tells": True, "verdict": verdict, "reason": None, "legs": [],
        }
        for at, verdict in enumerate(verdicts)
    ]  # fmt: skip
    return Digest(Night("n", ({"environment": {"target": "t"}, "shard": shard, "results": rows},)))


MADE = {
    "one": (night("proved"), "1 fix proved", "green"),
    "a skip is no pass": (night("proved", "skipped"), "not proved: 1:f1", "lightgrey"),
    "two": (night("regressed", "vacuous", "proved"), "2 findings", "red"),
    "both rotted": (night("rotted", "rotted"), "rotted: 1:f0 and 1 more", "orange"),
    "nothing learnt": (night("infra", "infra"), "nothing learnt: 1:f0 and 1 more", "lightgrey"),
    "nothing ran": (night(), "nothing ran", "lightgrey"),
    "a shard alone": (night("proved", shard={"index": 1, "of": 2}), "shard 1 of 2: no finding", "lightgrey"),
    "two in a shard": (
        night("regressed", "vacuous", shard={"index": 1, "of": 2}),
        "shard 1 of 2: regressed: 1:f0 and 1 more",
        "red",
    ),
    "hostile": (night("regressed", fix="a\x1b[31m\n</script>"), r"regressed: a\x1b[31m\n</script>", "red"),
    "long": (night("regressed", fix="x" * 500), "regressed: " + "x" * 68 + "…", "red"),
}


@pytest.mark.parametrize("name", MADE)
def test_a_night_made_up(name):
    told, message, colour = MADE[name]
    assert (badge(told)["message"], badge(told)["color"]) == (message, colour)
