"""Multi-layer EAGLE: a draft worker is made and drafts one round."""

from __future__ import annotations

from harness.case import Case
from harness.errors import UsageError

OPTIONS = ("num_steps", "num_draft_tokens", "num_seqs")


def case(fix: str, *, num_steps: int = 3, num_draft_tokens: int = 8, num_seqs: int = 2) -> Case:
    """The case of one configuration."""
    for name, value in {"num_steps": num_steps, "num_draft_tokens": num_draft_tokens, "num_seqs": num_seqs}.items():
        if value < 1:
            raise UsageError(f"{name} {value}: must be at least 1")
    fits = num_draft_tokens == num_steps + 1
    # both numbers, in this project's words or in SGLang's
    said = rf"={num_draft_tokens} must equal .* = {num_steps + 1}\b|got {num_draft_tokens} and {num_steps}\b"
    return Case(
        id=f"multi_layer-steps{num_steps}-draft{num_draft_tokens}-seqs{num_seqs}",
        entry=f"{__name__}_{{target}}:run",
        params={"num_steps": num_steps, "num_draft_tokens": num_draft_tokens, "num_seqs": num_seqs},
        backend="multi_layer",
        on="clean" if fits else "guarded",
        reason={} if fits else {frozenset(): said},
        tells=not fits,
        detector="none",  # this is about shapes, and SGLang's constructor allocates nothing before it asks for a model
        why=f"{num_draft_tokens} draft tokens are {'' if fits else 'not '}num_steps + 1"
        + (", and a guard must let that through" if fits else ""),
    )
