"""Imported by the fork server of a selection, so that SGLang, from its overlay, is imported once and not by every leg.

A module that does not import here is left to the leg that needs it, whose report then says why.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from pathlib import Path

import harness.cuda_untouched  # noqa: F401  before SGLang asks torch about the device

with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):  # stdout belongs to the command's results
    warnings.simplefilter("ignore")
    for _file in sorted(Path(__file__).parent.glob("*_sglang.py")):
        for _name in getattr(importlib.import_module(f"regressions.scenarios.{_file.stem}"), "PRELOAD", ()):
            with contextlib.suppress(Exception):
                importlib.import_module(_name)
