"""``unfix`` and ``python -m harness``: the command (`harness.cli`), and Ctrl-C while its modules are imported."""

from __future__ import annotations

import importlib

from harness import interrupts


def main() -> None:
    interrupts.run(lambda: importlib.import_module("harness.cli").main, 130, "unfix: interrupted\n")


if __name__ == "__main__":
    main()
