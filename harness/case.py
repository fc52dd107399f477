"""A case: the inputs of one run, and what a model of the code under test says must happen to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Stray:
    """Elements that a write puts outside of its buffer, by the sizing formula and never by the code under test."""

    side: str  # "before" or "after" the payload
    elements: int


@dataclass(frozen=True)
class Case:
    """One input, ready to run in a leg.

    ``entry(params, device)`` runs in the leg's process; it raises ``harness.leg.WrongValues`` where a result differs
    from the reference. Everything else here is known before anything runs.
    """

    id: str
    entry: str  # "module:function"; {target} in it stands for the code base under test
    params: Mapping[str, Any]  # JSON-ready
    backend: str = ""
    regression: str = ""  # the PR or issue that it stands for, where that is not the fix's own
    on: str = "clean"  # the outcome that this input must have with the fix in
    tells: bool = True  # False: this input cannot tell the fix from its absence, and every leg must equal `on`
    why: str = ""  # one sentence: why it cannot tell, or what it shows
    stray: Stray | None = None  # with every guard out of the way
    # where a leg reports the fact "layout": what is stray if the memory is laid out like that
    stray_in: Mapping[str, Stray] = field(default_factory=dict)
    # by reverted ids (none: the fix in), where they differ from what the toggle file declares
    expect: Mapping[frozenset[str], str] = field(default_factory=dict)  # outcomes
    reason: Mapping[frozenset[str], str] = field(default_factory=dict)  # regexes
    # code base -> (outcome, regex) of the leg with just this fix out, where it answers otherwise than eagle_kv does
    elsewhere: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    reaches: bool = True  # False: this input is refused before it gets to what the fix changed
    detector: str = "red-zone"
    zone_bytes: int = 1 << 16
    device_bytes: int = 0  # device memory that a leg of it holds, in bytes, where that is much
    needs_cuda: bool = False
    cannot: Mapping[str, str] = field(default_factory=dict)  # "sglang", "sglang on cpu": why it can't run there
    cuda_packages: tuple[str, ...] = ()  # that a leg on a GPU imports

    def stray_given(self, facts: Mapping[str, Any]) -> Stray | None:
        """What must be stray in a leg that reported these facts."""
        return self.stray_in.get(facts.get("layout", ""), self.stray)
