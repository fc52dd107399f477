"""``unfix run``: the main job, and ``unfix merge``, which joins its parts. pytest runs the regressions."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from harness import (
    fixes,
    history,
    live,
    output,
    plain,
    publish,
    pytest_run,
    report,
    report_cli,
    runlog,
    selection,
    shards,
    zygote,
)
from harness import merge as parts_of
from harness.code_base import resolve
from harness.device import resolve_device
from harness.digest import Digest
from harness.errors import InfraError, UsageError
from harness.extras import NOTHING, extras
from harness.prover import Prover
from harness.recorder import facts
from harness.root import project_root
from harness.trial import signals_interrupt

JsonOut = Annotated[str | None, typer.Option("--json", metavar="F", help="write JSON to F ('-': stdout)")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("run")(run)
    app.command("merge")(merge)


def run(
    ctx: typer.Context,
    sel: Annotated[list[str] | None, typer.Argument(metavar="[SEL…]", help="fixes to prove; all without")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda: where legs run")] = "auto",
    target: Annotated[
        str, typer.Option(help="eagle_kv, sglang, or another package that a toggle file names")
    ] = "eagle_kv",
    release: Annotated[str | None, typer.Option(metavar="V", help="the release of SGLang, for --target sglang")] = None,
    source: Annotated[str | None, typer.Option(metavar="DIR", help="a checkout that has the package")] = None,
    jobs: Annotated[str, typer.Option("--jobs", "-n", help="parallel workers: a number, or auto")] = "auto",
    json_out: JsonOut = None,
    log: Annotated[
        Path | None, typer.Option("--jsonl", metavar="F", help="write a JSON line to F as each case ends")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on from what --jsonl's file has, if anything")] = False,
    shard: Annotated[str, typer.Option(metavar="I/N", help="only the I-th of N parts, for `unfix merge`")] = "",
    junit: Annotated[str | None, typer.Option(metavar="F", help="write JUnit XML to F")] = None,
    html: Annotated[Path | None, typer.Option(metavar="F", help="write the report, one page, to F")] = None,
    baseline: Annotated[
        Path | None, typer.Option(metavar="FILE|DIR", help="earlier nights: to compare with, and to cut shards by")
    ] = None,
    badge: report_cli.Badge = None,
    github: report_cli.GitHub = False,
) -> None:
    """The on/off matrix: every regression, with each fix in and out. pytest runs it.

    Example: unfix run 27338 own:int32-rows --json out/matrix.json
    """
    root = project_root()
    registered = fixes.load(root / "toggles")
    part, device = shards.parse(shard), resolve_device(device)
    code_base = resolve(target, root, release, source)
    chosen, left_out = selection.chosen(sel, registered, target)
    if left_out:
        output.note(left_out)
    reverted = session_revert(registered, target)  # pytest reads it again; a bad value is said here, with our exit code
    output.check_json(json_out)
    if resume and not log:
        raise UsageError("--resume goes on from a log: give --jsonl F, too")
    publish.check(html=html, badge=badge, github=github, json_out=json_out, jsonl=log, junit=junit)
    if baseline and not (html or github or part):
        raise UsageError("--baseline is for a report or a shard: give --html F, --github or --shard I/N, too")
    earlier = history.read_baseline(baseline) if baseline else []
    if junit and not Path(junit).resolve().parent.is_dir():
        raise InfraError(f"--junit {junit}: there is no folder {Path(junit).resolve().parent}")
    before = 0  # cases in the log already
    if log:
        of = facts(root, code_base, device, chosen, reverted, part)
        before = len(runlog.check(log, of, resume=resume).done())
    with contextlib.ExitStack() as stack:
        if not code_base.preload and os.environ.get("UNFIX_SANDBOX") != "inline":
            stack.enter_context(zygote.opened(device))
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="unfix-run-", ignore_cleanup_errors=True))
        lines = (log or Path(scratch, "run.jsonl")).absolute()
        more = ["--unfix-select", ",".join(chosen), "--unfix-log", str(lines), *(["--unfix-resume"] if resume else [])]
        more += ["--unfix-shard", shard] if part else []
        more += ["--unfix-durations", str(baseline)] if part and baseline else []
        more += ["--junitxml", junit] if junit else []
        side_by_side = pytest_run.workers(jobs, device)
        command = pytest_run.command(root, device, code_base, side_by_side, release=release, source=source, more=more)
        if log and not resume:
            runlog.empty(log)  # a pytest that does not get as far as its log must not leave an old one to be read
        try:
            prover = Prover(registered, device=device, root=root, target=code_base)
            ended = _ran(command, lines, shards.durations(history.records(earlier, target, device)), prover)
        except KeyboardInterrupt:
            with contextlib.suppress(UsageError):  # it may have been too early for a log
                if log and (kept := len(runlog.read(lines).results)):
                    output.note(f"{kept} cases are in {log}; the same line with --resume goes on from there")
            raise
        document = _matrix(lines, ended)
    if before:
        output.note(f"of {len(document['results'])} verdicts, {before} were in {log} already")
    alone = part is not None and part.of > 1  # then only all parts together can say that each fix is proved
    if not alone:
        untouched = report.untouched(document["results"], chosen)
        document["incomplete"] += [f"no case is about {fix}" for fix in untouched]
    records = document["results"]
    code = report.exit_code(records, incomplete=document["incomplete"], shard=alone)
    odd = runlog.odd_end(ended)
    if (ended not in (0, 1) or (ended == 1 and code == 0)) and odd not in document["incomplete"]:
        output.note(f"{odd}: its own words are above")
        document["incomplete"].append(odd)
        code = InfraError.exit_code
    if json_out:
        output.write_json(json_out, document, output.say)
    if html or badge or github:
        night = history.Night("this run", (document,))
        told = Digest(night, history.compare(night, history.like(night, earlier, chosen, whole=not part)))
        known = extras(night, report_cli.takes(ctx)) if html or github else NOTHING
        publish.publish(told, known, html=html, badge=badge, github=github)
    if json_out != "-":
        console = output.console()
        console.print(report.table(records))
        for line in [*document["incomplete"], *report.not_proved(records)]:
            console.print(plain.log_line(line), markup=False, soft_wrap=True)
        console.print(report.summary_line(records))
    raise typer.Exit(code)


def session_revert(registered: fixes.Catalogue, target: str) -> tuple[str, ...]:
    """What the environment takes out of every leg; says so, since it changes what a verdict means."""
    variable, named = selection.of_session(registered)
    reverted, still_in = selection.able(named, registered, target)
    if still_in:
        output.note(f"{variable}: {still_in}")
    if reverted:
        output.note(f"REVERT ACTIVE in every leg ({variable}): {', '.join(reverted)}")
    return reverted


def _ran(command: Sequence[str], lines: Path, expected: Mapping[str, float], prover: Prover) -> int:
    """pytest's exit status. On a terminal its words come after the live line, and only where something is wrong."""
    shown, told = live.Live(lines, expected), 0
    with signals_interrupt(), tempfile.TemporaryFile() as words:
        try:
            # the line goes first where the run is interrupted: pytest may then take a while to end
            with pytest_run.started(command, words) as process, shown:
                with prover:  # a machine that can't run legs is said once, here, and not by every case
                    _ = prover.environment
                while process.poll() is None:
                    shown.poll()
                    told += 0 if shown.on else _pass_on(words, told)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(0.2)
        except KeyboardInterrupt:
            if not shown.on:
                _pass_on(words, told, ended=True)
            raise
        if not shown.on or process.returncode:
            _pass_on(words, told, ended=True)
        return process.returncode


def _pass_on(words: IO[bytes], told: int, *, ended: bool = False) -> int:
    """How many bytes of pytest's words there were beyond those told already."""
    new = os.pread(words.fileno(), 1 << 30, told)  # `seek` would move where pytest writes
    whole = new[: new.rfind(b"\n") + 1] if not ended else new
    sys.stderr.write(plain.visible(whole.decode(errors="replace")))
    sys.stderr.flush()
    return len(whole)


def _matrix(lines: Path, ended: int) -> dict[str, Any]:
    """What the log has, however pytest ended. Raises InfraError where it has nothing."""
    try:
        log = runlog.read(lines)
    except UsageError:
        log = None
    if log is None or (log.ended is None and not log.results):
        raise InfraError(f"pytest ended with {ended} before it ran a case; its own words are above")
    return runlog.matrix(log)


def merge(
    files: Annotated[list[Path], typer.Argument(metavar="PART…", help="what each shard wrote with --json or --jsonl")],
    json_out: JsonOut = None,
) -> None:
    """Join the shards of one run: the matrix that the whole run would have written. Exit code as `run`.

    A shard that is missing is said to be, and ends this with 4; the others are joined all the same.

    Example: unfix merge parts/*.json --json out/matrix.json
    """
    output.check_json(json_out)
    documents, unreadable = [], []
    for file in files:
        try:
            documents.append((str(file), history.read_document(file)))
        except UsageError as error:
            unreadable.append(str(error))
    if not documents:
        raise UsageError(unreadable[0])
    document = parts_of.merge(documents)
    document["incomplete"] = [*unreadable, *document["incomplete"]]
    records = document["results"]
    if json_out:
        output.write_json(json_out, document, output.say)
    if json_out != "-":
        for line in [*document["incomplete"], *report.not_proved(records), report.summary_line(records)]:
            output.say(plain.log_line(line))
    raise typer.Exit(report.exit_code(records, incomplete=document["incomplete"]))
