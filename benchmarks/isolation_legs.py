"""What the legs of isolation.py run, in a leg's process."""

from __future__ import annotations

from typing import Any


def nothing(params: dict[str, Any], device: str) -> None:
    """What remains is the process, on a GPU its context, and the report."""
