"""What ``unfix prove`` adds to a pytest session: what each test said, as JSON, and legs that need not run again.

    pytest -p harness.prove_session --unfix-tests FILE --unfix-answers DIR

FILE has ``environment`` and ``tests``: by node id, the outcome of its worst phase, one line on why, and the record of
the case if the test proved one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness import plugin, report
from harness.answers import Answers

_RANK = {"passed": 0, "skipped": 1, "failed": 2}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("unfix")
    group.addoption("--unfix-tests", metavar="FILE", required=True, help="write what each test said")
    group.addoption("--unfix-answers", metavar="DIR", required=True, help="legs' answers, shared between sessions")


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    config, code_base = session.config, plugin.code_base_of(session.config)
    config.stash[plugin.servers] = Answers(
        Path(config.option.unfix_answers), code_base.sources, config.option.unfix_device, code_base.preload
    )
    if not hasattr(config, "workerinput"):  # a worker's reports reach the process that started it
        config.pluginmanager.register(_Listener(config))


class _Listener:
    def __init__(self, config: pytest.Config):
        self._config = config
        self._tests: dict[str, dict[str, Any]] = {}
        self._environment: dict[str, Any] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # a lost worker's report ("???") is a failure like any other
        test = self._tests.setdefault(report.nodeid, {"outcome": "passed", "why": "", "record": None})
        if _RANK[report.outcome] > _RANK[test["outcome"]]:
            test |= {"outcome": report.outcome, "why": _why(report)}
        test["record"] = test["record"] or getattr(report, "unfix", None)
        self._environment = self._environment or getattr(report, "unfix_environment", None) or {}

    def pytest_sessionfinish(self) -> None:
        document = {"environment": self._environment, "tests": self._tests}
        report.write_json(Path(self._config.option.unfix_tests), document)


def _why(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # of a skip: file, line, reason
        return report.longrepr[2].removeprefix("Skipped: ")
    return (report.longreprtext.strip().splitlines() or [""])[-1]
