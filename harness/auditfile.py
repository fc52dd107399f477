"""The audit files, `audits/<code base>.yaml`: which kernels are audited, compiled with what, and what is known of them.

    kernels:
      - targets: [pkg.mod.kernel]          # where it may be; of a kernel's entries the first that fits the sources
        optional: true                     # the sources may have no such kernel
        args: {kv_indices: "*i32", row_stride: i32, page_size: 1}    # a type, or the value of a constexpr
        builds:                            # compiled again, with what differs, where the kernel has such parameters
          page_size 16: {args: {page_size: 16}, at_most: {}}
        at_most:                           # the largest value of a variable of the kernel, by its name in the source
          step: {value: 63, why: no drafter takes more than 64 steps}
        allow:                             # 32-bit products that may look too large and are not, by their source line
          - line: out = kv_indices + seq * n * topk
            reason: stays within a row, which 27486's guard keeps below 2**31 elements

Every bound and every line must be of use: one that names no variable, or on whose line nothing is found, is an error.
Bounds are from 0; a variable may be an argument, a program's id, a loaded value or a result.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from harness.errors import RottedError, ToggleError
from harness.outline import definitions
from harness.targets import Location, locate
from harness.togglefile import Target
from harness.ttir import Build
from harness.yamlfile import Node, read

Argument = str | int | float | bool | None
Line = Annotated[str, StringConstraints(pattern=r"^\S.*\S$")]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Bound(_Model):
    value: int = Field(ge=0)
    why: Line


class Allowed(_Model):
    line: Line
    reason: Line


class Variation(_Model):
    """What one more build of a kernel has differently."""

    args: Mapping[str, Argument]
    at_most: Mapping[str, Bound] = {}


class Kernel(_Model):
    """One kernel as one form of the sources has it."""

    targets: list[Target] = Field(min_length=1)
    args: Mapping[str, Argument]
    optional: bool = False
    builds: Mapping[Line, Variation] = {}
    at_most: Mapping[str, Bound] = {}
    allow: list[Allowed] = []

    @property
    def name(self) -> str:
        return self.targets[0].rpartition(".")[2]


class _File(_Model):
    kernels: list[Kernel] = Field(min_length=1)


@dataclass(frozen=True)
class Chosen:
    """A kernel as it is in one source tree: its entry, and what is compiled, by the build's name ("" for the plain)."""

    kernel: Kernel
    builds: dict[str, Build]

    def bounds(self, build: str) -> dict[str, tuple[int, int]]:
        """A variable's name -> (lowest, largest), as a build has them."""
        bounds = {**self.kernel.at_most, **(self.kernel.builds[build].at_most if build else {})}
        return {name: (0, bound.value) for name, bound in bounds.items()}


@dataclass(frozen=True)
class AuditFile:
    """The kernels of one code base, and the file's lines for errors."""

    kernels: tuple[Kernel, ...]
    node: Node

    def choose(self, sources: Path) -> list[Chosen]:
        """For each kernel the entry whose path and parameters are those of the sources, which are read, not imported.

        Raises RottedError where no entry of a kernel fits, with what is wrong with each.
        """
        chosen = []
        for name in dict.fromkeys(kernel.name for kernel in self.kernels):
            forms = [(each, target) for each in self.kernels if each.name == name for target in each.targets]
            misses, absent = [], 0
            for kernel, target in forms:
                try:
                    place = locate(target, [sources])
                except RottedError as error:
                    misses.append(str(error))
                    absent += kernel.optional
                    continue
                if wrong := _misfit(kernel, place):
                    misses.append(f"{target}: {wrong}")
                    continue
                chosen.append(Chosen(kernel, _builds(kernel, target, place)))
                break
            else:
                if absent < len(forms):
                    line = self.node.error(("kernels",), f"no entry of {name} fits {sources}")
                    raise RottedError(f"{line}: {'; '.join(misses)}")
        return chosen

    def complaint(self, kernel: Kernel, where: tuple[Any, ...], message: str) -> str:
        """One line about a part of a kernel's entry: file, line, message."""
        return self.node.error(("kernels", self.kernels.index(kernel), *where), message)


def load(path: Path) -> AuditFile:
    """Read an audit file. Raises ToggleError, a line for each thing that is wrong."""
    node = read(path)
    try:
        return AuditFile(tuple(_File.model_validate(node.value).kernels), node)
    except ValidationError as error:
        lines = [node.error(node.known_path(item["loc"]), _words(dict(item))) for item in error.errors()[:10]]
        raise ToggleError("\n".join(lines)) from None


def _words(item: dict[str, Any]) -> str:
    name = item["loc"][-1]
    return {
        "missing": f"{name} is missing",
        "extra_forbidden": f"unknown key {name}",
    }.get(item["type"], str(item["msg"]).removeprefix("Value error, "))


def _misfit(kernel: Kernel, place: Location) -> str:
    """What is wrong with an entry for the kernel at this place, "" if nothing is."""
    has, needed = _parameters(place)
    wrong = [f"it has no {name}" for name in kernel.args if name not in has]
    wrong += [f"args lack its {name}" for name in needed if name not in kernel.args]
    return ", ".join(wrong)


def _builds(kernel: Kernel, target: str, place: Location) -> dict[str, Build]:
    has, _ = _parameters(place)
    more = {name: build.args for name, build in kernel.builds.items() if set(build.args) <= set(has)}
    return {name: Build(target, {**kernel.args, **changes}) for name, changes in [("", {}), *more.items()]}


def _parameters(place: Location) -> tuple[list[str], list[str]]:
    """A function's parameters, and those of them without a default."""
    [node, *_] = definitions(place.source.text)[place.qualname][0]
    if not isinstance(node, ast.FunctionDef):
        return [], []
    has = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
    return has, has[: len(has) - len(node.args.defaults)]
