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
def performance(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
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
    assert performance.table().count("| not measured yet |") == len(performance.figures())
    (tmp_path / "results").mkdir()
    document = {"command": "c", "environment": {"device": "d", "commit": "e"}}
    slow = {**document, "by_shapes": {"a_second_by_slope": 199.9}, "by_toggles": [{"rate_to_none": 1.01}]}
    for device in ("cuda", "cpu"):
        (tmp_path / "results" / f"sweep-{device}.json").write_text(json.dumps(slow))
    rows = [line.split("|")[4:6] for line in performance.table().splitlines() if "sweep" in line or "500 more" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [["199.9", "missed"], ["1.01", "met"]]


def test_a_kernel_row_is_the_worst_and_needs_all_of_its_sizes(
    performance: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(performance, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    figures = {"draft 84 MB even: theirs / ours": 1.5, "draft 84 MB uneven: theirs / ours": 1.25}
    left_out = {"draft 537 MB even: theirs / ours": 1.5, "draft 537 MB uneven: theirs / ours": None}
    targets = [
        {"what": what, "figure": figure, "met": figure is not None and figure >= 1.3}
        for what, figure in {**figures, **left_out}.items()
    ]
    document = {"command": "c --json f", "environment": {"device": "d", "commit": "e"}, "targets": targets}
    (tmp_path / "results" / "kernels-cuda.json").write_text(json.dumps(document))
    rows = [line.split("|")[4:7] for line in performance.table().splitlines() if "MB: theirs" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["1.250 (draft 84 MB uneven)", "missed", "`c`, d, e"],
        ["not measured yet: the file has no 'draft 537 MB: theirs / ours'", "", "`c`, d, e"],
    ]


def test_a_matrix_is_as_good_as_its_slowest_run(
    performance: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(performance, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    environment = {"device": "d", "commit": None, "sources": "e"}
    run = {"cases": 9, "jobs": 2, "workers_a_gpu": 2, "leg_seconds": 50.0, "environment": environment}
    times = (("0", 60.0, 1.0), ("0,1", 30.0, 2.0), ("1,0", 36.0, 1.67))
    runs = [{**run, "visible": at, "wall_seconds": took, "speed_up": faster} for at, took, faster in times]
    document = {"command": "c", "runs": runs}
    (tmp_path / "results" / "h200-x2.json").write_text(json.dumps(document))
    rows = [line.split("|")[4:7] for line in performance.table().splitlines() if "`c`" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["60.0 s (9 cases, 2 workers)", "met", "`c`, d, sources e"],
        ["50.0 s over 2 workers: 25 s", "", "`c`, d, sources e"],
        ["2.0 (30.0 s, 2 workers a GPU), 1.67 (36.0 s, 2 workers a GPU)", "missed", "`c`, d, sources e"],
        ["50.0 s over 2 workers: 25 s; 50.0 s over 2 workers: 25 s", "", "`c`, d, sources e"],
    ]
