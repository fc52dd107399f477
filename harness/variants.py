"""Which of a fix's forms a source tree reads like: fixed, not fixed, or rotted. Only the source text decides.

A tree is *fixed* where exactly one variant applies in full, *not fixed* where exactly one unfixed form does. Where no
form applies as it is written, forms that only replace are tried backwards: code that reads like what a reversal would
write lacks the fix, and code that reads like what an unfixed form would write has it. Backwards, a match must be whole,
since nobody chose that text to be told apart: `n * ctx` isn't in `topk * n * ctx`. None, or more than one, is *rotted*.
The rules for writing forms are in the JSON Schema, under FormsEntry.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.edits import Edit, Reversal
from harness.errors import RottedError, UnfixError
from harness.fixes import Catalogue, Fix, Variant
from harness.outline import Region
from harness.pieces import pieces
from harness.snippets import Pattern, Text
from harness.targets import Location, locate
from harness.tokens import language_of

# What stands around a whole statement, argument or right-hand side.
_BEFORE = frozenset({"(", "[", "{", "}", ",", ":", ";", "=", "return", "yield", "assert", "raise"})
_AFTER = frozenset({")", "]", "}", ",", ":", ";"})

Kind = Literal["fixed", "not fixed", "rotted"]


class NotFixedError(UnfixError):
    """There is nothing to take out: these sources lack the fix."""


class AlreadyFixedError(UnfixError):
    """There is nothing to put in: these sources have the fix."""


@dataclass(frozen=True)
class State:
    """What a source tree says about one fix.

    `variant` is the form that applies ("" for a plain list), `reversals` what turns it: takes the fix out of a fixed
    tree, puts it into one that isn't, () for a rotted one. `lines` are the 1-based places that it changes, as
    (path below the root, line). `message` says why it is rotted, in one line.
    """

    kind: Kind
    variant: str = ""
    reversals: tuple[Reversal, ...] = ()
    lines: tuple[tuple[str, int], ...] = ()
    message: str = ""


def state(fix: Fix, code_base: str, roots: Sequence[Path | str] = ()) -> State:
    """Find out which form of `fix` the sources below `roots`, else on the import path, read like. Imports nothing.

    Raises MissingPackageError where the package isn't there at all.
    """
    return judge(fix.variants_for(code_base), fix.unfixed_for(code_base), roots)


def judge(variants: Sequence[Variant], unfixed: Sequence[Variant], roots: Sequence[Path | str] = ()) -> State:
    """`state` for forms that are no registered fix's, such as an entry of SGLang's own registry."""
    found = _applying("fixed", variants, roots) + _applying("not fixed", unfixed, roots)
    if not found:
        found = _applying("fixed", _backwards(unfixed), roots, whole=True)
        found += _applying("not fixed", _backwards(variants), roots, whole=True)
    if len(found) == 1:
        return found[0]
    if found:
        read = " and ".join(f"{each.kind} ({each.variant or 'its reversal'} applies)" for each in found)
        return State("rotted", message=f"reads as {read}: make these forms tell each other apart")
    misses = [_miss(form, roots) for form in (*variants, *unfixed)]
    return State("rotted", message="; ".join(misses) or "no form says how it reads here")


def choose(fix: Fix, code_base: str, roots: Sequence[Path | str] = ()) -> tuple[Reversal, ...]:
    """What takes `fix` out of these sources.

    A fix with one plain list of reversals isn't probed: planning an overlay finds out what is wrong with it. Raises
    RottedError, with each form's nearest miss and its line, and NotFixedError where the sources lack the fix.
    """
    variants = fix.variants_for(code_base)
    if len(variants) == 1 and not fix.unfixed_for(code_base):
        return variants[0].reversals
    here = state(fix, code_base, roots)
    if here.kind == "rotted":
        raise RottedError(here.message, fix=fix.id, target=code_base)
    if here.kind == "not fixed":
        why = "" if variants else ", nor in any release known"
        raise NotFixedError(f"{fix.id} isn't in this {code_base}{_form(here)}{why}: nothing to take out")
    return here.reversals


def choose_forward(fix: Fix, code_base: str, roots: Sequence[Path | str] = ()) -> tuple[Reversal, ...]:
    """What puts `fix` into sources that lack it. Raises RottedError, and AlreadyFixedError where they have it."""
    here = state(fix, code_base, roots)
    if here.kind == "rotted":
        raise RottedError(here.message, fix=fix.id, target=code_base)
    if here.kind == "fixed":
        raise AlreadyFixedError(f"{fix.id} is in this {code_base}{_form(here)}: nothing to put in")
    return here.reversals


def choose_all(
    catalogue: Catalogue, ids: Iterable[str], code_base: str, roots: Sequence[Path | str] = ()
) -> tuple[Reversal, ...]:
    """`choose` for several fixes, each looked up in the sources as they are; () for one that says nothing of them."""
    return tuple(
        reversal
        for fix in map(catalogue.fix, ids)
        if code_base in fix.code_bases
        for reversal in choose(fix, code_base, roots)
    )


def _form(here: State) -> str:
    return f" (it reads like {here.variant!r})" if here.variant else ""


def _applying(kind: Kind, forms: Sequence[Variant], roots: Sequence[Path | str], whole: bool = False) -> list[State]:
    found = []
    for form in forms:
        try:
            places = tuple(_probe(reversal, roots, whole, explain=False) for reversal in form.reversals)
        except RottedError:
            continue
        found.append(State(kind, form.name, form.reversals, places))
    return found


def _miss(form: Variant, roots: Sequence[Path | str]) -> str:
    """Why a form doesn't apply."""
    try:
        for reversal in form.reversals:
            _probe(reversal, roots, whole=False, explain=True)
    except RottedError as error:
        where = f"{error.target}: " if error.target else ""
        return f"{form.name}: {where}{error.message}" if form.name else f"{where}{error.message}"
    raise AssertionError(f"{form.name} was said not to apply")


def _probe(reversal: Reversal, roots: Sequence[Path | str], whole: bool, explain: bool) -> tuple[str, int]:
    """Make the edits in the target's own function or class, and return the file and the line of the first change.

    `whole`: a match that is a part of a longer expression is none.
    """
    place = locate(reversal.target, roots, explain=explain)
    [piece] = pieces([(reversal, place)], explain=explain)
    if whole and not _are_whole(reversal, place):
        raise RottedError("only in a part of an expression", target=reversal.target)
    pairs = enumerate(zip(piece.old.splitlines(), piece.new.splitlines(), strict=False))
    line = next((at for at, (old_line, new_line) in pairs if old_line != new_line), piece.new.count("\n") - 1)
    return place.relpath.as_posix(), place.source.line(piece.start) + line


def _are_whole(reversal: Reversal, place: Location) -> bool:
    text = Text(place.crop.text(place.source.text), place.language, "")
    return all(_is_whole(text, edit.match, place.crop.regions(place.regions)) for edit in reversal.edits)


def _is_whole(text: Text, match: str, regions: Sequence[Region]) -> bool:
    [(first, last)] = text.find(Pattern.of(match, text.language), regions)
    before, after = text.tokens[:first][-1:], text.tokens[last + 1 :][:1]
    begins = not before or before[0].kind in ("newline", "directive") or before[0].text in _BEFORE
    ends = not after or after[0].kind in ("newline", "directive") or after[0].text in _AFTER
    return begins and (ends or text.tokens[last].text in _BEFORE)


def _backwards(forms: Sequence[Variant]) -> list[Variant]:
    """The forms that only replace code with other code, the other way round."""
    turned = []
    for form in forms:
        reversals = [_turned(reversal) for reversal in form.reversals]
        if all(reversals):
            turned.append(Variant(form.name, tuple(each for each in reversals if each)))
    return turned


def _turned(reversal: Reversal) -> Reversal | None:
    language = language_of(reversal.target) if "/" in reversal.target else None
    edits = []
    for edit in reversal.edits:
        if edit.replacement is None or not Pattern.of(edit.replacement, language or "python").tokens:
            return None
        edits.append(Edit(edit.replacement, replacement=edit.match))
    return Reversal(reversal.fix, reversal.target, tuple(edits), reversal.entered_by)
