"""What others than unfix took out of a run: a run of fewer cases than there are must not look like a whole one."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import pytest


def left_out(
    config: pytest.Config, found: Collection[pytest.Item], kept: Iterable[pytest.Item], fixes: Collection[str]
) -> str:
    """A sentence, "" where nothing is missing. ``found``: what pytest collected; ``kept``: what others left of it."""
    cases = {item.nodeid for item in found if (marker := item.get_closest_marker("fix")) and marker.args[0] in fixes}
    gone = cases - {item.nodeid for item in kept}
    files = _test_files(config)
    ignored = files - {item.path for item in found}
    said = [
        f"deselected by -k, -m, --deselect or another plugin: {len(gone)} of {len(cases)} cases" if gone else "",
        f"not collected, by --ignore or a conftest: {len(ignored)} of {len(files)} test files" if ignored else "",
    ]
    return "; ".join(filter(None, said))


def _test_files(config: pytest.Config) -> set[Path]:
    """All that are in the folders that pytest was given: a file or a test that is named is asked for alone."""
    named = (config.invocation_params.dir / argument.partition("::")[0] for argument in config.args)
    return {file for folder in named if folder.is_dir() for file in folder.rglob("test_*.py")}
