"""The process that mutation.py tries mutants in: a line of JSON in, one try of the tests, a line with its exit status.

A try is pytest in a fork, so that what all of them import is imported once; this file imports nothing of unfix, which
the mutant is part of. Two kinds of line:

    {"tests": [paths], "trace": "/harness/x.py", "into": file}      {"tests": [paths], "limits": {test: seconds, …}}

The first writes, for each test, its seconds and the lines of that file that it ran, as JSON. The second runs the tests
in this order, and one that takes longer than its seconds ends the try by SIGALRM: -14. What has no limit is first;
where none has one, the last is.

As the first process of a PID namespace it kills whatever a try left running, and nothing that a mutant signals is
outside; elsewhere only what stayed in the try's process group is killed.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

# imported for the tries: each takes long, and unfix imports it
import hypothesis
import jinja2  # noqa: F401
import numpy  # noqa: F401
import pydantic  # noqa: F401
import pytest
import rich  # noqa: F401
import typer  # noqa: F401
import xdist.plugin  # noqa: F401
import yaml  # noqa: F401

UNTIMED = 120.0  # seconds, for what is no test of the list: what pytest and the tests import, and a new test


class Trace:
    """A pytest plugin that notes how long each test took and which lines of one file it ran in this process.

    What ran outside of any test, as the file was imported, is noted as "".
    """

    def __init__(self, file: str, into: str) -> None:
        self.file, self.into = file, Path(into)
        self.lines: set[int] = set()
        self.ran: dict[str, tuple[float, list[int]]] = {}

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(self.file):
            return None
        self.lines.add(frame.f_lineno)
        return self.trace

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        outside, self.lines = self.lines, set()
        began = time.monotonic()
        try:
            return (yield)
        finally:
            self.ran[item.nodeid] = time.monotonic() - began, sorted(self.lines)
            self.lines = outside

    def pytest_sessionfinish(self) -> None:
        self.ran[""] = 0.0, sorted(self.lines)
        self.into.write_text(json.dumps(self.ran))


class Order:
    """A pytest plugin that runs tests in the order in which they are named, each within its seconds; or backwards."""

    def __init__(self, limits: dict[str, float]) -> None:
        self.limits = limits

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        place = {name: at for at, name in enumerate(self.limits)}
        items.sort(key=lambda item: place.get(item.nodeid, -1))
        if not place:
            items.reverse()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        signal.setitimer(signal.ITIMER_REAL, self.limits.get(item.nodeid, UNTIMED))
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os._exit(1)  # what else is to be said or tidied up is nobody's matter


def _try(asked: dict[str, Any]) -> int:
    for stream in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    plugin: Trace | Order = Order(asked["limits"]) if "limits" in asked else Trace(asked["trace"], asked["into"])
    sys.dont_write_bytecode = bool(asked.get("limits"))  # of the tests, by the first tries; a mutant's is another's
    if isinstance(plugin, Trace):
        threading.settrace(plugin.trace)
        sys.settrace(plugin.trace)
    else:
        signal.setitimer(signal.ITIMER_REAL, UNTIMED)
    return pytest.main(["-x", "-q", "--tb=no", "-n", "0", "-p", "no:cacheprovider", *asked["tests"]], plugins=[plugin])


def _kill_the_rest(child: int) -> None:
    try:
        if os.getpid() != 1:
            return os.killpg(child, signal.SIGKILL)
        os.kill(-1, signal.SIGKILL)
        while True:
            os.wait()
    except (ProcessLookupError, ChildProcessError):
        pass


def main() -> None:
    sys.path[0] = ""  # the copy, not this file's neighbours, one of which is called kernels
    for name in sys.argv[1:]:
        __import__(name)
    print("ready", flush=True)
    # no example is made smaller, none goes from one mutant to another, and a busy machine is no failure
    hypothesis.settings.register_profile(
        "mutants", phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate), database=None, derandomize=True,
        deadline=None, suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    hypothesis.settings.load_profile("mutants")
    gc.freeze()  # pytest collects more than once, and what was imported is no garbage
    for line in sys.stdin:
        child = os.fork()
        if not child:
            if os.getppid() != 1:
                os.setpgid(0, 0)
            os._exit(_try(json.loads(line)))
        while (ended := os.wait())[0] != child:
            pass
        _kill_the_rest(child)
        print(os.waitstatus_to_exitcode(ended[1]), flush=True)


if __name__ == "__main__":
    main()
