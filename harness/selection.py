"""Which fixes to take out: the grammar of SGLANG_DEBUG_REVERT_PR and of `--revert`."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence

from harness.errors import UsageError
from harness.fixes import Catalogue

VARIABLE = "SGLANG_DEBUG_REVERT_PR"
EXEC_VARIABLE = "UNFIX_REVERT"  # tells a command what `unfix exec` has taken out for it
VARIABLES = (VARIABLE, EXEC_VARIABLE)
_SHOWN = 60


def refuse_nested() -> None:
    """Raise UsageError inside `unfix exec` or `unfix bisect`: what they took out is on PYTHONPATH, and stays out."""
    if out := os.environ.get(EXEC_VARIABLE):
        raise UsageError(
            f"{out[:_SHOWN]} is out already ({EXEC_VARIABLE}): take all that is to be out, out in one command"
        )


def parse(text: str | None, catalogue: Catalogue, source: str = VARIABLE) -> tuple[str, ...]:
    """The ids of the selected fixes, each once, in the order they are named.

    `27338` and `own`: every fix of that PR; `27338:topk-factor`: one fix; a comma list of those; `all`; None, blank or
    `0`: none. Raises UsageError for anything else: one line that names `source`, the nearest match and what there is.
    """
    words = [word.strip() for word in (text or "").split(",")]
    if words in ([""], ["0"]):
        return ()
    chosen: dict[str, None] = {}
    for word in words:
        ids = catalogue.ids if word == "all" else [f.id for f in catalogue if word and word in (f.id, f.pr)]
        if not ids:
            raise UsageError(_unknown(word, catalogue, source))
        chosen.update(dict.fromkeys(ids))
    return tuple(chosen)


def able(ids: Sequence[str], catalogue: Catalogue, code_base: str) -> tuple[tuple[str, ...], str]:
    """Those of these fixes that can be undone in a code base, and a line that names the others, "" for none."""
    chosen = tuple(fix for fix in ids if code_base in catalogue.fix(fix).code_bases)
    others = [fix for fix in ids if fix not in chosen]
    return chosen, f"left out, since they can't be undone in {code_base}: {', '.join(others)}" if others else ""


def chosen(words: Sequence[str] | None, catalogue: Catalogue, code_base: str) -> tuple[tuple[str, ...], str]:
    """What a command's SEL… selects; without any, all that can be undone in the code base, and a line on the others.

    Raises UsageError where that is none.
    """
    wanted = ",".join(words) if words else "all"
    ids = parse(wanted, catalogue, source="SEL")
    if not ids:
        raise UsageError(f"SEL {wanted!r} selects no fix; leave it out for all of them")
    if wanted != "all":
        return ids, ""
    ids, left_out = able(ids, catalogue, code_base)
    if not ids:
        raise UsageError(f"no registered fix can be undone in {code_base}")
    return ids, left_out


def of_session(catalogue: Catalogue, environment: Mapping[str, str] = os.environ) -> tuple[str, tuple[str, ...]]:
    """The variable that takes fixes out of a whole session, and their ids: VARIABLE, or else EXEC_VARIABLE."""
    name = VARIABLE if environment.get(VARIABLE) or not environment.get(EXEC_VARIABLE) else EXEC_VARIABLE
    return name, parse(environment.get(name), catalogue, source=name)


def _unknown(word: str, catalogue: Catalogue, source: str) -> str:
    shown = ascii(word if len(word) <= _SHOWN else word[:_SHOWN] + "...")
    if word == "0":
        return f"{source}: '0' means no fix at all, so it can't be in a list"
    if not word:
        return f"{source}: nothing between two commas: name a fix there, or take a comma out"
    names = {fix.name: fix.id for fix in reversed(catalogue.fixes)}
    known = [*catalogue.ids, *catalogue.prs, "all"]
    near = difflib.get_close_matches(word[:_SHOWN], known, 1, 0.5)
    near = near or [names[hit] for hit in difflib.get_close_matches(word[:_SHOWN], names, 1, 0.5)]
    hint = f", did you mean {near[0]}?" if near else ""
    every = ", ".join(catalogue.ids) or "none"
    return f"{source}: unknown fix {shown}{hint} (known: {every}; or a PR's number, or all)"
