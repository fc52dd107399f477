"""The shipped toggle files on every release of SGLang that was fetched: each fix is in or not in, never rotted.

Skipped where no release is in the cache; `unfix check --release V …` fetches them.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from harness import fixes, overlay, upstream, variants
from harness.errors import RottedError
from harness.targets import locate

CATALOGUE = fixes.load(Path(__file__).parents[1] / "toggles")
IDS = [fix.id for fix in CATALOGUE if "sglang" in fix.code_bases]
RELEASES = upstream.cached()
needs_releases = pytest.mark.skipif(not RELEASES, reason="no release of SGLang is in the cache")


@cache
def state(release, name):
    return variants.state(CATALOGUE.fix(name), "sglang", [upstream.release(release).root])


def has_code(release, name):
    """Whether a release has every target of one of the fix's forms, however those read."""
    fix, roots = CATALOGUE.fix(name), [upstream.release(release).root]

    def found(form):
        try:
            return all(locate(reversal.target, roots) for reversal in form.reversals)
        except RottedError:
            return False

    return any(map(found, (*fix.variants_for("sglang"), *fix.unfixed_for("sglang"))))


@needs_releases
@pytest.mark.parametrize("release", RELEASES)
def test_every_fix_is_in_or_not_in(release):
    rotted = {name: here.message for name in IDS if (here := state(release, name)).kind == "rotted"}
    assert {name: why for name, why in rotted.items() if has_code(release, name)} == {}


@needs_releases
@pytest.mark.parametrize("release", RELEASES)
def test_what_turns_a_fix_compiles_and_changes_something(release):
    roots = [upstream.release(release).root]
    for name in IDS:
        if (here := state(release, name)).kind != "rotted":
            edited = overlay.plan(here.reversals, roots).values()
            assert edited and all(each.old != each.new for each in edited), name


@needs_releases
@pytest.mark.parametrize("name", IDS)
def test_a_fix_that_is_in_stays_in(name):
    kinds = [state(release, name).kind for release in RELEASES]
    since = kinds.index("fixed") if "fixed" in kinds else len(kinds)
    assert set(kinds[since:]) <= {"fixed"}, dict(zip(RELEASES, kinds, strict=True))
