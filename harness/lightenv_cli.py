"""``unfix upstream``: the light environments that SGLang is run in."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from harness import lightenv

upstream = typer.Typer(name="upstream", help="Releases of SGLang to run cases on.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the sub-commands to the command line."""
    app.add_typer(upstream)


@upstream.callback()
def _upstream() -> None:
    """Releases of SGLang to run cases on."""


@upstream.command()
def install(
    releases: Annotated[list[str], typer.Argument(metavar="V…", help="releases, such as 0.5.13")],
    wheels: Annotated[
        Path | None, typer.Option(metavar="DIR", help="install the wheels in DIR, and ask no index")
    ] = None,
) -> None:
    """Make a light environment of each release in the cache (about 300 MB each), and print its directory.

    Example: unfix upstream install 0.5.13 0.5.23
    """
    for release in releases:
        print(f"unfix: installing SGLang {release}", file=sys.stderr)
        print(lightenv.install(release, wheels))
