"""docs/trust.md names tests that are there, and figures of files: nothing in it that a reader can't run again."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [line for line in (ROOT / "docs" / "trust.md").read_text().splitlines() if line.startswith("| ")]
FAULTS = [row for row in ROWS if "test_" in row or "`make audit`" in row or "the same" in row.rpartition(" | ")[2]]


def named(row: str) -> list[tuple[str, str]]:
    """(file, test) of a row's last column; without a file it is the last one that was named, without a test ""."""
    found, file = [], ""
    for at, test in re.findall(r"(test_\w+\.py)?((?:::\w+)*)", row.rpartition(" | ")[2]):
        if at or test:
            file = at or file
            found.append((file, test.rpartition(":")[2]))
    return found


@pytest.mark.parametrize("row", FAULTS, ids=lambda row: row[2:60])
def test_each_test_is_there(row):
    tests = named(row)
    assert tests or "the same" in row, "no test shows it"
    for file, test in tests:
        assert file, test
        text = (ROOT / "tests" / file).read_text()
        assert not test or re.search(rf"def {test}\(|^{test} = ", text, re.MULTILINE), f"{file} has no {test}"


def test_a_name_is_read():
    row = "| f | w | `test_a.py::test_b[x]`, `::test_c`, test_d.py::TestE::test_f (11), `make audit`, test_g.py |"
    assert named(row) == [
        ("test_a.py", "test_b"), ("test_a.py", "test_c"), ("test_d.py", "test_f"), ("test_g.py", "")
    ]  # fmt: skip


def test_the_tables_are_what_the_files_say(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    spec = importlib.util.spec_from_file_location("trust_page", ROOT / "benchmarks" / "trust.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    text = made.PAGE.read_text()
    assert text == made.page(text), "python benchmarks/trust.py writes them anew"
