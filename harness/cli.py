"""The ``unfix`` command. Results go to stdout, progress and notes to stderr.

Exit codes: 0 all well, 1 a finding, 2 bad usage or a bad toggle file, 3 rotted, 4 infra.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from harness import (
    audit_cli,
    bisect_cli,
    fixes,
    interchange_cli,
    lightenv_cli,
    new_cli,
    output,
    overlay,
    plain,
    prove_cli,
    report,
    report_cli,
    run_cli,
    script,
    selection,
    sweep_cli,
    trust,
    upstream,
    upstream_cli,
    variants,
)
from harness.case import Case
from harness.code_base import resolve
from harness.device import resolve_device
from harness.errors import UnfixError, UsageError
from harness.prover import Prover
from harness.root import project_root

app = typer.Typer(
    name="unfix",
    help="Take a merged fix out again, to prove that the bug comes back and that a test catches it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
upstream_cli.register(app)
lightenv_cli.register(app)
bisect_cli.register(app)
prove_cli.register(app)
audit_cli.register(app)
new_cli.register(app)
interchange_cli.register(app)
report_cli.register(app)
run_cli.register(app)
sweep_cli.register(app)


@app.callback()
def options(
    trusted: Annotated[
        list[Path] | None,
        typer.Option(
            "--trust", metavar="DIR", help="a checkout whose code is run though it isn't this unfix's, or isn't yours"
        ),
    ] = None,
) -> None:
    trust.name(trusted or ())


Selection = Annotated[str, typer.Argument(metavar="SEL", help="27338, 27338:topk-factor, own, a comma list, or all")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda: where legs run")]
TargetName = Annotated[str, typer.Option(help="eagle_kv, sglang, or another package that a toggle file names")]
Release = Annotated[str | None, typer.Option(metavar="V", help="the release of SGLang, for --target sglang")]
Source = Annotated[str | None, typer.Option(metavar="DIR", help="a checkout that has the package")]
JsonOut = Annotated[str | None, typer.Option("--json", metavar="F", help="write JSON to F ('-': stdout)")]


def main() -> None:
    """Run the command line; every error that we know is one line on stderr and its exit code."""
    try:
        code = app(standalone_mode=False)  # outside of its standalone mode, typer returns an Exit's code
        sys.stdout.flush()
        if code == 130:  # typer's own for Ctrl-C
            print("unfix: interrupted", file=sys.stderr)
        sys.exit(code or 0)
    except UnfixError as error:
        output.note(str(error))
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        print("unfix: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of stdout has gone (`unfix list | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        output.note(str(error))
        os._exit(4)  # an ordinary exit would try to flush the same output again
    except Exception as error:
        if (show := getattr(error, "format_message", None)) is None:
            raise
        if text := show():
            output.note(f"{text} (see unfix --help)")
        sys.exit(2)


def catalogue() -> fixes.Catalogue:
    """The fixes that this checkout registers."""
    return fixes.load(project_root() / "toggles")


def _json(where: str, document: dict[str, Any]) -> None:
    output.check_json(where)
    output.write_json(where, document, output.say)


@app.command("list")
def list_fixes(json_out: JsonOut = None) -> None:
    """Every registered fix: kind, what its absence shows, code bases.

    Example: unfix list --json -
    """
    registered = catalogue()
    if json_out:
        _json(json_out, {"schema_version": report.SCHEMA_VERSION, "fixes": [_fix_row(fix) for fix in registered.fixes]})
        return
    table = Table(header_style="bold")
    for name in ("fix", "kind", "summary", "fix out", "code bases"):
        table.add_column(name, overflow="fold", no_wrap=name in ("fix", "kind"))
    for fix in registered.fixes:
        row = _fix_row(fix)
        out = "\n".join(
            f"{' + '.join(name.partition(':')[2] for name in leg['out'])}: {leg['outcome']}" for leg in row["legs"]
        )
        table.add_row(fix.id, fix.kind, escape(fix.summary), out, ", ".join(fix.code_bases))
    output.console().print(table)


def _fix_row(fix: fixes.Fix) -> dict[str, Any]:
    legs = [{"out": list(out), "outcome": leg.outcome} for out, leg in zip(fix.legs_out_ids, fix.legs, strict=True)]
    return {
        "fix": fix.id, "kind": fix.kind, "summary": fix.summary, "title": fix.title, "links": list(fix.links),
        "scenario": fix.scenario, "backend": fix.backend, "legs": legs, "code_bases": list(fix.code_bases),
    }  # fmt: skip


@app.command()
def repro(
    sel: Selection,
    device: Device = "auto",
    target: TargetName = "eagle_kv",
    release: Release = None,
    source: Source = None,
    backend: Annotated[str | None, typer.Option(help="draft backend, where the fix leaves a choice")] = None,
    path: Annotated[str | None, typer.Option(help="eager or cuda_graph; store_cache or pool")] = None,
    topk: Annotated[int | None, typer.Option(help="branches a request")] = None,
    num_seqs: Annotated[int | None, typer.Option(help="requests in the batch")] = None,
    num_steps: Annotated[int | None, typer.Option(help="draft steps")] = None,
    max_bs: Annotated[int | None, typer.Option(help="requests that the CUDA-graph buffers are sized for")] = None,
    max_context_len: Annotated[int | None, typer.Option(help="tokens")] = None,
    seq_lens: Annotated[
        str | None, typer.Option(metavar="a,b,…", help="prefix lengths in tokens, one a request")
    ] = None,
    page_size: Annotated[int | None, typer.Option(help="KV slots a page")] = None,
    slots: Annotated[str | None, typer.Option(metavar="a,b,…", help="slot ids to store to")] = None,
    num_slots: Annotated[int | None, typer.Option(help="slots of the pool")] = None,
    row_bytes: Annotated[int | None, typer.Option(help="bytes of a K or V row")] = None,
    index_bytes: Annotated[int | None, typer.Option(help="4 or 8: width of a slot id")] = None,
    strided: Annotated[bool | None, typer.Option("--strided", help="K and V are slices of wider rows")] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(help="speculative_num_draft_tokens")] = None,
    detector: Annotated[str | None, typer.Option(help="red-zone, guard-page or poison, as the case takes them")] = None,
    json_out: JsonOut = None,
    script_out: Annotated[
        str | None, typer.Option("--script", metavar="F", help="write a stand-alone script to F")
    ] = None,
) -> None:
    """One case, all its legs, explained. A PR with several fixes shows its first.

    Example: unfix repro 27338 --topk 8 --num-steps 5 --max-bs 8 --max-context-len 512 --seq-lens 187,187,187
    """
    typed = {name: value for name, value in locals().items() if name not in _NOT_OF_A_CASE}
    registered = catalogue()
    chosen = selection.parse(sel, registered, source="SEL")
    if not chosen:
        raise UsageError(f"SEL {sel!r} selects no fix; known: {', '.join(registered.ids)}")
    fix = registered.fix(chosen[0])
    if len(chosen) > 1:
        output.note(f"{sel} is {', '.join(chosen)}; this shows {fix.id}")
    case = _build_case(fix, {name: value for name, value in typed.items() if value is not None})
    device, root = resolve_device(device), project_root()
    code_base = resolve(target, root, release, source)
    session = run_cli.session_revert(registered, target)
    with Prover(registered, device=device, root=root, target=code_base, session=session) as prover:
        result = prover.prove(fix.id, case)
        environment = prover.environment if result.legs else {}
    if script_out and not result.legs:
        output.note(f"no script was written: {result.verdict.kind}, so no leg ran")
    elif script_out:
        script.write(Path(script_out), prover, result)
        output.note(f"wrote {script_out}")
    if json_out:
        _json(json_out, report.matrix(environment, [result.as_dict()], []))
    if json_out != "-":
        output.say(report.explain(result))
    raise typer.Exit(report.exit_code_of(result.verdict.kind))


_NOT_OF_A_CASE = ("sel", "device", "target", "release", "source", "json_out", "script_out")


def _build_case(fix: fixes.Fix, options: dict[str, Any]) -> Case:
    scenario = importlib.import_module(f"regressions.scenarios.{fix.scenario}")
    if unknown := sorted(set(options) - set(scenario.OPTIONS)):
        takes = " ".join("--" + name.replace("_", "-") for name in scenario.OPTIONS)
        raise UsageError(f"--{unknown[0].replace('_', '-')} does not fit {fix.id}, which takes {takes}")
    for name in ("seq_lens", "slots"):
        if name in options:
            options[name] = _integers(name, options[name])
    build: Callable[..., Case] = scenario.case
    if "backend" in inspect.signature(build).parameters and "backend" not in options and fix.backend:
        options["backend"] = fix.backend
    return build(fix.id, **options)


def _integers(name: str, text: str) -> list[int]:
    if text and not re.fullmatch(r"-?[0-9]+(,-?[0-9]+)*", text):
        raise UsageError(f"--{name.replace('_', '-')} {text!r}: must be integers with commas between, like 5,3,8")
    return [int(part) for part in text.split(",")] if text else []


@app.command()
def diff(sel: Selection, target: TargetName = "eagle_kv", release: Release = None, source: Source = None) -> None:
    """The unified diff that a selection amounts to.

    Example: unfix diff 27338:topk-factor --target sglang --release 0.5.13
    """
    registered = catalogue()
    chosen = selection.parse(sel, registered, source="SEL")
    roots = [_sources(target, release, source)]
    plan = overlay.plan(variants.choose_all(registered, chosen, target, roots), roots)
    text = overlay.diff(plan)
    output.say(plain.visible(text) if sys.stdout.isatty() else text, end="")  # byte by byte for `patch -p1`


def _sources(target: str, release: str | None, source: str | None) -> Path:
    """Where the sources of a code base are that is only read."""
    if target != "sglang" or (not release and not source):
        return resolve(target, project_root(), release, source).sources
    return (upstream.checkout(source) if source else upstream.release(release or "")).root


if __name__ == "__main__":
    main()
