"""What the drafted files say: a toggle file, a scenario with one function to fill in, and a regression's table."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from harness.draft import DraftFix
from harness.edits import Edit
from harness.errors import UsageError

_PLAIN = re.compile(r"[A-Za-z(][^:#\[\]{}\"'`|>&*!%@\\,]*[^\s:#\[\]{}\"'`|>&*!%@\\,]")
UPSTREAM = "https://github.com/sgl-project/sglang/pull/"


def toggle(
    pr: str, title: str, fixes: Sequence[DraftFix], code_base: str, scenario: str, entered_by: Mapping[str, str]
) -> str:
    """The text of `toggles/<pr>.yaml`. `entered_by`: for each target that isn't Python, what loads its build.

    Raises UsageError for a target that is called so that it can't be written there.
    """
    for target in (target for fix in fixes for target in fix.reversals):
        if not re.fullmatch(r"[\w./+-]+", target):  # it becomes YAML, and Python's comments
            raise UsageError(f"{target!a} can't be named in a toggle file")
    lines = ["# yaml-language-server: $schema=schema.json", f"pr: {pr}", f"title: {_scalar(title)}"]
    if code_base == "sglang" and pr.isdigit():
        lines += ["links:", f"  - {UPSTREAM}{pr}"]
    lines.append("fixes:")
    for fix in fixes:
        lines += [f"  {fix.name}:", f"    kind: {fix.kind}", f"    summary: {_scalar(fix.summary)}"]
        lines += [f"    scenario: {scenario}"]
        lines += [f"    guard: {_scalar(fix.guard)}"] if fix.guard else []
        lines += [
            "    legs:  # what its absence shows: overflow, wrong, crashed, error, … Correct it where it is another"
        ]
        lines += [f"      - {{out: [{', '.join(out)}], outcome: {outcome}}}" for out, outcome in legs(fix, fixes)]
        lines += ["    reversals:", f"      {code_base}:"]
        for target, edits in fix.reversals.items():
            lines.append(f"        - target: {target}")
            lines += [f"          entered_by: {entered_by[target]}"] if target in entered_by else []
            lines.append("          edits:")
            lines += [line for edit in edits for line in _edit(edit)]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def legs(fix: DraftFix, fixes: Sequence[DraftFix]) -> list[tuple[list[str], str]]:
    """For each leg with the fix out, the fixes that are out and the outcome that is likely."""
    if fix.kind == "guard":
        return [([fix.name], "overflow")]
    guards = [other.name for other in fixes if other.kind == "guard"] if fix.kind == "size" else []
    alone = "overflow" if fix.kind == "size" else "wrong"
    return [([fix.name], "guarded"), ([fix.name, *guards], "overflow")] if guards else [([fix.name], alone)]


def scenario(pr: str, fixes: Sequence[DraftFix]) -> str:
    """The text of `regressions/scenarios/pr_<pr>.py`."""
    targets = list(dict.fromkeys(target for fix in fixes for target in fix.reversals))
    detector = "red-zone" if any(fix.kind in ("size", "guard") for fix in fixes) else "none"
    return _SCENARIO.format(
        pr=pr, targets="\n".join(f"    {target}" for target in targets), detector=detector, module=f"pr_{pr}"
    )


def regression(pr: str, fixes: Sequence[DraftFix]) -> str:
    """The text of `regressions/test_<pr>.py`: a truth table of every leg, and a test a fix."""
    table = [["", "fix in", "out", "out, guards too"]]
    blocks = []
    for fix in fixes:
        shown = [outcome for _, outcome in legs(fix, fixes)]
        on = "guarded" if fix.kind == "guard" else "clean"
        table += [[fix.name, on, *shown], ["  cannot tell", "clean", *["clean"] * len(shown)]]
        name = fix.name.replace("-", "_")
        stray = 2 if "overflow" in shown else 0
        blocks.append(
            _TEST.format(pr=pr, fix=fix.name, name=name, table=name.upper(), module=f"pr_{pr}", on=on, stray=stray)
        )
    wide = [max(len(row[at]) for row in table if at < len(row)) for at in range(4)]
    lines = ["    ".join(cell.ljust(wide[at]) for at, cell in enumerate(row)).rstrip() for row in table]
    return _REGRESSION.format(pr=pr, table="\n".join(lines), module=f"pr_{pr}") + "\n\n".join(blocks)


def _edit(edit: Edit) -> list[str]:
    lines = [f"            - match: {_bar(edit.match)}", *_block(edit.match)]
    for key in ("replacement", "prepend", "append"):
        if (text := getattr(edit, key)) is not None:
            lines += [f"              {key}: {_bar(text)}", *_block(text)] if text else [f'              {key}: ""']
    return lines


def _bar(text: str) -> str:
    """A block whose first line is indented must say by how much the block itself is."""
    return "|2" if text.startswith((" ", "\t")) else "|"


def _block(text: str) -> list[str]:
    return [" " * 16 + line if line else "" for line in text.split("\n")]


def _scalar(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


_SCENARIO = '''"""PR {pr}: how what it fixed is shown. Drafted by `unfix new`.

What it changed:
{targets}
"""

from __future__ import annotations

from typing import Any

from harness.case import Case, Stray

OPTIONS = ()  # of `unfix repro`
DETECTOR = "{detector}"  # "red-zone" watches what run() allocates through torch; "none" watches nothing


def run(params: dict[str, Any], device: str) -> dict[str, Any]:
    """FILL IN. Drive the code under test once, in a throwaway process, on the input that ``params["n"]`` stands for.

    1. Make the buffers and the arguments, as torch tensors on ``device``, small enough to read.
    2. Call the code under test: import it in here, and nothing of it above.
    3. Raise ``harness.leg.WrongValues`` where a result differs from a reference that is computed in here.
    4. Return facts that are worth seeing, or {{}}.
    """
    raise NotImplementedError("fill in run() of regressions/scenarios/{module}.py")


def case(fix: str, *, n: int = 8, on: str = "clean", tells: int = 1, stray: int = 0) -> Case:
    """One input. ``on``: its outcome with the fix in; ``tells``: whether it tells the fix from its absence; ``stray``:
    the elements that end up behind the buffer with every guard out, by arithmetic and never by the code under test."""
    return Case(
        id=f"{module}-n{{n}}",
        entry=f"{{__name__}}:run",
        params={{"n": n}},
        on=on,
        tells=bool(tells),
        why="" if tells else "the fix makes no difference to this input",
        stray=Stray("after", stray) if stray else None,
        detector=DETECTOR,
    )
'''

_REGRESSION = '''"""#{pr}, drafted by `unfix new`. Fill in run() of scenarios/{module}.py, and make these rows true.

{table}
"""

import pytest

from regressions.scenarios import {module}
from regressions.tables import shapes

'''

_TEST = '''{table} = """
n  on       tells  stray
8  {on:<7}  1      {stray}    # tells the fix from its absence
1  clean    0      0    # cannot tell
"""


def {name}_cases(device):
    return [{module}.case("{pr}:{fix}", **row) for row in shapes({table})]


@pytest.mark.fix("{pr}:{fix}")
@pytest.mark.cases(of={name}_cases)
def test_{name}(prove, case):
    prove(case)
'''
