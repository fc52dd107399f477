"""32-bit products that reach a pointer, and whether their 32 bits are enough.

For each pointer that a kernel moves (`tt.addptr`) the offset is followed back, through additions, widenings, shapes,
selections and loops, to every 32-bit product in it (`harness.offsets`). A product whose exact value may leave 32 bits
is a finding; so is a 32-bit sum that carries a product, where each product fits and the sum does not. What was widened
before it was multiplied is 64-bit and no finding. Which values are possible is `harness.ranges`' business; what
somebody has explained is in the audit file (`harness.auditfile`).

A wrap that follows from another one is not told again. What is computed twice from the same values is one product, on
the line that comes first: Triton computes it once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from harness import mlir, ttir
from harness.auditfile import AuditFile, Chosen
from harness.errors import ToggleError
from harness.offsets import PRODUCTS, SUMS, expression, inside, leaves, parts_of, reached, source_line
from harness.ranges import Range, Ranges

State = Literal["finding", "allowed", "fits"]


@dataclass(frozen=True)
class Factor:
    """`largest` is None where only its type limits it."""

    name: str
    largest: int | None


@dataclass(frozen=True)
class Product:
    """A 32-bit product, or a sum that carries one, at a line of the kernel's source.

    `builds` are those of the audit file that it was seen in, `pointers` the arguments whose offset it is part of,
    `largest` its own largest value (None if only types limit it), `reason` why it is allowed.
    """

    kernel: str
    builds: tuple[str, ...]
    file: str
    line: int
    source: str
    text: str
    factors: tuple[Factor, ...]
    largest: int | None
    pointers: tuple[str, ...]
    state: State
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def audit(file: AuditFile, sources: Path, path: Sequence[Path | str]) -> list[Product]:
    """Compile and judge every kernel of the file that fits `sources`. `path` is the import path to compile with.

    Files are named below the entry of `path` that they come from. Raises RottedError where no entry fits the sources,
    ToggleError where a bound or an explanation is stale, InfraError where a kernel does not compile or an operation is
    not understood.
    """
    chosen = file.choose(sources)
    compiled = iter(ttir.compile_all([build for each in chosen for build in each.builds.values()], path))
    products: list[Product] = []
    for each in chosen:
        found: dict[tuple[str, int, str, str], Product] = {}
        used: dict[str, set[str]] = {}
        for name in each.builds:
            used[name] = set()
            for product in judge(each, name, next(compiled), used[name]):
                key = (product.file, product.line, product.text, product.state)
                found[key] = _both(found[key], product) if key in found else product
        _refuse_stale(file, each, used, found.values())
        products += sorted(found.values(), key=lambda product: (product.file, product.line))
    return [replace(product, file=_below(product.file, path)) for product in products]


def _refuse_stale(file: AuditFile, chosen: Chosen, used: Mapping[str, set[str]], found: Iterable[Product]) -> None:
    kernel = chosen.kernel
    seen = {product.source for product in found if product.state == "allowed"}
    lines = enumerate(entry.line for entry in kernel.allow)
    stale = [
        (("allow", index), "stale: no 32-bit product on this line may wrap")
        for index, line in lines
        if line not in seen
    ]
    ever = set().union(*used.values())
    names: dict[tuple[Any, ...], bool] = {("at_most", name): name not in ever for name in kernel.at_most}
    for build in filter(None, chosen.builds):
        more = kernel.builds[build].at_most
        names |= {("builds", build, "at_most", name): name not in used[build] for name in more}
    stale += [(where, f"stale: the kernel computes no {where[-1]}") for where, unused in names.items() if unused]
    if stale:
        raise ToggleError("\n".join(file.complaint(kernel, where, message) for where, message in stale))


def judge(chosen: Chosen, name: str, text: str, used: set[str]) -> Iterator[Product]:
    """The products of one build of a kernel, by its TTIR. Puts the names of bounds that were of use into `used`."""
    kernel, build = chosen.kernel, chosen.builds[name]
    values = mlir.read(text)
    ranges = Ranges(values, chosen.bounds(name))
    used |= ranges.used
    offsets = reached(values, build.target)
    allowed = {entry.line: entry.reason for entry in kernel.allow}
    numbers = Counter(value for value in build.arguments.values() if type(value) is int)
    names = {value: name for name, value in build.arguments.items() if numbers.get(value) == 1}
    narrow = {value: inside(value) for value in offsets if value.bits == 32 and value.op in PRODUCTS | SUMS}
    products = {value for value in narrow if value.op in PRODUCTS}
    parts = {part for value in products for part in parts_of(value)}
    wraps = {
        value for value, inner in narrow.items() if ranges.overflows(value) and (value in products or inner & products)
    }
    told = {value for value in wraps if source_line(value) not in allowed}
    for value, inner in narrow.items():
        here = wraps & {value, *parts_of(value)}
        if value in parts or not (value in products or here) or (here and inner & told - here):
            continue
        source = source_line(value)
        state: State = "fits" if not here else "allowed" if source in allowed else "finding"
        file, line = value.line or ("", 0)
        yield Product(
            kernel.name, (name,), file, line, source, expression(value, names, top=True),
            tuple(Factor(expression(each, names), _largest(ranges.of(each))) for each in leaves(value)),
            _largest(ranges.exact(value)), tuple(sorted(offsets[value])), state,
            allowed[source] if state == "allowed" else "",
        )  # fmt: skip


def _below(file: str, path: Sequence[Path | str]) -> str:
    for root in path:
        if Path(file).is_relative_to(root):
            return Path(file).relative_to(root).as_posix()
    return file


def _largest(found: Range) -> int | None:
    return max(abs(found.low), abs(found.high)) if found.known else None


def _both(one: Product, other: Product) -> Product:
    """A line's product that two builds have: with the larger values, in both."""
    larger = max(one, other, key=lambda each: float("inf") if each.largest is None else each.largest)
    pointers = tuple(sorted({*one.pointers, *other.pointers}))
    return replace(larger, builds=one.builds + other.builds, pointers=pointers)
