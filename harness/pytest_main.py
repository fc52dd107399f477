"""``python -m harness.pytest_main``: as ``python -m pytest``, for a pytest that a command starts and may interrupt."""

from __future__ import annotations

import importlib
import sys

from harness import interrupts

if __name__ == "__main__":
    # no word of it: whoever interrupts it says so
    sys.exit(interrupts.run(lambda: importlib.import_module("pytest").console_main, 2, ""))
