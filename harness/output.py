"""How commands speak: results on stdout, notes on stderr, JSON to a file or to stdout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from harness import plain, report
from harness.errors import UsageError


def note(text: str) -> None:
    """Progress, or what a reader should know beside the result."""
    print("\n".join(map(plain.log_line, f"unfix: {text}".split("\n"))), file=sys.stderr)


def say(text: str, end: str = "\n") -> None:
    """A result. Raises typer.Exit(0) where nobody reads it."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        reader_gone()


def reader_gone() -> None:
    """`unfix list | head`: typer and rich would end with 1, which means a finding here."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise typer.Exit(0) from None


def check_json(where: str | None) -> None:
    """Refuse `--json ''` before any work is done. Raises UsageError."""
    if where == "":
        raise UsageError("--json needs a file name, or '-' for stdout")


def write_json(where: str, document: dict[str, Any], say: Callable[[str], None] = print) -> None:
    """Write to a file, whole or not at all, and note it; `-` is stdout. Raises InfraError."""
    if where == "-":
        # what GitHub's runner takes for a command, in a log
        say(json.dumps(document, indent=1).replace("##[", "#\\u0023["))
    else:
        report.write_json(Path(where), document)
        note(f"wrote {where}")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        reader_gone()


def console() -> Console:
    """Stdout, for tables; a file or a pipe gets lines as long as they need to be."""
    return _Console(highlight=False, width=None if sys.stdout.isatty() else 180)
