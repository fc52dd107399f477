"""The shape of a record: what every reader of a matrix or of a run's log may rely on, whoever wrote it.

A record is one regression and case of a run, as `harness.prover.Result` has it as JSON. Keys that aren't named here are
let through. Numbers are bounded, so that none of them makes a reader build what no memory holds.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Whole = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False, lt=1e9)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _Hit(_Model):
    side: Literal["before", "after"]
    elements: Whole
    first_offset_bytes: Whole
    last_offset_bytes: Whole
    shape: Annotated[list[Whole], Field(min_length=1, max_length=64)]
    dtype: str


class _Overflow(_Model):
    side: str
    predicted_elements: Whole | None
    observed_elements: Whole
    first_offset_bytes: Whole
    last_offset_bytes: Whole
    detector: str
    buffers: list[str]
    hits: list[_Hit] = []


class _Leg(_Model):
    outcome: str
    reverted: list[str]
    seconds: Seconds = 0.0
    error: str | None = None
    trace: str | None = None
    overflow: _Overflow | None = None
    facts: dict[str, Any] = {}


class _Params(_Model):
    num_steps: Annotated[int, Field(ge=0, le=2**16)] | None = None


class Record(_Model):
    regression: str
    fix: str
    blames: str
    case: str
    backend: str
    target: str
    device: str
    tells: bool
    verdict: str
    reason: str | None
    legs: list[_Leg]
    test: str = ""
    on: str = ""
    expected: list[str] = []
    detector: str = ""
    zone_bytes: Annotated[int, Field(ge=0, lt=2**63)] = 0
    params: _Params = _Params()


def fault(row: Any) -> str:
    """What is wrong with a record, "" where nothing is."""
    try:
        Record.model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part)[:60] for part in first["loc"])
        return f"has {where!a}, which is none: {first['msg'].replace('Input', 'it')}"
    return ""
