"""The live line of a run: what a log says so far, at which width, and how much time is left."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys

import pytest
from rich.cells import cell_len
from rich.console import Console

from harness import output, runlog
from harness.live import Live

RUN = {"schema_version": 1, "run": {"target": "eagle_kv"}}
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def collected(cases):
    return {"collected": {"cases": cases, "shard": None}}


def result(case, verdict="proved", reason=None, took=6.0):
    legs = [{"reverted": [], "outcome": "clean", "seconds": each} for each in (took / 2, took / 2) if took]
    return {
        "result": {
            "test": f"test_x[{case}]", "fix": "1:a", "blames": "1:a", "case": case, "verdict": verdict,
            "reason": reason, "legs": legs, "regression": "1", "backend": "", "target": "eagle_kv", "device": "cpu",
            "tells": True,
        }
    }  # fmt: skip


def results(numbers, verdict="proved", took=6.0):
    return [result(f"c{at}", verdict, took=took) for at in numbers]


class Screen:
    """A terminal of so many columns, a clock that is told the time, and a log."""

    def __init__(self, log, width=120, expected=None, environ=None):
        self.log, self.now, self.out = log, 0.0, io.StringIO()
        self.console = Console(
            file=self.out, force_terminal=True, width=width, get_time=lambda: self.now,
            _environ={"TERM": "xterm-256color"} if environ is None else environ,
        )  # fmt: skip
        self.live = Live(log, expected, self.console)

    def write(self, *entries):
        with open(self.log, "a", encoding="utf-8") as stream:
            stream.writelines(json.dumps(entry) + "\n" for entry in entries)

    def raw(self, now):
        """What a poll at this time puts out."""
        self.now = now
        self.out.seek(0)
        self.out.truncate()
        self.live.poll()
        return self.out.getvalue()

    def poll(self, now=0.0):
        """The lines that were printed above, and the line that is redrawn, without its bar."""
        frames = self.raw(now).split("\r\x1b[2K")
        *above, line = [CODES.sub("", frame) for frame in frames[1:]]
        return [text.partition("\n")[0] for text in above], line.lstrip("━╸╺ ").rstrip()

    def line(self, now=0.0):
        return self.poll(now)[1]


@pytest.fixture
def log(tmp_path):
    return tmp_path / "run.jsonl"


@pytest.mark.parametrize(
    "entries, now, shown",
    [
        ([], 3, "collecting  0:03"),
        ([RUN], 3, "collecting  0:03"),
        ([RUN, collected(8)], 4, "0/8  starting  0:04"),
        ([RUN, collected(8), *results([1])], 5, "1/8  1 proved  0:05  1:a on c1"),
        ([RUN, collected(8), *results([1, 2])], 6, "2/8  2 proved  0:06  1:a on c2"),
        ([RUN, collected(8), *results([1, 2, 3])], 6, "3/8  3 proved  0:10 left  0:06  1:a on c3"),
        ([RUN, collected(8), {"environment": {}}, *results(range(6))], 6, "6/8  6 proved  0:02 left  0:06  1:a on c5"),
        ([RUN, collected(8), *results(range(8))], 75, "8/8  8 proved  ending  1:15  1:a on c7"),
        ([RUN, collected(8), *results(range(8)), {"ended": 0}], 3661, "8/8  8 proved  ending  1:01:01  1:a on c7"),
        (
            [RUN, collected(900), *results([1], "skipped"), *results([2], "infra"), *results([3, 4])],
            40,
            "4/900  2 proved, 1 skipped, 1 infra  22:24 left  0:40  1:a on c4",
        ),
        # a case that ended twice: a test of which the worker died after its report
        ([RUN, collected(8), *results([1]), *results([1], "infra")], 5, "1/8  1 infra  0:05  1:a on c1"),
        # more cases than were collected
        ([RUN, collected(1), *results([1, 2, 3])], 5, "3/1  3 proved  ending  0:05  1:a on c3"),
        # no lines of a log
        ([RUN, collected(8), 7, None, "x", {"result": {}}, {"result": None}, {"collected": {}},
          {"result": {"test": "t", "fix": "1:a", "case": "c", "verdict": "infra"}}, *results([1])], 5,
         "1/8  1 proved  0:05  1:a on c1"),
    ],
)  # fmt: skip
def test_what_a_log_says_is_shown(log, entries, now, shown):
    screen = Screen(log)
    with screen.live:
        early = [entry for entry in entries if entry == RUN or (isinstance(entry, dict) and "collected" in entry)]
        screen.write(*early)
        screen.poll()
        screen.write(*[entry for entry in entries if entry not in early])
        assert screen.line(now) == shown


def seconds_of(kind, numbers, each):
    return {f"test_x[{kind}{at}]": each for at in numbers}


@pytest.mark.parametrize(
    "expected, left",
    [
        ({}, "0:20 left"),
        # two workers: 4 x 10 recorded seconds took 20, and 4 x 30 remain
        (seconds_of("c", range(4), 10) | seconds_of("c", range(4, 8), 30), "1:00 left"),
        # a case without counts as the median, 10: two of those that remain, then one of those that ended, too
        (seconds_of("c", range(6), 10), "0:20 left"),
        (seconds_of("c", range(1, 4), 10) | seconds_of("d", range(3), 10), "0:20 left"),
        # more are known than remain, so that they are another selection's: their mean counts, 4 x 25
        (seconds_of("c", range(4), 10) | seconds_of("d", range(30), 20) | seconds_of("e", range(10), 40), "0:50 left"),
        (seconds_of("c", range(8), 0), ""),
    ],
)
def test_time_left(log, expected, left):
    screen = Screen(log, expected=expected)
    with screen.live:
        screen.write(RUN, collected(8))
        screen.poll()
        screen.write(*results(range(4), took=20))
        said = screen.line(20)
    assert said == "  ".join(part for part in ("4/8  4 proved", left, "0:20  1:a on c3") if part)


def test_pace_is_that_since_the_first_case_began(log):
    screen = Screen(log)
    with screen.live:
        screen.write(RUN, collected(12), *results(range(3), "skipped", took=0))
        assert screen.line(90) == "3/12  3 skipped  1:30  1:a on c2"
        screen.write(*results([3], took=5))
        assert screen.line(100) == "4/12  1 proved, 3 skipped  0:10 left  1:40  1:a on c3"
        screen.write(*results([4, 5], took=50))
        assert screen.line(107) == "6/12  3 proved, 3 skipped  0:12 left  1:47  1:a on c5"


ALL, BAD = "72 proved, 10 skipped, 1 regressed", "1 regressed"


@pytest.mark.parametrize(
    "width, bar, shown",
    [
        (108, 20, f"83/157  {ALL}  0:05 left  0:40  1:a on draft-topk8-steps5"),
        (107, 20, f"83/157  {ALL}  0:05 left  0:40"),
        (81, 20, f"83/157  {ALL}  0:05 left  0:40"),
        (80, 10, f"83/157  {ALL}  0:05 left  0:40"),
        (60, 0, f"83/157  {ALL}  0:05 left  0:40"),
        (50, 10, f"83/157  {BAD}  0:05 left  0:40"),
        (40, 0, f"83/157  {BAD}  0:05 left  0:40"),
        (30, 0, f"83/157  {BAD}  0:05 left"),
        (12, 0, "83/157  1 re"),
        (1, 0, "8"),
    ],
)
def test_it_fits_the_terminal(log, width, bar, shown):
    screen = Screen(log, width)
    with screen.live:
        screen.write(RUN, collected(157))
        screen.poll()
        screen.write(*results(range(10), "skipped"), *results([10], "regressed"), *results(range(11, 82)))
        screen.write(result("draft-topk8-steps5"))
        drawn = CODES.sub("", screen.raw(40).split("\r\x1b[2K")[-1])
    found = re.fullmatch("([━╸╺]*)( *)(.*?) *", drawn)
    assert (len(found[1]), len(found[2]), found[3]) == (bar, 2 if bar else 0, shown)


@pytest.mark.parametrize("environ", [{"TERM": "xterm-256color"}, {"TERM": "xterm", "NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_it_is_one_line_at_any_width(log, environ):
    steps = [[], [RUN, collected(20)], *([each] for each in results(range(19), "skipped"))]
    for width in [*range(1, 60), 80, 200]:
        log.unlink(missing_ok=True)
        screen = Screen(log, width, environ=environ)
        with screen.live:
            for now, entries in enumerate(steps):
                screen.write(*entries)
                text = CODES.sub("", screen.raw(now * 1000)).lstrip("\r")
                assert "\n" not in text and "\r" not in text
                assert cell_len(text) <= width


def test_findings_are_printed_above_as_they_come(log):
    screen = Screen(log, 40)
    with screen.live:
        screen.write(RUN, collected(8), *results([1]), result("c2", "regressed", "fix in: must be clean, is overflow"))
        screen.write(
            result("c3", "skipped", "no GPU"), result("c4", "infra", "\x1b[2J\x9b1m\nlost \u202e\ud800 [red]x")
        )
        above, line = screen.poll()
        assert above == [
            "regressed: 1:a on c2: fix in: must be clean, is overflow",
            r"infra: 1:a on c4: \x1b[2J\x9b1m\nlost \u202e\ud800 [red]x",
        ]
        assert line == "4/8  1 regressed, 1 infra  0:06 left"
        assert screen.poll()[0] == []


def test_name_of_a_case_changes_no_terminal(log):
    screen = Screen(log)
    with screen.live:
        screen.write(RUN, result("c\x1b[2J\n1", "vacuous", "same"))
        named = r"1:a on c\x1b[2J\n1"
        assert screen.poll() == ([f"vacuous: {named}: same"], f"1 vacuous  collecting  0:00  {named}")


def test_reason_of_many_is_said_once(log):
    screen = Screen(log)
    with screen.live:
        screen.write(RUN, *(result(f"c{at}", kind, "gone") for at, kind in enumerate(["rotted", "rotted", "infra"])))
        assert screen.poll()[0] == ["rotted: 1:a on c0: gone", "rotted: 1:a on c1: as before", "infra: 1:a on c2: gone"]
        screen.write(result("c3", "rotted", "gone"))
        assert screen.poll()[0] == ["rotted: 1:a on c3: as before"]


def test_long_reason_is_cut(log):
    screen = Screen(log)
    with screen.live:
        screen.write(RUN, result("c1", "regressed", "x" * 5000))
        assert screen.poll()[0] == [f"regressed: 1:a on c1: {'x' * 299}…"]


def test_findings_of_the_last_moment_are_printed_and_the_line_goes(log):
    screen = Screen(log)
    with screen.live:
        screen.write(RUN, collected(1))
        screen.raw(1)
        screen.write(result("c1", "vacuous", "the same"))
    *_, end = screen.out.getvalue().partition("vacuous")
    assert end.splitlines()[0].endswith(": 1:a on c1: the same")
    assert screen.out.getvalue().endswith("\x1b[?25h\r\x1b[1A\x1b[2K")  # the cursor is back, and the line is erased


def test_colours_say_what_verdicts_do_and_no_color_has_none(log):
    wanted = {"1 proved": "32", "1 skipped": "33", "1 regressed": "31", "regressed": "31"}
    entries = [RUN, collected(9), *results([1]), *results([2], "skipped"), *results([3], "regressed")]
    for environ in ({"TERM": "xterm-256color"}, {"TERM": "xterm-256color", "NO_COLOR": "1"}):
        screen = Screen(log, environ=environ)
        log.unlink(missing_ok=True)
        with screen.live:
            screen.write(*entries)
            said = screen.raw(1)
        found = {text: code for text, code in wanted.items() if f"\x1b[{code}m{text}\x1b[0m" in said}
        assert found == ({} if "NO_COLOR" in environ else wanted)
        assert not re.search(r"\x1b\[3[0-9]", said) or "NO_COLOR" not in environ


def test_bar_is_red_once_there_is_a_finding(log):
    screen = Screen(log)
    grey, green, red = "38;5;237", "32", "31"
    with screen.live:
        for colour, entry in [
            (grey, collected(9)), (green, result("c1")), (green, result("c2", "skipped")),
            (red, result("c3", "infra")), (red, result("c4")),
        ]:  # fmt: skip
            screen.write(entry)
            assert f"\r\x1b[2K\x1b[{colour}m" in screen.raw(1)


def test_text_stays_where_it_is_without_colours(log):
    """The part of a bar that is to come is not drawn then."""
    screen = Screen(log, environ={"TERM": "xterm", "NO_COLOR": "1"})
    with screen.live:
        screen.write(RUN, collected(8))
        for entry in results(range(8)):
            screen.write(entry)
            assert CODES.sub("", screen.raw(0)).index("/8") == len("\r") + 20 + 2 + 1


def test_dumb_terminal_gets_the_findings_only(log):
    screen = Screen(log, environ={"TERM": "dumb"})
    with screen.live:
        screen.write(RUN, collected(8), *results([1]), result("c2", "regressed", "why"))
        screen.live.poll()
    assert screen.out.getvalue() == "regressed: 1:a on c2: why\n"


def test_line_that_is_being_written_waits(log):
    screen = Screen(log)
    with screen.live:
        screen.write(RUN, collected(8), *results([1]))
        text = json.dumps(result("c2", "regressed", "why"))
        for part in (text[:1], text[1:40], text[40:]):
            with open(log, "a") as stream:
                stream.write(part)
            assert screen.poll() == ([], "1/8  1 proved  0:00  1:a on c1")
        with open(log, "a") as stream:
            stream.write("\n")
        above, line = screen.poll()
        assert (above, line) == (["regressed: 1:a on c2: why"], "2/8  1 proved, 1 regressed  0:00  1:a on c2")


def test_log_that_vanishes_says_nothing_new(log):
    screen = Screen(log)
    with screen.live:
        screen.write(RUN, collected(8), *results([1]))
        shown = screen.line()
        kept = log.read_text()
        log.unlink()
        assert screen.line() == shown
        log.mkdir()
        assert screen.line() == shown
        log.rmdir()
        log.write_text(kept)
        screen.write(*results([2]))
        assert screen.line() == "2/8  2 proved  0:00  1:a on c2"


def test_log_of_many_lines_is_read_once(log):
    """What was read says something else afterwards: read again, a case would be rotted."""
    screen = Screen(log)
    whole = "".join(json.dumps(each) + "\n" for each in [RUN, collected(10_000), *results(range(10_000))]).encode()
    log.touch()
    with screen.live, open(log, "r+b", buffering=0) as stream:
        for at in range(0, len(whole), 49_999):
            stream.seek(at)
            stream.write(whole[at : at + 49_999])
            above, line = screen.poll()
            assert above == []
            stream.seek(0)
            stream.write(whole[: whole.rfind(b"\n", 0, at + 49_999) + 1].replace(b"proved", b"rotted"))
        assert line == "10000/10000  10000 proved  ending  0:00  1:a on c9999"


def test_cases_of_an_interrupted_run_are_done_and_no_part_of_the_pace(log):
    run = dict.fromkeys([*runlog.IDENTITY, "session_reverted", "shard"])
    killed = runlog.Writer(log, run, resume=False)
    killed.write("collected", {"cases": 12, "shard": None})
    for entry in [*results(range(3)), result("c3", "regressed", "old"), *results([4], "infra")]:
        killed.write("result", entry["result"])
    killed.close()
    with open(log, "a") as stream:
        stream.write('{"result": {"te')
    screen = Screen(log)
    screen.now = 1000
    with screen.live:
        assert screen.poll(1000) == ([], "4/12  3 proved, 1 regressed  starting  0:00  1:a on c4")
        resumed = runlog.Writer(log, run, resume=True)  # drops the line that was being written
        for entry in results(range(4, 8)):  # c4 again: nothing had been learnt about it
            resumed.write("result", entry["result"])
        resumed.close()
        above, line = screen.poll(1008)
        assert (above, line) == ([], "8/12  7 proved, 1 regressed  0:06 left  0:08  1:a on c7")
    assert len(runlog.read(log).results) == 8


def test_log_that_is_begun_anew_is_read_anew(log):
    screen = Screen(log)
    screen.write(RUN, collected(3), *results(range(3)), {"ended": 0})
    with screen.live:
        assert screen.line() == "3/3  3 proved  starting  0:00  1:a on c2"
        runlog.Writer(log, {"target": "eagle_kv"}, resume=False).close()
        assert screen.line() == "collecting  0:00"
        screen.write(collected(5), *results([1], "regressed"))
        assert screen.poll() == (["regressed: 1:a on c1: "], "1/5  1 regressed  0:00  1:a on c1")


def test_nothing_is_shown_where_stderr_is_no_terminal(log, capfd, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Live(log) as shown:
        log.write_text(json.dumps(RUN) + "\n" + json.dumps(result("c1", "regressed", "why")) + "\n")
        shown.poll()
    assert not shown.on
    assert capfd.readouterr() == ("", "")


def test_results_go_to_stdout_and_notes_above_the_line(log, capsys):
    screen = Screen(log)
    with screen.live:
        output.say("a result")
        output.note("a note")
    assert capsys.readouterr() == ("a result\n", "")
    assert "unfix: a note\n" in CODES.sub("", screen.out.getvalue())


def test_pytest_does_without_it():
    loaded = "import sys, harness.plugin, harness.recorder; print('harness.live' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True).stdout == "False\n"
