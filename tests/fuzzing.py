"""What must hold whatever the input: a property has inputs, and a check that raises where it doesn't hold.

The tests try each on a few inputs, always the same; `python benchmarks/fuzz.py --seconds 600` tries others for long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy, just


@dataclass(frozen=True)
class Property:
    """`check` gets one input, and raises what is wrong; `examples`: how many inputs the tests try."""

    inputs: SearchStrategy[Any]
    check: Callable[[Any], None]
    examples: int = 60

    def hold_for(self, drawn: Any) -> None:
        """Try it on this one input, which has to be one that it says anything of."""
        replace(self, inputs=just(drawn)).hold()

    def hold(self, examples: int = 0, of: int | None = None) -> None:
        """Try it on so many inputs, the same each time, or those of this seed. Shows the smallest that fails."""
        options = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
        run = given(self.inputs)(lambda drawn: self.check(drawn))
        if of is not None:
            run = seed(of)(run)
            options["phases"] = (Phase.generate, Phase.shrink)
        settings(max_examples=examples or self.examples, derandomize=of is None, **options)(run)()
