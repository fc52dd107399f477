"""Whole pytest sessions, each with one fix out, several side by side: what `unfix prove` listens to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from harness import interrupts, pytest_run, selection
from harness.errors import InfraError
from harness.fixes import Fix
from harness.prove import Heard

_LAST_LINES = 20  # of a session's own output, where it could not be read


class Sessions:
    """Runs sessions and reads what their tests said. They share legs' answers."""

    def __init__(self, scratch: Path, command: Callable[[str, list[str]], list[str]]):
        """``command(workers, more)``: the command line of pytest."""
        self._scratch, self._command = scratch, command
        self._answers = scratch / "answers"
        self._answers.mkdir()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = Lock()
        self._stopped = False

    def run(self, fix: str | None, workers: str) -> tuple[dict[str, Heard], dict[str, Any]]:
        """The tests, and their legs' environment. Raises InfraError where pytest ended for a reason of its own."""
        name = (fix or "baseline").replace(":", ".")
        file, words = self._scratch / f"{name}.json", self._scratch / f"{name}.txt"
        # the project's plugin by name, too: prove_session imports it, and pytest wants to be the first who does
        more = ["-p", "no:cacheprovider", "-p", "harness.plugin", "-p", "harness.prove_session"]
        command = self._command(workers, [*more, "--unfix-tests", str(file), "--unfix-answers", str(self._answers)])
        environment = {key: value for key, value in os.environ.items() if key not in selection.VARIABLES}
        if fix:
            environment[selection.VARIABLE] = fix
        with open(words, "wb") as output, self._started(command, environment, output) as process:
            ended = process.wait()
        if self._stopped:
            raise InfraError("stopped, since another session failed")
        document = json.loads(file.read_text()) if file.exists() else {"environment": {}, "tests": {}}
        tests = {test: Heard(**said) for test, said in document["tests"].items()}
        failed = any(heard.outcome == "failed" for heard in tests.values())
        if not tests or ended not in ((1,) if failed else (0, 4)):  # 4: all were skipped, which is for the caller
            last = words.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]
            print("\n".join(last), file=sys.stderr)
            raise InfraError(f"pytest ended with {ended} with {fix or 'nothing'} out; its own words are above")
        return tests, document["environment"]

    def run_all(self, chosen: Sequence[Fix], jobs: int) -> Iterator[tuple[Fix, dict[str, Heard]]]:
        """Each fix with what the tests said while it was out, in order. A session that can't be read ends them all."""
        with ThreadPoolExecutor(jobs) as pool:
            try:
                futures = [pool.submit(self.run, fix.id, "0") for fix in chosen]
                for fix, future in zip(chosen, futures, strict=True):
                    yield fix, future.result()[0]
            finally:
                self._stop()
                pool.shutdown(cancel_futures=True)

    @contextmanager
    def _started(
        self, command: Sequence[str], environment: Mapping[str, str], output: BinaryIO
    ) -> Iterator[subprocess.Popen[bytes]]:
        with self._lock:
            if self._stopped:
                raise InfraError("not started, since another session failed")
            with interrupts.held():
                process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    preexec_fn=pytest_run.bound,
                )  # fmt: skip
            self._running.add(process)
        try:
            yield process
        finally:
            process.kill()  # its fork server and its legs end when it is gone
            process.wait()
            self._running.discard(process)

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            for process in list(self._running):
                process.kill()
