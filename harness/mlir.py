"""Reads the text of a TTIR module into one graph of values, with control flow flattened away.

Every SSA value becomes a `Value`: the operation that made it and the values it was made from. A loop's carried value,
an `scf.if`'s result and a block's argument become a `phi` of all that may flow into it; a loop's counter becomes an
`iv` of its bounds. Names are looked up by scope, since MLIR uses a name again once its region has ended.

What an operation means is not known here. A line that can't be read is an InfraError: skipping it could hide a product.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from harness.errors import InfraError
from harness.mlirloc import LOC, Frames, Locations


@dataclass(eq=False)
class Value:
    """`op` is the operation (`arith.muli`, `argument`, `phi`, `iv`), `type` its MLIR type, `text` its line.

    `name` is the variable in the kernel's source that it was assigned to, "" if none; `frames` are the (file, line) it
    comes from, the innermost call first.
    """

    op: str
    inputs: list[Value] = field(default_factory=list)
    type: str = ""
    text: str = ""
    name: str = ""
    frames: Frames = ()
    users: list[Value] = field(default_factory=list)

    @property
    def bits(self) -> int | None:
        """The width of an integer, or of a tensor's integer elements."""
        found = re.fullmatch(r"(?:tensor<(?:\d+x)+)?i(\d+)>?", self.type)
        return int(found.group(1)) if found else None

    @property
    def line(self) -> tuple[str, int] | None:
        return self.frames[0] if self.frames else None


def read(text: str) -> list[Value]:
    """All values of the module's functions, in the order of the text."""
    reader = _Reader(Locations(text))
    for line in text.splitlines():
        if line and not line.startswith("#"):
            reader.line(line.strip())
    for value in reader.values:
        for each in value.inputs:
            each.users.append(value)
    return reader.values


@dataclass
class _Region:
    """An open region: the operation around it, its arguments, what it yields, and the names seen in it."""

    op: str
    results: list[Value]
    arguments: list[Value] = field(default_factory=list)
    names: dict[str, Value] = field(default_factory=dict)


_RESULTS = re.compile(r"((?:%[\w.$-]+(?::\d+)?(?:, )?)+) = ")
_NAME = re.compile(r"%[\w.$-]+(?:#\d+)?")
_BLOCK = re.compile(r"\^(bb\d+)(?:\((.*)\))?:(?:\s*//.*)?")
_SUCCESSOR = re.compile(r"\^(bb\d+)(?:\(([^:()]*) : [^()]*\))?")


class _Reader:
    def __init__(self, locations: Locations) -> None:
        self._locations = locations
        self.values: list[Value] = []
        self._open: list[_Region] = []
        self._blocks: dict[str, list[Value]] = {}
        self._branches: dict[str, list[list[Value]]] = {}

    def line(self, line: str) -> None:
        located = LOC.findall(line)
        bare = LOC.sub("", line)
        if bare.startswith("}"):
            self._close(bare, located)
        elif bare.startswith("^"):
            self._block(bare, line)
        elif bare.startswith("tt.func"):
            self._blocks, self._branches = {}, {}
            region = self._enter("tt.func", [])
            for name, type_, location in re.findall(r"(%\w+): (\S+?)(?: \{[^}]*\})? loc\((.*?\)?)\)(?=[,)])", line):
                region.arguments.append(self._define(region, name, Value("argument", type=type_), location))
        elif bare.startswith("module"):
            self._enter("module", [])
        else:
            self._operation(bare, located[-1] if located else "")

    def _operation(self, bare: str, location: str) -> None:
        made = _RESULTS.match(bare)
        body = bare[made.end() :] if made else bare
        found = re.match(r'"?([\w.]+)"?', body)
        if found is None:
            raise InfraError(f"can't read this line of TTIR: {bare[:120]}")
        op = found.group(1)
        opens = body.endswith("{")
        names = list(_result_names(made.group(1))) if made else []
        if op in ("scf.yield", "scf.condition", "tt.reduce.return", "tt.scan.return", "tt.map_elementwise.return"):
            self._yield(op, [self._use(name) for name in _NAME.findall(body)])
        elif op in ("cf.br", "cf.cond_br"):
            for block, passed in _SUCCESSOR.findall(body):
                self._branches.setdefault(block, []).append([self._use(name) for name in _NAME.findall(passed)])
        elif op == "scf.for":
            self._for(names, body)
        elif op == "scf.while":
            self._while(names, body)
        else:
            results = [Value("phi" if op == "scf.if" else op, text=body) for _ in names]
            if op != "scf.if":
                inputs = [self._use(name) for name in _NAME.findall(body)]
                for value in results:
                    value.inputs, value.type = list(inputs), _result_type(op, body)
                if not names:
                    self._place(Value(op, inputs, text=body), location)
            elif "->" in body:
                for value, type_ in zip(results, _types(body.partition("->")[2].rstrip("{ ")), strict=True):
                    value.type = type_
            outer = self._open[-1]
            if opens:
                self._enter(op, results)
            for name, value in zip(names, results, strict=True):
                self._define(outer, name, value, location)

    def _for(self, names: list[str], body: str) -> None:
        head = re.match(r"scf\.for (%[\w.$-]+) = (\S+) to (\S+) step (\S+?)(?: iter_args\((.*?)\))?(?: |$)", body)
        if head is None:
            raise InfraError(f"can't read this loop of TTIR: {body[:120]}")
        bounds = [self._use(name) for name in head.group(2, 3, 4)]
        pairs = re.findall(r"(%[\w.$-]+) = (%[\w.$#-]+)", head.group(5) or "")
        first = [self._use(name) for _, name in pairs]
        outer = self._open[-1]
        results = [Value("phi", [value], value.type) for value in first]
        region = self._enter("scf.for", results)
        self._define(region, head.group(1), Value("iv", bounds, bounds[1].type), "")
        for (name, _), value in zip(pairs, first, strict=True):
            region.arguments.append(self._define(region, name, Value("phi", [value], value.type), ""))
        for name, value in zip(names, results, strict=True):
            self._define(outer, name, value, "")

    def _while(self, names: list[str], body: str) -> None:
        pairs = re.findall(r"(%[\w.$-]+) = (%[\w.$#-]+)", body)
        first = [self._use(name) for _, name in pairs]
        outer = self._open[-1]
        results = [Value("phi") for _ in names]
        for value, type_ in zip(results, _types(body.partition("->")[2].rstrip("{ ")), strict=False):
            value.type = type_
        region = self._enter("scf.while", results)
        for (name, _), value in zip(pairs, first, strict=True):
            region.arguments.append(self._define(region, name, Value("phi", [value], value.type), ""))
        for name, value in zip(names, results, strict=True):
            self._define(outer, name, value, "")

    def _block(self, bare: str, line: str) -> None:
        if (found := _BLOCK.fullmatch(bare)) is None:
            raise InfraError(f"can't read this block of TTIR: {bare[:120]}")
        region = self._open[-1]
        arguments = []
        locations = LOC.findall(line)
        for index, (name, type_) in enumerate(re.findall(r"(%[\w.$-]+): ([^,]+(?:<[^>]*>)?)", found.group(2) or "")):
            op = "phi" if region.op in ("tt.func", "scf.while") else "element"
            arguments.append(self._define(region, name, Value(op, type=type_), locations[index]))
        if region.op == "tt.func":
            self._blocks[found.group(1)] = arguments
        elif region.op == "scf.while":  # the body: it gets what the condition passed on
            for result, argument in zip(region.results, arguments, strict=True):
                argument.inputs.append(result)

    def _yield(self, op: str, passed: list[Value]) -> None:
        region = self._open[-1]
        if op == "scf.condition":
            passed = passed[1:]
        goals = [region.results]
        if region.op == "scf.for":
            goals.append(region.arguments)
        elif region.op == "scf.while":
            goals = [region.results if op == "scf.condition" else region.arguments]
        elif not op.startswith("scf."):
            return
        for goal in goals:
            for value, each in zip(goal, passed, strict=True):
                value.inputs.append(each)
                value.type = value.type or each.type

    def _close(self, bare: str, located: list[str]) -> None:
        region = self._open.pop()
        if region.op == "tt.func":
            for block, arguments in self._blocks.items():
                for passed in self._branches.get(block, []):
                    for value, each in zip(arguments, passed, strict=True):
                        value.inputs.append(each)
        if bare.endswith("{"):  # `} else {`, `} do {`, `}, {`
            self._enter(region.op, region.results).arguments = region.arguments
        elif located:
            for value in region.results:
                value.type = value.type or bare.rpartition("-> ")[2]
                value.name, value.frames = self._locations.of(located[-1])

    def _enter(self, op: str, results: list[Value]) -> _Region:
        self._open.append(_Region(op, results))
        return self._open[-1]

    def _define(self, region: _Region, name: str, value: Value, location: str) -> Value:
        region.names[name] = value
        self._place(value, location)
        if (
            value.op in ("iv", "phi") and not value.name
        ):  # a loop's variables have no location, but are called after them
            value.name = re.sub(r"^\d+$|_\d+$", "", name[1:])
        return value

    def _place(self, value: Value, location: str) -> Value:
        value.name, value.frames = self._locations.of(location)
        self.values.append(value)
        return value

    def _use(self, name: str) -> Value:
        for region in reversed(self._open):
            if name in region.names:
                return region.names[name]
        raise InfraError(f"TTIR uses {name} before it is defined")


def _result_names(text: str) -> Iterator[str]:
    for part in text.split(", "):
        name, _, count = part.partition(":")
        yield from ([f"{name}#{index}" for index in range(int(count))] if count else [name])


def _types(text: str) -> list[str]:
    return re.findall(r"(?:tensor|!tt\.\w+)<(?:[^<>]|<(?:[^<>]|<[^<>]*>)*>)*>|\w+", text)


def _result_type(op: str, body: str) -> str:
    """The last type behind the last arrow, `to` or colon; of a load the pointer's element."""
    type_ = (_types(re.split(r" -> | to | : ", body)[-1]) or [""])[-1]
    if op == "tt.load":
        return re.sub(r"!tt\.ptr<(\w+)(?:, \d+)?>", r"\1", type_)
    return type_
