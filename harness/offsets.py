"""What the offset of a pointer is made of: the way back from each `tt.addptr`, and how it reads in the source.

An operation on that way that is not known here is an InfraError: what is behind it might be a product.
"""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from typing import Any

from harness.errors import InfraError
from harness.mlir import Value
from harness.ranges import SHAPE, WIDTH, is_variable

PRODUCTS = {"arith.muli": " * ", "arith.shli": " << "}
SUMS = {"arith.addi": " + ", "arith.subi": " - "}
_SIGNS = {**PRODUCTS, **SUMS, "arith.divsi": " // ", "arith.remsi": " % "}
# What an offset is made of, and what it starts from. Anything else on the way to a pointer is an error.
_CARRIERS = SHAPE | WIDTH | set(_SIGNS) | {f"arith.{name}" for name in (
    "divui", "remui", "minsi", "maxsi", "minui", "maxui", "select", "shrsi", "shrui", "andi", "ori", "xori",
)} | {"phi", "iv"}  # fmt: skip
_STARTS = {
    "argument", "element", "arith.constant", "arith.cmpi", "arith.cmpf", "arith.fptosi", "tt.make_range", "tt.load",
    "tt.get_program_id", "tt.get_num_programs", "tt.reduce", "tt.scan", "tt.atomic_rmw", "tt.atomic_cas",
}  # fmt: skip
_UNREAD = {"tt.make_tensor_ptr", "tt.make_tensor_descriptor", "tt.call"}


def source_line(value: Value) -> str:
    """The text of the line that a value is computed on; of an expression over several lines, its own."""
    return linecache.getline(*value.line).strip() if value.line else ""


def reached(values: Sequence[Value], target: str) -> dict[Value, set[str]]:
    """Every value that is part of some pointer's offset, with the arguments that these pointers come from."""
    found: dict[Value, set[str]] = {}
    for move in values:
        if move.op in _UNREAD:
            raise InfraError(f"{target}: {_at(move)}: the audit can't follow {move.op}")
        if move.op != "tt.addptr":
            continue
        pointers = _pointers(move.inputs[0])
        todo = [move.inputs[1]]
        while todo:
            value = todo.pop()
            if value in found and pointers <= found[value]:
                continue
            if value.op not in _CARRIERS | _STARTS:
                raise InfraError(f"{target}: {_at(value)}: the audit can't follow {value.op} to a pointer")
            found.setdefault(value, set()).update(pointers)
            if value.op in _CARRIERS:
                todo += value.inputs
    return found


def _pointers(base: Value) -> set[str]:
    names, todo, seen = set(), [base], set()
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        if value.op == "tt.addptr":
            todo.append(value.inputs[0])
        elif value.op in _CARRIERS:
            todo += value.inputs
        else:
            names.add(value.name or value.op)
    return names


def inside(value: Value) -> set[Value]:
    """All that goes into a value, loops included, without itself."""
    seen: set[Value] = set()
    todo = list(value.inputs)
    while todo:
        each = todo.pop()
        if each not in seen and each.op in _CARRIERS:
            seen.add(each)
            todo += each.inputs
    return seen - {value}


def parts_of(value: Value) -> list[Value]:
    """The products inside a product `a * b * c` that are no variable of their own."""
    found = []
    for each in value.inputs if value.op in PRODUCTS else ():
        while each.op in SHAPE and not is_variable(each):
            each = each.inputs[0]
        if each.op in PRODUCTS and not is_variable(each):
            found += [each, *parts_of(each)]
    return found


def leaves(value: Value) -> list[Value]:
    """The factors of a product, or the terms of a sum, from left to right."""
    signs = PRODUCTS if value.op in PRODUCTS else SUMS
    found = []
    for each in value.inputs:
        while each.op in SHAPE and not is_variable(each):
            each = each.inputs[0]
        found += leaves(each) if each.op in signs and not is_variable(each) else [each]
    return found


def expression(value: Value, names: Mapping[Any, str], top: bool = False) -> str:
    """A value as the source would have it: a variable's name, a constant, or the expression."""
    while value.op in SHAPE | WIDTH and not is_variable(value):
        value = value.inputs[0]
    if value.op == "arith.constant":
        number = value.text.partition(" ")[2].partition(" : ")[0].removeprefix("dense<").removesuffix(">")
        is_int = number.lstrip("-").isdigit()
        return names.get(int(number), number) if is_int and int(number) > 1 else number
    if (is_variable(value) or value.op == "argument") and not top:
        return value.name
    if value.op in _SIGNS:
        said = _SIGNS[value.op].join(expression(each, names) for each in value.inputs)
        return said if top or value.op in PRODUCTS else f"({said})"
    axis = {"tt.get_program_id": "program_id", "tt.get_num_programs": "num_programs"}
    if value.op in axis:
        return f"{axis[value.op]}({'xyz'.index(value.text.split()[1])})"
    return value.op.rpartition(".")[2]


def _at(value: Value) -> str:
    return "{}:{}".format(*value.line) if value.line else "unknown line"
