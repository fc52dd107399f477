"""Many legs in one throwaway process, one after the other: what a chunk of a sweep runs.

Each has a detector and a reach-proof of its own. Of what they leave to each other, one thing would let a leg look right
that isn't: memory that an earlier one freed may hold the very values that this one must compute. So what a detector
hands out is filled with a pattern first. A compiled Triton kernel counts as reached once any leg here has launched it.

It ends early, before it has written a report down, where the process is no good for another leg: the device no longer
answers, or a stray write reached the far end of its red zone, so that nobody knows what else it hit. A leg that dies
or hangs ends it, too. How far it got is what the log says.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

import torch

from harness import leg, memory
from harness.memory.watch import STALE


def run(params: dict[str, Any], device: str) -> None:
    """Run ``params["legs"]``, and add a line to the file ``params["log"]`` as each ends.

    A leg is a request as `harness.leg` takes it, with its ``timeout`` in seconds. A line is ``{"report": …, "reached":
    [...]}``.
    """
    memory.Watch.fresh = STALE
    with open(params["log"], "w", encoding="utf-8", buffering=1) as log:
        for request in params["legs"]:
            signal.setitimer(signal.ITIMER_REAL, request["timeout"])  # ends the process, whatever it hangs in
            reached: list[str] = []
            report = leg.run(request, reached.append)
            if _leaves_a_mark(report, device):
                break
            print(json.dumps({"report": report, "reached": reached}), file=log)
    signal.setitimer(signal.ITIMER_REAL, 0)


def _leaves_a_mark(report: dict[str, Any], device: str) -> bool:
    if any(hit["lower_bound"] for hit in report["hits"]):
        return True
    if device != "cuda" or not report["raised"]:
        return False
    try:
        torch.cuda.synchronize()
    except Exception as error:
        print(f"the device no longer answers: {error}", file=sys.stderr)
        return True
    return False
