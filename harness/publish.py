"""Publishing a night: the page, the badge, and what GitHub is told, for every command that has a night's documents."""

from __future__ import annotations

from pathlib import Path

from harness import github as github_step
from harness import html_report, output, report
from harness.badge import badge as badge_of
from harness.digest import Digest
from harness.errors import UsageError
from harness.extras import Extras


def check(
    *, html: Path | None, badge: Path | None, github: bool, json_out: str | None = None, **others: Path | str | None
) -> None:
    """What is asked for can be had: said before any work is done. Raises UsageError.

    ``others``: further files that the command writes, by the name of their option.
    """
    named = {"--html": html, "--badge": badge, "--json": json_out if json_out != "-" else None}
    named |= {f"--{name}": file for name, file in others.items()}
    seen: dict[Path, str] = {}
    for option, name in named.items():
        if not name:
            continue
        file = Path(name)
        if file.is_dir():
            raise UsageError(f"{option} {file}: is a folder, must be a file")
        if file.exists() and not file.is_file():  # a device or a pipe takes more than one
            continue
        if (other := seen.setdefault(file.resolve(), option)) != option:
            raise UsageError(f"{other} and {option} both name {file}: give each a file of its own")
    if github:
        github_step.summary_file()
        if json_out == "-":
            raise UsageError("--github and --json - would both write to stdout: give --json a file name")


def publish(told: Digest, known: Extras, *, html: Path | None, badge: Path | None, github: bool) -> None:
    """Write what is asked for. Raises UsageError, and InfraError where a file can't be written."""
    check(html=html, badge=badge, github=github)
    if html:
        report.write_text(html, html_report.render(told, known))
        output.note(f"wrote {html}")
    if badge:
        report.write_json(badge, badge_of(told))
        output.note(f"wrote {badge}")
    if github:
        github_step.publish(told, known)
