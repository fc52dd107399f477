"""Records a run: what workers report becomes the log as it comes, the matrix at the end, and pytest's exit status.

A plugin of the process that the run was started in. A test's report carries ``unfix``, the record of its case, and
``unfix_environment``; both travel from a worker with it.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Generator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from harness import commit, report, runlog
from harness.code_base import CodeBase
from harness.errors import InfraError
from harness.runlog import Log, Writer
from harness.shards import Shard


def facts(
    root: Path, code_base: CodeBase, device: str, selected: Sequence[str], reverted: Sequence[str], shard: Shard | None
) -> dict[str, Any]:
    """What a run is of: all of it must be the same for another to go on from its log."""
    return {
        "target": code_base.name, "target_version": code_base.version, "device": device,
        "target_commit": commit.commit(code_base.sources) if code_base.name != "eagle_kv" else None,
        "commit": commit.commit(root), "sources": commit.digest(root, code_base),
        "python": platform.python_version(), **{name: _version(name) for name in ("torch", "triton")},
        "session_reverted": list(reverted), "selected": list(selected),
        "shard": {"index": shard.index, "of": shard.of} if shard else None,
    }  # fmt: skip


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class Recorder:
    def __init__(self, option: argparse.Namespace, run: dict[str, Any]):
        """``run``: its facts. Raises InfraError and UsageError as the log does."""
        self._option = option
        self._writer = Writer(Path(option.unfix_log), run, resume=option.unfix_resume) if option.unfix_log else None
        self._log = self._writer.before if self._writer else Log(run)
        self.done = frozenset(self._log.done())
        self._fixes: dict[str, str] = {}  # of tests seen so far: a lost worker's report names its test only
        self._complaints: list[str] = []
        self._counted = False

    def _write(self, kind: str, value: Any) -> None:
        if self._writer:
            self._writer.write(kind, value)

    def collected(self, cases: int, shard: dict[str, Any] | None = None, left_out: str = "") -> None:
        """How many cases this run still has to run. ``left_out``: what others than unfix took out of it."""
        self._counted = True
        now = {"cases": cases + len(self.done), "shard": shard or self._log.collected.get("shard")}
        now |= {"left_out": left_out} if left_out else {}
        if now != self._log.collected:
            self._log.collected = now
            self._write("collected", now)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        if not self._counted:
            self.collected(len(ids))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if told := getattr(node, "workeroutput", {}).get("unfix"):
            self.collected(told["cases"], told["shard"], told["left_out"])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "???" and report.failed:  # xdist's report of a worker that died
            self._add(report.nodeid, self._lost(report.nodeid))
        if report.when != "call" or not (record := getattr(report, "unfix", None)):
            return
        if (seen := getattr(report, "unfix_environment", None)) and not self._log.environment:
            self._log.environment = {**seen, **{name: self._log.run[name] for name in runlog.IDENTITY}}
            self._write("environment", self._log.environment)
        self._add(report.nodeid, record)

    def _add(self, nodeid: str, record: dict[str, Any]) -> None:
        self._fixes[nodeid.partition("[")[0]] = record["fix"]
        self._log.results[nodeid] = {"test": nodeid, **record}
        self._write("result", self._log.results[nodeid])

    def _lost(self, nodeid: str) -> dict[str, Any]:
        """The record of a case whose worker died: lost is not proved, and must not be missing either."""
        test, _, case = nodeid.partition("[")
        fix = self._fixes.get(test, "unknown")
        reason = f"the worker that ran {nodeid} was lost"
        return {
            "regression": fix.partition(":")[0], "fix": fix, "blames": fix, "case": case.rstrip("]"), "backend": "",
            "target": self._option.unfix_target, "device": self._option.unfix_device, "tells": False,
            "verdict": "infra", "reason": reason, "legs": [],
        }  # fmt: skip

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, Any, Any]:
        finished = None
        try:
            finished = yield
        except OSError as error:  # another plugin's file, such as JUnit's
            file = error.filename or session.config.getoption("xmlpath", None) or "a report"
            self._complain(session, f"{file} could not be written: {error.strerror}")
        self._finish(session)
        return finished

    def _finish(self, session: pytest.Session) -> None:
        records = list(self._log.results.values())
        session.exitstatus = self._status(session, records)
        self._log.ended = int(session.exitstatus)
        self._write("ended", self._log.ended)
        if self._writer:
            self._writer.close()
            self._complain(session, self._writer.lost)
        if self._option.unfix_json:
            try:
                report.write_json(Path(self._option.unfix_json), runlog.matrix(self._log))
            except InfraError as error:
                self._complain(session, str(error))

    def _complain(self, session: pytest.Session, complaint: str) -> None:
        if complaint:
            self._complaints.append(complaint)
            session.exitstatus = InfraError.exit_code

    def _status(self, session: pytest.Session, records: list[dict[str, Any]]) -> int:
        """pytest's own, and what it can't know: skips are no pass, and what an interrupted run found still counts."""
        status = int(session.exitstatus)
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return status
        if not records:
            empty_shard = self._log.run["shard"] and status == pytest.ExitCode.NO_TESTS_COLLECTED
            return int(pytest.ExitCode.OK) if empty_shard else status
        kinds = {record["verdict"] for record in records}
        if kinds - {"proved", "skipped"}:
            return int(pytest.ExitCode.TESTS_FAILED)
        if missing := self._log.missing():
            self._complaints.append(f"{missing} cases said nothing: skipped before their legs ran, or never run")
            return InfraError.exit_code
        if kinds == {"skipped"} and not self._log.run["shard"]:
            self._complaints.append("every case was skipped: nothing is proved")
            return InfraError.exit_code
        return int(pytest.ExitCode.OK)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._log.results:
            terminalreporter.write_line(report.summary_line(list(self._log.results.values())))
        for complaint in self._complaints:
            terminalreporter.write_line(f"unfix: {complaint}", red=True)
