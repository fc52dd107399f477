"""Draft positions: at which position each forward of a draft round runs.

A round of ``num_steps`` drafts has ``num_steps - 1`` forwards, since the first token comes with the round; forward
``i`` runs every branch of a request at position ``seq_len + i``. Path "capture" runs the round through the CUDA-graph
runner, as often as that runs it to capture a graph (``RUNS``): each run must find the positions as the first one did.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.case import Case
from harness.errors import UsageError

DRAFT, CAPTURE = "25015:draft-positions", "25015:capture-positions"
PATHS = ("eager", "capture")
OPTIONS = ("path", "topk", "num_steps", "seq_lens")
RUNS = 3  # two to warm up, one to capture


def case(
    fix: str, *, path: str | None = None, topk: int = 2, num_steps: int = 3, seq_lens: Sequence[int] = (7,)
) -> Case:
    """``seq_lens``: tokens before the round, one a request. Raises UsageError for what makes no round."""
    if fix not in (DRAFT, CAPTURE):
        raise UsageError(f"{fix} is not about draft positions; this scenario shows {DRAFT} and {CAPTURE}")
    path = path or ("eager" if fix == DRAFT else "capture")
    if path not in PATHS or (fix == CAPTURE and path != "capture"):
        raise UsageError(f"path {path!r}: must be {'eager or ' * (fix == DRAFT)}capture")
    if topk < 1 or num_steps < 1 or not seq_lens or min(seq_lens) < 1:
        raise UsageError("topk, num_steps and every one of seq_lens must be at least 1, and there must be one")
    tells = num_steps > 1
    return Case(
        id=f"{path}-topk{topk}-steps{num_steps}-lens{'+'.join(map(str, seq_lens))}",
        entry=f"{__name__}_{{target}}:run",
        params={"path": path, "topk": topk, "num_steps": num_steps, "seq_lens": list(seq_lens), "runs": RUNS},
        backend="eagle",
        tells=tells,
        why=f"{num_steps - 1} forwards a round" + ("" if tells else ": the one draft comes with the round"),
        detector="none",
    )
