"""Which legs may run in a process, and on a GPU in a context, in which others do: those that leave it as it was.

That is said of what a leg is declared to do, before it runs. It need not come true: what does not do as declared runs
again, in a process of its own (`harness.prover`). So this is about speed: a leg that ends its process costs one more.
"""

from __future__ import annotations

from harness.case import Case
from harness.fixes import Catalogue

DETECTORS = ("red-zone", "victim", "guard-page")  # what they hand out holds nothing of an earlier leg
DEVICE_BYTES = 2 << 30  # of a leg, at most: what the allocator keeps after it is not there for others


def harmless(case: Case, outcome: str, *, guards_kill: bool) -> bool:
    """Of a leg that is declared to have this outcome."""
    if case.device_bytes > DEVICE_BYTES:
        return False
    if outcome == "overflow":  # as predicted, it stays within the red zone
        return case.detector == "red-zone" and case.stray is not None
    if outcome == "clean":
        return case.detector in DETECTORS
    # it must raise, so there is no value that an earlier leg could have left
    return outcome == "error" or (outcome == "guarded" and not guards_kill)


def guards_kill(catalogue: Catalogue, scenario: str | None, code_base: str) -> bool:
    """A guard of this scenario is an assert in a kernel, which ends the process or the context."""
    guards = [fix for fix in catalogue if fix.guard and fix.scenario == scenario]
    variants = [variant for guard in guards for variant in guard.variants_for(code_base)]
    return any(reversal.entered_by for variant in variants for reversal in variant.reversals)
