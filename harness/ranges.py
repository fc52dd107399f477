"""How large the integers of a TTIR graph can get: intervals, from what is known about the variables in the source.

Known are constants, `tl.arange`, the largest grid that CUDA launches, and the bounds that somebody wrote down for
variables of the kernel by name. All else is anything that its type holds. Arithmetic is that of the mathematicians: a
32-bit operation whose exact result may leave 32 bits *overflows*, and from there on its value is anything, too.
"""

from __future__ import annotations

import functools
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from harness.mlir import Value

# CUDA's largest grid, in programs (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")
GRID = {"x": 2**31 - 1, "y": 65535, "z": 65535}
_ROUNDS = 3  # a value that still grows after so many times round a loop is anything


@dataclass(frozen=True)
class Range:
    """From `low` to `high`, both possible ends. `known` is False where a type is the only limit of something in it."""

    low: int
    high: int
    known: bool = True

    def __or__(self, other: Range) -> Range:
        return Range(min(self.low, other.low), max(self.high, other.high), self.known and other.known)

    def fits(self, bits: int) -> bool:
        return -(2 ** (bits - 1)) <= self.low and self.high < 2 ** (bits - 1)


def of_type(bits: int) -> Range:
    return Range(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1, known=False)


def is_variable(value: Value) -> bool:
    """Whether it is what the source's variable of its name holds, and no part of the expression assigned to it."""
    return bool(value.name) and not any(user.name == value.name and user.line == value.line for user in value.users)


class Ranges:
    """The interval of every value of one kernel. `bounds`: a variable's name -> (lowest, largest)."""

    def __init__(self, values: Sequence[Value], bounds: Mapping[str, tuple[int, int]]) -> None:
        self._bounds = bounds
        self.used: set[str] = set()
        self._exacts: dict[Value, Range] = {}
        self._found: dict[Value, Range] = {}
        grown: Counter[Value] = Counter()
        changed = True
        while changed:
            changed = False
            for value in values:
                if any(each in self._found for each in value.inputs) or not value.inputs:
                    before = self._found.get(value)
                    self._put(value, widen=grown[value] > _ROUNDS)
                    if self._found[value] != before:
                        grown[value] += value.op == "phi"
                        changed = True

    def of(self, value: Value) -> Range:
        """What it can be, after a wrap anything of its type."""
        return self._found[value]

    def exact(self, value: Value) -> Range:
        """What it would be if integers had no width."""
        return self._exacts[value]

    def overflows(self, value: Value) -> bool:
        """Whether its width is too small for what is computed here."""
        return not self._exacts[value].fits(value.bits or 64)

    def _put(self, value: Value, widen: bool) -> None:
        bits = value.bits or 64
        inputs = [self._found.get(each) for each in value.inputs]
        exact = of_type(bits) if widen else self._exact(value, inputs)
        if value.name in self._bounds and is_variable(value):
            self.used.add(value.name)
            low, high = self._bounds[value.name]
            exact = Range(min(max(exact.low, low), high), max(min(exact.high, high), low))
        self._exacts[value] = exact
        self._found[value] = exact if exact.fits(bits) else of_type(bits)

    @staticmethod
    def _exact(value: Value, inputs: Sequence[Range | None]) -> Range:
        anything = of_type(value.bits or 64)
        match value.op:
            case "arith.constant":
                found = re.search(r"(?:dense<)?(-?\d+)>? : ", value.text)
                return Range(int(found.group(1)), int(found.group(1))) if found else anything
            case "tt.make_range":
                start, end = (int(re.findall(rf"{side} = (-?\d+)", value.text)[0]) for side in ("start", "end"))
                return Range(start, end - 1)
            case "tt.get_program_id":
                return Range(0, GRID[value.text.split()[1]] - 1)
            case "tt.get_num_programs":
                return Range(1, GRID[value.text.split()[1]])
        given = [each for each in inputs if each is not None]
        if value.op in JOINS:  # a loop's variable starts with what enters the loop
            joined = functools.reduce(operator.or_, given)
            return joined if joined.fits(value.bits or 64) else anything
        rule = RULES.get(value.op)
        return rule(*given) if rule and len(given) == len(inputs) else anything


SHAPE = frozenset({"tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans"})
WIDTH = frozenset({"arith.extsi", "arith.extui", "arith.trunci"})
JOINS = SHAPE | WIDTH | {"phi"}


def _ends(left: Range, right: Range, ends: list[int]) -> Range:
    return Range(min(ends), max(ends), left.known and right.known)


def _product(a: Range, b: Range) -> Range:
    return _ends(a, b, [x * y for x in (a.low, a.high) for y in (b.low, b.high)])


def _shifted(a: Range, b: Range) -> Range:
    if b.low < 0 or b.high > 63:
        return of_type(64)
    return _product(a, Range(2**b.low, 2**b.high, b.known))


def _quotient(a: Range, b: Range) -> Range:
    if b.low < 1:  # by what may be zero or less: no larger than the dividend
        far = max(abs(a.low), abs(a.high))
        return Range(-far, far, a.known)
    return _ends(a, b, [abs(x) // y * (1 if x >= 0 else -1) for x in (a.low, a.high) for y in (b.low, b.high)])


def _remainder(a: Range, b: Range) -> Range:
    far = max(abs(b.low), abs(b.high)) - 1
    return Range(max(min(a.low, 0), -far), min(max(a.high, 0), far), a.known or b.known)


RULES: dict[str, Callable[..., Range]] = {
    "arith.muli": _product,
    "arith.addi": lambda a, b: _ends(a, b, [a.low + b.low, a.high + b.high]),
    "arith.subi": lambda a, b: _ends(a, b, [a.low - b.high, a.high - b.low]),
    "arith.shli": _shifted,
    "arith.divsi": _quotient,
    "arith.remsi": _remainder,
    "arith.minsi": lambda a, b: _ends(a, b, [min(a.low, b.low), min(a.high, b.high)]),
    "arith.maxsi": lambda a, b: _ends(a, b, [max(a.low, b.low), max(a.high, b.high)]),
    "arith.select": lambda _, a, b: a | b,
    "iv": lambda a, b, _: _ends(a, b, [a.low, b.low, a.high, b.high - 1]),
}  # fmt: skip
