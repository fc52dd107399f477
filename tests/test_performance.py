"""The page's figures are those of the files under results/, and no others."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def performance() -> ModuleType:
    spec = importlib.util.spec_from_file_location("performance", ROOT / "benchmarks" / "performance.py")
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    sys.modules["performance"] = made  # dataclasses look it up
    spec.loader.exec_module(made)
    return made


def test_the_table_is_what_the_files_say(performance: ModuleType) -> None:
    text = performance.PAGE.read_text()
    assert text == performance.page(text), "python benchmarks/performance.py writes it anew"


def test_a_figure_without_a_file_is_not_measured(
    performance: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(performance, "ROOT", tmp_path)
    assert performance.table().count("| not measured |") == len(performance.figures())
    (tmp_path / "results").mkdir()
    document = {"command": "c", "environment": {"device": "d", "commit": "e"}}
    slow = {**document, "by_shapes": {"a_second_by_slope": 199.9}, "by_toggles": [{"rate_to_none": 1.01}]}
    (tmp_path / "results" / "sweep-cuda.json").write_text(json.dumps(slow))
    rows = [line.split("|")[4:6] for line in performance.table().splitlines() if "sweep" in line or "500 more" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [["199.9", "missed"], ["1.01", "met"]]
