"""After an EAGLE verify: the accepted path of each request's tree, and what is made of it.

    accept_index   (num_seqs, num_steps + 1) nodes of all trees, counted through; -1 behind the accepted ones
    predict        (num_seqs * num_draft_tokens,) a token for each node

``move`` gathers the KV slots of the accepted nodes, so that they can be moved to the front of each request's. It runs a
program an element of accept_index; #26866 found num_seqs * num_draft_tokens of them, which read past its end.

``bonus`` takes the last accepted token of each request: element ``b * (num_steps + 1) + accepted - 1`` of the tokens on
the paths. #26866 found ``b * num_draft_tokens + accepted - 1``.

For a chain (topk 1), num_draft_tokens is num_steps + 1, and neither shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.case import Case
from harness.errors import UsageError

OPTIONS = ("num_steps", "num_draft_tokens", "detector")
GRID, STRIDE = "26866:accept-grid", "26866:bonus-stride"
BACKENDS = {GRID: "move", STRIDE: "bonus"}
DETECTORS = ("guard-page", "poison")
POISON = 1  # what the poison detector holds around an integer tensor
PADDING_SLOT = 0


def case(
    fix: str,
    *,
    num_steps: int = 1,
    num_draft_tokens: int = 3,
    accepted: Sequence[int] = (1, 1),
    detector: str | None = None,
) -> Case:
    """The case of one batch. ``accepted``: tokens a request, the bonus token counted. Raises UsageError."""
    if fix not in BACKENDS:
        raise UsageError(f"{fix} is not about accepted tokens; this scenario shows {' and '.join(BACKENDS)}")
    width = num_steps + 1
    if num_steps < 1 or num_draft_tokens < width:
        raise UsageError(
            f"num_draft_tokens {num_draft_tokens}: a tree of {num_steps} steps has at least {width} tokens"
        )
    if not accepted or not all(1 <= count <= width for count in accepted):
        raise UsageError(f"accepted {list(accepted)}: 1 to {width} tokens a request, and at least one request")
    kept: dict[str, Any] = {"num_steps": num_steps, "num_draft_tokens": num_draft_tokens, "accepted": list(accepted)}
    backend = BACKENDS[fix]
    name = f"{backend}-steps{num_steps}-draft{num_draft_tokens}-accepted{'+'.join(map(str, accepted))}"
    rest: dict[str, Any]
    if backend == "move":
        detector = detector or "guard-page"
        if detector not in DETECTORS:
            raise UsageError(f"detector {detector!r}: must be {' or '.join(DETECTORS)} here, the others see no read")
        rest = _move(fix, num_draft_tokens, width, len(accepted), detector)
        name += "" if detector == "guard-page" else f"-{detector}"
    else:
        if detector not in (None, "red-zone"):
            raise UsageError(f"detector {detector!r}: the bonus token's read stays in a tensor that none watches")
        rest = _bonus(fix, kept)
    return Case(id=name, entry=f"{__name__}_{{target}}:run", params={"path": backend, **kept}, backend=backend, **rest)


def _move(fix: str, num_draft_tokens: int, width: int, num_seqs: int, detector: str) -> dict[str, Any]:
    """An out-of-range read: it faults on a guard page; out of poison, each one moves a row to the padding slot."""
    past = num_seqs * (num_draft_tokens - width)
    packages = ("cuda.bindings",) if detector == "guard-page" else ()
    if not past:
        why = f"{num_draft_tokens} draft tokens a request are num_steps + 1: accept_index has an element a program"
        return {"tells": False, "why": why, "detector": detector, "cuda_packages": packages}
    out = frozenset({fix})
    poisoned = f"{past} rows moved to the padding slot, from slots {{{slot(POISON)}}}"
    return {
        "why": f"{num_seqs * num_draft_tokens} programs read {num_seqs * width} elements",
        "expect": {out: "wrong"} if detector == "poison" else {},
        "reason": {out: poisoned.replace("{", r"\{").replace("}", r"\}")} if detector == "poison" else {},
        "detector": detector,
        "cuda_packages": packages,
    }


def _bonus(fix: str, kept: dict[str, Any]) -> dict[str, Any]:
    """A wrong stride: which request's token is wrong first, and which token it is."""
    accepted, step, width = kept["accepted"], kept["num_draft_tokens"], kept["num_steps"] + 1
    if step == width or len(accepted) == 1:
        why = "one request's row starts at 0 for any stride" if step > width else f"both strides are {width}"
        return {"tells": False, "why": why, "zone_bytes": 4096}
    paths = [node for row in accept_index(kept) for node in row]
    tokens = [token(node % (len(accepted) * step)) for node in paths]  # of -1: the last node's, as indexing has it
    for request, count in enumerate(accepted):
        right, at = tokens[request * width + count - 1], request * step + count - 1
        if at >= len(tokens):
            break  # what it reads there is no one's, and cannot be said beforehand
        if tokens[at] != right:
            why = f"request {request} takes element {at} of the tokens, and its bonus token is {right}"
            said = rf"bonus_tokens\[{request}\]: {tokens[at]}, reference {right};"
            return {"why": why, "reason": {frozenset({fix}): said}}
    raise UsageError(
        f"accepted {accepted}: no request takes a wrong token that can be said beforehand; use a longer row"
    )


def accept_index(kept: dict[str, Any]) -> list[list[int]]:
    """A path through each tree, spread over its nodes from the root on, so that it is no chain where it need not be."""
    step, width = kept["num_draft_tokens"], kept["num_steps"] + 1
    return [
        [request * step + place * (step - 1) // (width - 1) for place in range(count)] + [-1] * (width - count)
        for request, count in enumerate(kept["accepted"])
    ]


def token(node: int) -> int:
    return 10 + node


def slot(node: int) -> int:
    """The KV slot of a node of all trees."""
    return 100 + 3 * node
