"""The test suite with the versions that are installed here: what it said goes into results/supply.json.

    python benchmarks/supply.py                       # all of it
    python benchmarks/supply.py tests/test_cli.py     # or what pytest is given
    python benchmarks/supply.py --page                # what docs/dependencies.md says of results/supply.json

An entry has the versions of Python and of every direct dependency, pytest's counts, the tests that failed, the machine
and a digest of the sources. It takes the place of an earlier one with the same versions and arguments. Other versions
need an environment of their own: `make test VENV=out/lowest CONSTRAINTS=constraints-lowest.txt` makes one.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from packaging.requirements import Requirement
from packaging.version import Version
from record import ROOT, environment

KEPT = ROOT / "results/supply.json"
Entry = dict[str, Any]


def direct() -> dict[str, Requirement]:
    """What pyproject.toml depends on, as the installed unfix says it, by name. The extras are left out."""
    listed = [Requirement(line) for line in importlib.metadata.requires("unfix") or []]
    return {each.name: each for each in listed if "extra" not in str(each.marker)}


def run(arguments: list[str]) -> Entry:
    """Run the suite here, and say what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "junit.xml")
        subprocess.run([sys.executable, "-m", "pytest", *arguments, f"--junitxml={report}"], cwd=ROOT, check=False)
        return entry(report, arguments)


def entry(report: Path, arguments: list[str]) -> Entry:
    """What pytest's JUnit file and the versions that are installed here amount to."""
    from harness.code_base import eagle_kv
    from harness.commit import digest

    cases = list(ElementTree.parse(report).iter("testcase"))
    said = {kind: [case for case in cases if case.find(kind) is not None] for kind in ("failure", "error", "skipped")}
    failed = sorted({f"{case.get('classname')}::{case.get('name')}" for case in said["failure"] + said["error"]})
    here = environment("cpu")
    return {
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in sorted(direct())},
        "command": " ".join(["python -m pytest", *arguments]),
        "passed": len(cases) - len(failed) - len(said["skipped"]), "skipped": len(said["skipped"]), "failed": failed,
        "machine": here["machine"], "cores": here["cores"], "commit": here["commit"],
        "sources": digest(ROOT, eagle_kv(ROOT)),
    }  # fmt: skip


def load() -> list[Entry]:
    return json.loads(KEPT.read_text())["runs"] if KEPT.exists() else []


def keep(new: Entry) -> None:
    """Put it among the others, by version of Python."""
    same = ("versions", "command")
    runs = [old for old in load() if any(old[key] != new[key] for key in same)] + [new]
    runs.sort(key=lambda each: (Version(each["versions"]["python"]), each["command"]))
    part = KEPT.with_suffix(".part")
    part.write_text(json.dumps({"schema_version": 1, "runs": runs}, indent=1) + "\n")
    os.replace(part, KEPT)


def tried(name: str, runs: list[Entry]) -> list[str]:
    """The versions of it, lowest first, with which no test failed."""
    return sorted({each["versions"][name] for each in runs if not each["failed"]}, key=Version)


def page(runs: list[Entry]) -> str:
    """The table of runs, in Markdown."""
    shown = ("python", "torch", "triton", "pytest", "numpy", "typer", "pydantic")
    lines = ["| " + " | ".join((*shown, "command", "passed", "failed", "skipped", "sources")) + " |"]
    lines += ["|---" * (len(shown) + 5) + "|"]
    for each in runs:
        counts = (each["passed"], len(each["failed"]), each["skipped"])
        cells = [each["versions"][name] for name in shown] + [f"`{each['command']}`", *counts, each["sources"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--page"]:
        print(page(load()), end="")
    else:
        found = run(sys.argv[1:])
        keep(found)
        print(f"benchmark: {found['passed']} passed, {len(found['failed'])} failed; {KEPT}", file=sys.stderr)
        sys.exit(bool(found["failed"]))
