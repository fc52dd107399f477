"""The command `unfix audit`: 32-bit products in Triton kernels that may wrap before they reach a pointer."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from harness import __version__, audit, auditfile, fixes, output, overlay, report, selection, variants
from harness.audit import Product
from harness.code_base import resolve
from harness.root import project_root


def register(app: typer.Typer) -> None:
    """Add the command to the `unfix` command line."""
    app.command("audit")(audit_command)


def audit_command(
    target: Annotated[str, typer.Option(help="the code base: eagle_kv or sglang")] = "eagle_kv",
    release: Annotated[str | None, typer.Option(metavar="V", help="the release of SGLang, for --target sglang")] = None,
    source: Annotated[
        str | None, typer.Option(metavar="DIR", help="a checkout of SGLang, compiled in that environment")
    ] = None,
    revert: Annotated[
        str | None, typer.Option(metavar="SEL", help="fixes to take out first; what the session has out, without")
    ] = None,
    json_out: Annotated[str | None, typer.Option("--json", metavar="F", help="write JSON to F ('-': stdout)")] = None,
) -> None:
    """Which 32-bit products of a stride and an index may wrap before they move a pointer? Compiles, needs no GPU.

    Says for each the source line, the factors with the largest value of each, and the pointer argument. What is
    compiled, the limits of variables and what explains false alarms is in audits/eagle_kv.yaml and audits/sglang.yaml.

    Exit codes: 0 all fit or are explained, 1 a finding, 2 a stale entry in the audit file, 3 a kernel has changed its
    parameters, 4 it does not compile.

    Example: unfix audit --target sglang --release 0.5.23
    """
    root = project_root()
    registered = fixes.load(root / "toggles")
    if revert is None:
        variable, out = selection.of_session(registered)
    else:
        variable, out = "--revert", selection.parse(revert, registered, source="--revert")
    output.check_json(json_out)
    code_base = resolve(target, root, release, source)
    path: list[Path | str] = [code_base.sources, *code_base.path]
    if out:
        output.note(f"REVERT ACTIVE ({variable}): {', '.join(out)}")
        plan = overlay.plan(variants.choose_all(registered, out, target, [code_base.sources]), [code_base.sources])
        if built := overlay.build(plan):
            path.insert(0, built)
    products = audit.audit(auditfile.load(root / "audits" / f"{target}.yaml"), code_base.sources, path)
    counts = Counter(product.state for product in products)
    if json_out:
        _write(json_out, target, code_base.version, out, products)
    if json_out != "-":
        for product in products:
            if product.state != "fits":
                output.say(explain(product))
        output.say(
            f"{target}{f' {code_base.version}' if code_base.version else ''}: "
            f"{counts['finding']} findings, {counts['allowed']} explained, {counts['fits']} fit"
        )
    raise typer.Exit(1 if counts["finding"] else 0)


def explain(product: Product) -> str:
    """A product in four lines: where, the source line, what may wrap, whom it moves."""
    factors = ", ".join(f"{each.name} {_number(each.largest)}" for each in product.factors)
    builds = ", ".join(name or "the plain build" for name in product.builds)
    lines = [
        f"{product.file}:{product.line}: {product.state}: {product.kernel}: {product.text} is 32-bit",
        f"    {product.source}",
        f"    up to {_number(product.largest)} ({factors}); 32 bits hold {2**31 - 1}",
        f"    moves {', '.join(product.pointers)} (in {builds})",
    ]
    return "\n".join([*lines, f"    explained: {product.reason}"] if product.reason else lines)


def _number(largest: int | None) -> str:
    return "anything" if largest is None else str(largest)


def _write(where: str, target: str, version: str | None, out: Sequence[str], products: Sequence[Product]) -> None:
    document = {
        "schema_version": report.SCHEMA_VERSION,
        "environment": {"unfix": __version__, "python": platform.python_version()},
        "target": target,
        "release": version,
        "reverted": list(out),
        "results": [product.as_dict() for product in products],
    }
    output.write_json(where, document, output.say)
