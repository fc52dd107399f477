"""What `unfix run` shows on a terminal while pytest runs in another process: one line, redrawn, below the findings.

    regressed: 27338:topk-factor on draft-topk8-steps5: every fix in: must be clean, is overflow
    ━━━━━━━━━━╸━━━━━━━━━  83/157  72 proved, 10 skipped, 1 regressed  0:12 left  0:40

Read off the run's log (:mod:`harness.runlog`), which that process writes. Lines that are there at the start are an
interrupted run's: its cases count as done, but say nothing of the pace, and its findings are not shown again. A log
that becomes shorter was begun anew.

Time left: what remains, divided by the pace since the first case began, which is when it ended less what its legs
took: servers start and kernels are built before. Both are in recorded seconds where there are any, and a case without
counts as the median of those; where there are none, in cases. Nothing is said of it before three cases ended.

A terminal too narrow for the line loses, in this order: the case that ended last, the bar, verdicts that are no
findings, the time since the start. A dumb terminal gets the findings only, and where stderr is no terminal, nothing is
read or shown.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live as Redrawn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from harness.diagnosis import is_finding
from harness.history import seconds
from harness.plain import one_line
from harness.report import STYLE
from harness.verdict import VERDICTS

_SHOWN = {"test", "fix", "blames", "case", "verdict", "reason", "legs"}
_TELLING = 3  # cases that must have ended before their pace says something
_REASON = 300  # characters of a finding's reason: the whole is in the run's results


@dataclass
class _Seen:
    """What the log says so far."""

    offset: int = 0  # bytes read, all of them whole lines
    cases: int | None = None  # of the whole run
    verdicts: dict[str, str] = field(default_factory=dict)  # by pytest's node id
    ran: list[str] = field(default_factory=list)  # the tests of this run, not those of the one that it goes on from
    findings: set[tuple[str, str, str]] = field(default_factory=set)  # that were printed: verdict, fix, reason
    last: str = ""
    began: float | None = None  # when the first case of this run did


class Live:
    """A context manager: the line goes when it ends. ``expected_seconds``: recorded durations by pytest's node id.

    ``on``: whether anything is shown. No other process may write to the terminal then, pytest neither.
    """

    def __init__(
        self, lines: Path, expected_seconds: Mapping[str, float] | None = None, console: Console | None = None
    ) -> None:
        self._lines = lines
        self._expected = dict(expected_seconds or {})
        self._usual = median(self._expected.values()) if self._expected else 1.0
        # rich takes any file for a terminal where FORCE_COLOR is set, as on a CI runner
        terminal = None if sys.stderr.isatty() else False
        self._console = console or Console(stderr=True, force_terminal=terminal)
        self.on = self._console.is_terminal
        self._shown = Redrawn(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False)

    def __enter__(self) -> Live:
        self._start = self._console.get_time()
        if self.on:
            self._begin()
            self._shown.start()
            self._shown.update(self._line(), refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.poll()
        finally:
            self._shown.stop()

    def poll(self) -> None:
        """Show what the log says by now. A log that isn't there, or is gone, says nothing new."""
        if not self.on:
            return
        for record in self._read():
            if is_finding(record):
                self._console.print(self._finding(record), soft_wrap=True)
        self._shown.update(self._line(), refresh=True)

    def _finding(self, record: Mapping[str, Any]) -> Text:
        """One line. A rotted reversal fails many cases: their reason is said once."""
        kind, fix, reason = record["verdict"], record["blames"], record["reason"] or ""
        said = "as before" if (kind, fix, reason) in self._seen.findings else reason
        self._seen.findings.add((kind, fix, reason))
        about = one_line(f": {fix} on {record['case']}: ") + one_line(said, _REASON)
        return Text.assemble((kind, STYLE.get(kind, "red")), about)

    def _begin(self) -> None:
        self._seen = _Seen()
        self._read()
        again = [test for test, verdict in self._seen.verdicts.items() if verdict == "infra"]
        for test in again:  # nothing was learnt about it
            del self._seen.verdicts[test]
        self._seen.ran.clear()
        self._seen.began = None

    def _read(self) -> list[dict[str, Any]]:
        """The results among the lines that were added since the last call."""
        try:
            with open(self._lines, "rb") as stream:
                if os.fstat(stream.fileno()).st_size < self._seen.offset:
                    self._begin()
                    return []
                stream.seek(self._seen.offset)
                whole, newline, _ = stream.read().rpartition(b"\n")
        except OSError:
            return []
        self._seen.offset += len(whole) + len(newline)
        return [record for line in whole.split(b"\n") if (record := self._take(line))]

    def _take(self, line: bytes) -> dict[str, Any] | None:
        try:
            entry = json.loads(line)
            if "collected" in entry:
                self._seen.cases = int(entry["collected"]["cases"])
            record: dict[str, Any] = entry.get("result", {})
            if not record.keys() >= _SHOWN:
                return None
            self._seen.verdicts[record["test"]] = record["verdict"]
            self._seen.ran.append(record["test"])
            if self._seen.began is None and (took := seconds(record)):  # a case that was skipped took none
                self._seen.began = self._console.get_time() - took
            self._seen.last = one_line(f"{record['fix']} on {record['case']}")
        except (ValueError, KeyError, TypeError, AttributeError):  # the log's reader complains, when the run has ended
            return None
        return record

    def _line(self) -> RenderableType:
        seen, now = self._seen, self._console.get_time()
        tally = Counter(seen.verdicts.values())
        kinds = [kind for kind in VERDICTS if tally[kind]]
        findings = [kind for kind in kinds if is_finding({"verdict": kind})]
        count = Text(f"{len(seen.verdicts)}/{seen.cases}" if seen.cases is not None else "")
        every, bad, left = _tally(tally, kinds), _tally(tally, findings), Text(self._left(now))
        elapsed, last = Text(_clock(now - self._start), "dim"), Text(seen.last, "dim")
        for width, parts in (
            (20, (count, every, left, elapsed, last)),
            (20, (count, every, left, elapsed)),
            (10, (count, every, left, elapsed)),
            (0, (count, every, left, elapsed)),
            (10, (count, bad, left, elapsed)),
            (0, (count, bad, left, elapsed)),
            (0, (count, bad, left)),
        ):
            text = Text("  ", no_wrap=True, overflow="crop").join(part for part in parts if part)
            if width + 2 * bool(width) + text.cell_len <= self._console.width:
                break
        if not width:
            return text
        colour = "red" if findings else "green"
        line = Table.grid(padding=(0, 2))
        bar = ProgressBar(
            seen.cases, len(seen.verdicts), width, complete_style=colour, finished_style=colour, pulse_style=colour
        )
        line.add_row(bar, text)
        return line

    def _left(self, now: float) -> str:
        seen = self._seen
        if seen.cases is None:
            return "collecting"
        if not seen.ran:
            return "starting"
        remaining = seen.cases - len(seen.verdicts)
        if remaining <= 0:
            return "ending"
        done = sum(self._expected.get(test, self._usual) for test in seen.ran)
        if len(seen.ran) < _TELLING or not done or seen.began is None:
            return ""
        known = [each for test, each in self._expected.items() if test not in seen.verdicts]
        if len(known) > remaining:  # durations of other runs' tests are among them, and nobody knows which
            work = remaining * sum(known) / len(known)
        else:
            work = sum(known) + (remaining - len(known)) * self._usual
        return f"{_clock(work * (now - seen.began) / done)} left"


def _tally(tally: Mapping[str, int], kinds: list[str]) -> Text:
    return Text(", ").join(Text(f"{tally[kind]} {kind}", STYLE.get(kind, "red")) for kind in kinds)


def _clock(whole: float) -> str:
    minutes, rest = divmod(round(whole), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
