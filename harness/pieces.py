"""What reversals change in a file, worked out in the functions around their targets: a file has thousands of lines.

What an edit does in a function depends on nothing outside of it. An edit of its first line may, as may lines put behind
its last, and what is wrong with an edit is told better with all of the file in view: these are worked out there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from harness.edits import Change, Reversal, apply
from harness.errors import RottedError
from harness.outline import Crop
from harness.remembered import remembered
from harness.targets import Location
from harness.tokens import Language

_AT_THE_LEFT = re.compile(r"\n[^\s#]")


@dataclass(frozen=True)
class Piece:
    """`old` at this character offset of a file becomes `new`."""

    start: int
    old: str
    new: str


def pieces(located: Sequence[tuple[Reversal, Location]], *, explain: bool = True) -> list[Piece]:
    """The pieces of one file that these reversals change, in order.

    Raises RottedError as `edits.apply` does; without `explain` it says less, and sooner.
    """
    source = located[0][1].source.text
    whole = Crop(0, len(source))
    crops = sorted({place.crop for _, place in located}, key=lambda crop: (crop.start, crop.end))
    apart = all(one.end <= other.start for one, other in zip(crops, crops[1:], strict=False))
    found = [_changed(located, crop, explain) for crop in crops if apart and crop != whole]
    if found and all(found):
        return [piece for piece in found if piece]
    return [Piece(0, source, _applied(located, whole, explain))]


def join(text: str, changed: Iterable[Piece]) -> str:
    """The text with its pieces changed."""
    parts, at = [], 0
    for piece in changed:
        parts += [text[at : piece.start], piece.new]
        at = piece.start + len(piece.old)
    return "".join([*parts, text[at:]])


def _changed(located: Sequence[tuple[Reversal, Location]], crop: Crop, explain: bool) -> Piece | None:
    """What those of the reversals that are in a crop change in it; None if that takes the whole file."""
    inside = [(reversal, place) for reversal, place in located if place.crop == crop]
    try:
        new = _applied(inside, crop, explain=False)
    except RottedError:
        if explain:
            return None
        raise
    old = crop.text(located[0][1].source.text)
    appends = any(edit.append is not None for reversal, _ in inside for edit in reversal.edits)
    if not _is_inside(old, new, crop.head, appends):
        return None
    return Piece(crop.start, old[len(crop.head) :], new[len(crop.head) :])


def _applied(located: Sequence[tuple[Reversal, Location]], crop: Crop, explain: bool) -> str:
    """The crop's text with these edits made."""
    place = located[0][1]
    changes = tuple(
        Change(edit, crop.regions(each.regions), reversal.fix, reversal.target)
        for reversal, each in located
        for edit in reversal.edits
    )
    return _apply(crop.text(place.source.text), changes, place.language, place.relpath.as_posix(), explain)


@lru_cache(maxsize=64)  # finding out how a source reads, and then taking a fix out, make the same edits
def _apply(text: str, changes: tuple[Change, ...], language: Language, name: str, explain: bool) -> str:
    def work() -> dict[str, Any]:
        try:
            return {"text": apply(text, changes, language=language, name=name, explain=explain)}
        except RottedError as error:
            return {"rotted": error.message, "fix": error.fix, "target": error.target}

    about = [[{**vars(change), "edit": vars(change.edit)} for change in changes], language, name, explain]
    answer = remembered("pieces.apply", text, about, work)
    if "rotted" in answer:
        raise RottedError(answer["rotted"], fix=answer["fix"], target=answer["target"])
    return str(answer["text"])


def _is_inside(old: str, new: str, head: str, appends: bool) -> bool:
    """Whether a crop begins as it did, ends as it did where lines were put behind others, and is all in its class."""
    lines = old[len(head) :].splitlines(keepends=True)
    ends = new.startswith(head + lines[0]) and (new.endswith(lines[-1]) or not appends)
    return ends and not (head and _AT_THE_LEFT.search(new, len(head) - 1))
