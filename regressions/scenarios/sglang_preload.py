"""Imported by the fork server of a selection, so that SGLang, from its overlay, is imported once and not by every leg.

A module that does not import here is left to the leg that needs it, whose report then says why.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings

import harness.cuda_untouched  # noqa: F401  before SGLang asks torch about the device
from regressions.scenarios import draft_sglang, multi_layer_sglang, store_sglang

with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):  # stdout belongs to the command's results
    warnings.simplefilter("ignore")
    for _name in (*draft_sglang.PRELOAD, *store_sglang.PRELOAD, *multi_layer_sglang.PRELOAD):
        with contextlib.suppress(Exception):
            importlib.import_module(_name)
