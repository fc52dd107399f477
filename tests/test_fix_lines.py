"""The heart of the promise: take one fix's line away for real, and exactly that fix is blamed.

Each row deletes, in a copy of the kernels, the very lines that `unfix diff` shows as removed, and runs the same
telling cases. Nothing else may be blamed: neither a fix on the same path nor one in the same function.
"""

from __future__ import annotations

import difflib
import importlib
import shutil
from pathlib import Path

import pytest

from harness import overlay
from harness.case import Case
from harness.fixes import Catalogue, load
from harness.prover import Prover, Result
from harness.sandbox import Servers
from regressions.scenarios import draft

_ALL = load(Path(__file__).parents[1] / "toggles")
CATALOGUE = Catalogue(tuple(fix for fix in _ALL if "eagle_kv" in fix.code_bases))
# the guards of #27338 and #27460 on the path that a topk-factor sizes: at the row's last element, and past it
ON_GRAPHS = [
    (fix, {"path": "cuda_graph", "topk": 2, "num_steps": 3, "max_bs": 1, "max_context_len": 8, "seq_lens": [length]})
    for fix in ("27338:capacity-assert", "27460:capacity-assert")
    for length in (5, 6)
]


def telling_cases() -> list[tuple[str, Case]]:
    """A case that tells it from its absence for every fix, and boundary cases that a neighbour could upset."""
    cases = [(fix.id, _scenario(fix.id).case(fix.id)) for fix in CATALOGUE]
    return cases + [(fix, draft.case(fix, **options)) for fix, options in ON_GRAPHS]


def _scenario(fix: str):
    return importlib.import_module(f"regressions.scenarios.{CATALOGUE.fix(fix).scenario}")


def prove_all(sandbox, root: Path) -> list[Result]:
    prover = Prover(CATALOGUE, device="cpu", root=root, servers=Servers.around(sandbox))
    return [prover.prove(fix, case) for fix, case in telling_cases()]


@pytest.fixture
def copy(tmp_path, root) -> Path:
    shutil.copytree(root / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def take_out(fix: str, copy: Path, *, keep_narrow: bool = False) -> None:
    """Delete the fix's lines in the copy; ``keep_narrow``: put what stood there before the fix in their place."""
    plan = overlay.plan(CATALOGUE.reversals([fix], "eagle_kv"), [copy / "kernels"])
    assert plan
    for edited in plan.values():
        kept = []
        for line in difflib.ndiff(edited.old.decode().splitlines(True), edited.new.decode().splitlines(True)):
            if line.startswith("  ") or (keep_narrow and line.startswith("+ ")):
                kept.append(line[2:])
        text = "".join(kept)
        assert text != edited.old.decode()
        edited.original.write_text(text)


def blamed(results: list[Result]) -> dict[str, set[str]]:
    """Fix -> its findings."""
    found: dict[str, set[str]] = {}
    for result in results:
        if result.verdict.kind != "proved":
            found.setdefault(result.verdict.fix, set()).add(f"{result.fix} {result.case.id}: {result.verdict}")
    return found


def test_with_every_line_in_place_all_is_proved(sandbox, copy):
    results = prove_all(sandbox, copy)
    assert blamed(results) == {}
    assert {result.fix for result in results if result.case.tells} == set(CATALOGUE.ids)


@pytest.mark.parametrize("fix", CATALOGUE.ids)
def test_a_deleted_line_blames_its_own_fix(fix, sandbox, copy):
    take_out(fix, copy)
    found = blamed(prove_all(sandbox, copy))
    assert set(found) == {fix}, "\n".join(line for lines in found.values() for line in lines)


@pytest.mark.parametrize("fix", sorted(draft.SIZE_FIXES))
def test_a_row_that_is_narrow_again_blames_its_topk_factor(fix, sandbox, copy):
    take_out(fix, copy, keep_narrow=True)
    found = blamed(prove_all(sandbox, copy))
    assert set(found) == {fix}, "\n".join(line for lines in found.values() for line in lines)
