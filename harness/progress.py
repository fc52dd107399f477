"""What a search shows on stderr while it runs: a line a run, and on a terminal a live bar below them."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from harness.plain import log_line
from harness.trial import Run


class Watch:
    """Told of every run as it begins and ends, by several threads. A context manager: the bar goes when it ends."""

    def __init__(self, fixes: Sequence[str]) -> None:
        self._fixes = tuple(fixes)
        self._console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._lock = threading.Lock()
        self._running: Counter[tuple[str, ...]] = Counter()
        self._runs = 0
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if sys.stderr.isatty():
            columns = (BarColumn(20), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("", total=None)  # nobody knows how many there will be: it pulses

    def __enter__(self) -> Watch:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def note(self, text: str) -> None:
        self._console.print("\n".join(map(log_line, f"unfix: {text}".split("\n"))))

    def began(self, out: tuple[str, ...]) -> None:
        with self._lock:
            self._running[out] += 1
            self._show()

    def ended(self, run: Run) -> None:
        with self._lock:
            self._running[run.out] -= 1
            self._runs += 1
            self.note(f"run {self._runs}: {self.name(run.out)}: {run.kind}, {run.seconds:.1f} s")
            self._show()

    def _show(self) -> None:
        if self._bar:
            now = "; ".join(self.name(out) for out, times in self._running.items() if times)
            self._bar.update(self._task, description=f"run {self._runs + 1}: {now[:80]}")

    def name(self, out: Sequence[str]) -> str:
        """`everything in`, `out: 27338:topk-factor`, or `all out but …` where that is shorter."""
        left = [fix for fix in self._fixes if fix not in out]
        if not out or not left:
            return "everything out" if out else "everything in"
        return f"out: {', '.join(out)}" if len(out) <= len(left) else f"all out but {', '.join(left)}"
