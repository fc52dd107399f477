"""``unfix sweep``: random shapes of a fix against its model, and the smallest that disagrees."""

from __future__ import annotations

import importlib
import os
import random
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from harness import fixes, output, report, report_cli, rerun, run_cli, selection
from harness.company import Company
from harness.device import resolve_device
from harness.errors import UsageError
from harness.root import project_root

if TYPE_CHECKING:
    from harness.sweep import Space, Swept

TARGET = "eagle_kv"
JOBS = {"cpu": 8, "cuda": 8}  # processes side by side, at most
_SHOWN = 3


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("sweep")(sweep)


def sweep(
    ctx: typer.Context,
    sel: Annotated[str, typer.Argument(metavar="SEL", help="27338, 27338:topk-factor, own, a comma list, or all")],
    examples: Annotated[int, typer.Option(min=1, help="shapes to draw for each fix")] = 200,
    seed: Annotated[int | None, typer.Option(min=0, help="draw the shapes of an earlier sweep; random without")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda: where legs run")] = "auto",
    json_out: Annotated[str | None, typer.Option("--json", metavar="F", help="write JSON to F ('-': stdout)")] = None,
) -> None:
    """Random shapes of a fix against its model, with the fix in and out; the smallest that disagrees.

    Example: unfix sweep 27338:topk-factor --examples 500 --seed 1
    """
    from harness.sweep import Sweeper  # hypothesis takes a while to import, and no other command needs it

    output.check_json(json_out)
    root, device = project_root(), resolve_device(device)
    registered = fixes.load(root / "toggles")
    spaces = _spaces(sel, registered, device)
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    reverted = run_cli.session_revert(registered, TARGET)
    output.note(f"--seed {seed} --examples {examples} draws the same shapes again")
    swept, documents = [], []
    concerned = concerning(registered, [*reverted, *(space.fix for space in spaces)])
    company = Company(device, min(JOBS[device], os.cpu_count() or 1))
    with Sweeper(concerned, device=device, root=root, session=reverted, company=company) as prover:
        for space in spaces:
            output.note(f"{space.fix}: {examples} shapes, on the {device}")
            swept.append(prover.sweep(space, examples, seed))
            again = None
            if smallest := swept[-1].smallest:
                again = rerun.command(smallest.as_dict(), None, registered, report_cli.takes(ctx))
            documents.append({**swept[-1].as_dict(), "again": again})
            if json_out != "-":
                output.say("\n".join(lines(swept[-1], again)))
        environment = prover.environment
    if json_out:
        document = {
            "schema_version": report.SCHEMA_VERSION, "environment": environment, "session_reverted": list(reverted),
            "examples": examples, "seed": seed, "fixes": documents,
        }  # fmt: skip
        output.write_json(json_out, document, output.say)
    raise typer.Exit(exit_code(swept))


def lines(swept: Swept, again: str | None) -> list[str]:
    """For a reader. ``again``: the command that shows the smallest shape that disagrees."""
    fix, ran = swept.fix, swept.ran
    if swept.stopped:
        return [f"{fix}: {swept.stopped.verdict.kind}: {swept.stopped.verdict.reason}"]
    said = [
        f"{fix}: {swept.shapes} shapes: {', '.join(f'{n} {kind}' for kind, n in (+swept.verdicts).items())}; "
        f"{swept.told} tell the fix from its absence; {swept.rate:.0f} a second, "
        f"{ran.together} legs in {ran.processes} processes and {ran.alone} alone"
    ]
    if not swept.told and not swept.smallest:
        said.append(f"{fix}: no shape tells it from its absence, so nothing was learnt; draw more")
    if swept.disturbed:
        few = ", ".join(swept.disturbed[:_SHOWN]) + (", …" if len(swept.disturbed) > _SHOWN else "")
        said.append(f"{fix}: {len(swept.disturbed)} disturbed by what ran before them, and as declared alone: {few}")
    if swept.smallest:
        said += ["the smallest that does not do as declared:", report.explain(swept.smallest), f"again: {again}"]
    return said


def exit_code(found: Sequence[Swept]) -> int:
    """4 where nothing was learnt of a fix, else 3 where one is rotted, else 1 where a shape disagrees, else 0."""
    stopped = {swept.stopped.verdict.kind for swept in found if swept.stopped}
    findings = any(swept.smallest or swept.disturbed for swept in found)
    if stopped - {"rotted"} or not all(swept.told or swept.smallest or swept.stopped for swept in found):
        return 4
    return 3 if stopped else int(findings)


def concerning(registered: fixes.Catalogue, ids: Collection[str]) -> fixes.Catalogue:
    """The fixes with these ids, and all of their scenarios: a leg of theirs never meets another's guard."""
    scenarios = {registered.fix(name).scenario for name in ids}
    return fixes.Catalogue(tuple(fix for fix in registered if fix.id in ids or fix.scenario in scenarios))


def _spaces(sel: str, registered: fixes.Catalogue, device: str) -> list[Space]:
    chosen = selection.parse(sel, registered, source="SEL")
    if not chosen:
        raise UsageError(f"SEL {sel!r} selects no fix; known: {', '.join(registered.ids)}")
    strategies = importlib.import_module("regressions.strategies")
    spaces = {name: strategies.space(name, registered.fix(name).scenario, device) for name in chosen}
    having = f"there is one for the scenarios {', '.join(strategies.SCENARIOS)}"
    if without := [name for name, space in spaces.items() if not space]:
        said = f"no strategy draws shapes for {', '.join(without)} ({having})"
        if len(without) == len(spaces):
            raise UsageError(said)
        output.note(said)
    return [space for space in spaces.values() if space]
