"""Where the values of a TTIR module come from: its `#loc3 = loc(…)` lines, and `loc(…)` at the end of an operation."""

from __future__ import annotations

import re

Frames = tuple[tuple[str, int], ...]
LOC = re.compile(r"\s+loc\((#loc\d*|(?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)")


class Locations:
    """The module's `#loc3 = loc(…)` lines: a reference -> (variable's name, frames)."""

    def __init__(self, text: str) -> None:
        self._lines = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.MULTILINE))

    def of(self, text: str) -> tuple[str, Frames]:
        text = self._lines.get(text, text)
        if found := re.fullmatch(r'"([^"]*)":(\d+):\d+(?: to .*)?', text):
            return "", ((found.group(1), int(found.group(2))),)
        if found := re.fullmatch(r'"([^"]*)"\((.*)\)', text):
            return found.group(1), self.of(found.group(2))[1]
        if found := re.fullmatch(r"callsite\((#loc\d*) at (#loc\d*)\)", text):
            name, frames = self.of(found.group(1))
            return name, frames + self.of(found.group(2))[1]
        if found := re.fullmatch(r"fused(?:<.*>)?\[(.*)\]", text):
            return self.of(found.group(1).split(", ")[0])
        return "", ()
