"""A sweep: random shapes of one fix, each with all its legs, judged by the prover as any case is.

With the fix in, a shape must be clean, or guarded where the model says so, and equal the reference; with it out, what
is stray must be what the model predicts. The legs run in company (`harness.company`). These run alone from the start:

- a leg that is declared to end its process: crashed, or stopped by a guard that stands in a kernel;
- one whose detector is no red zone. A zone is as large as what the shape's own case predicts and a bit more, so a
  stray write that is as predicted harms no other leg;
- on a GPU, one that holds much memory.

A shape that does not do as declared runs again alone. If it disagrees there, too, it is shrunk, every try alone, to
one of which no part can be made smaller. If it doesn't, or if a leg ended the process that it shared and is well alone,
then something that ran before it there left a mark: that is a finding of its own, `disturbed`.

The same seed and number draw the same shapes, for one version of hypothesis and of the sources: it tries out numbers
that these have in them.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from hypothesis import Phase, find, settings
from hypothesis.errors import NoSuchExample
from hypothesis.strategies import SearchStrategy

from harness import turns
from harness.case import Case
from harness.company import Company, Ran, key
from harness.prover import Prover, Result
from harness.sandbox import Request

Options = dict[str, Any]
_NOT_A_FINDING = {"proved", "skipped", "infra"}


class Space(Protocol):
    """The shapes of one fix, as `regressions.strategies` has them."""

    @property
    def fix(self) -> str: ...
    @property
    def options(self) -> SearchStrategy[Options]: ...
    @property
    def kills(self) -> bool: ...
    def case(self, options: Options) -> Case: ...
    def swept(self, options: Options) -> Case: ...


@dataclass
class Swept:
    """What came of one fix."""

    fix: str
    shapes: int = 0  # each another one
    verdicts: Counter[str] = field(default_factory=Counter)  # of the shapes in company
    told: int = 0  # of those proved, how many tell the fix from its absence
    smallest: Result | None = None  # of the shapes that disagree alone
    disturbed: list[str] = field(default_factory=list)  # ids of cases
    stopped: Result | None = None  # the shape that says why nothing was learnt: rotted, infra
    ran: Ran = field(default_factory=Ran)
    seconds: float = 0.0  # to draw, run and judge all of them; not to start servers, nor to shrink

    @property
    def rate(self) -> float:
        """Shapes a second."""
        return self.shapes / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "fix": self.fix, "shapes": self.shapes, "verdicts": dict(+self.verdicts), "told": self.told,
            "smallest": self.smallest and self.smallest.as_dict(), "disturbed": self.disturbed,
            "stopped": self.stopped and self.stopped.as_dict(),
            "legs": {"together": self.ran.together, "processes": self.ran.processes, "alone": self.ran.alone},
            "seconds": self.seconds, "shapes_per_second": round(self.rate, 1),
        }  # fmt: skip


class Sweeper(Prover):
    """A prover whose legs run in company."""

    def __init__(self, *args: Any, company: Company, **kwargs: Any):
        super().__init__(*args, servers=company, **kwargs)
        self._company = company
        self._planned: dict[tuple[tuple[str, ...], ...], Any] = {}

    def __enter__(self) -> Sweeper:
        return self

    def sweep(self, space: Space, examples: int, seed: int) -> Swept:
        """Never raises for what the code under test does. Raises InfraError where a server is at fault."""
        self._company.start(self.path)
        _ = self.environment
        started = time.monotonic()
        cases = {_name(case): case for case in map(space.swept, draw(space.options, examples, seed))}
        swept = Swept(space.fix, len(cases))
        keys = self._run_ahead(space, cases, swept)
        suspects = self._judge(space, cases, keys, swept)
        swept.seconds = round(time.monotonic() - started, 3)
        self._company.forget()
        if first := self._confirm(space, cases, suspects, swept):
            swept.smallest = self._shrink(space, first, set(keys) - set(suspects), examples, seed)
        return swept

    def _run_ahead(self, space: Space, cases: dict[str, Case], swept: Swept) -> dict[str, set[str]]:
        """The keys of each case's legs, which have run; none of a case that never got so far."""
        together: list[Request] = []
        alone: list[Request] = []
        keys: dict[str, set[str]] = {}
        for name, case in cases.items():
            with self._company.noting() as noted:
                result = self.prove(space.fix, case)
            if result.verdict.kind == "skipped":
                swept.verdicts["skipped"] += 1
                continue
            if result.verdict.kind != "infra" or not noted:  # not because its legs were only noted
                swept.stopped = result
                return {}
            keys[name] = set(map(key, noted))
            if self._is_large(case):
                continue  # run as it is judged, one at a time
            wanted = [case.on, *(want.outcome for want in result.expected)]
            for leg, want in zip(noted, wanted, strict=True):
                ends = want in ("crashed", "hung") or (want == "guarded" and space.kills)
                (alone if ends or case.detector != "red-zone" else together).append(leg)
        swept.ran = self._company.ahead(together, alone)
        return keys

    def _judge(self, space: Space, cases: dict[str, Case], keys: dict[str, set[str]], swept: Swept) -> dict[str, str]:
        """Names of the cases that did not do as declared, and what they did."""
        suspects = {}
        for name, legs in keys.items():
            verdict = self.prove(space.fix, cases[name]).verdict.kind
            swept.verdicts[verdict] += 1
            if verdict != "proved":
                suspects[name] = verdict
            elif legs & swept.ran.broke:
                swept.disturbed.append(cases[name].id)
            else:
                swept.told += cases[name].tells
        return suspects

    def _confirm(self, space: Space, cases: dict[str, Case], suspects: dict[str, str], swept: Swept) -> Result | None:
        """The first of the suspects that disagrees alone, too."""
        for name, in_company in suspects.items():
            result = self._prove_alone(space.fix, cases[name])
            if result.verdict.kind == "infra":
                swept.stopped = result
                return None
            if result.verdict.kind != "proved":
                return result
            if in_company == "infra":  # short of memory, say
                swept.verdicts.update(infra=-1, proved=1)
                swept.told += cases[name].tells
            else:
                swept.disturbed.append(cases[name].id)
        return None

    def _shrink(self, space: Space, first: Result, agree: Collection[str], examples: int, seed: int) -> Result:
        """A shape of which no part can be made smaller, found from the first that disagrees."""
        known = {_name(first.case): first}
        shrinking = False

        def disagrees(options: Options) -> bool:
            nonlocal shrinking
            case = space.swept(options)
            name = _name(case)
            shrinking = shrinking or name in known
            if not shrinking or name in agree:
                return False
            if name not in known:
                known[name] = self._prove_alone(space.fix, case)
            return known[name].verdict.kind not in _NOT_A_FINDING

        smallest = _first(space.options, disagrees, examples, seed)
        if smallest is None:  # it was not drawn again
            return first
        whole = self._prove_alone(space.fix, space.case(smallest))
        return known[_name(space.swept(smallest))] if whole.verdict.kind in _NOT_A_FINDING else whole

    def _prove_alone(self, fix: str, case: Case) -> Result:
        """Each leg in a process of its own; they run side by side."""
        if not self._is_large(case):
            with self._company.noting() as noted:
                self.prove(fix, case)
            self._company.ahead([], noted)
        result = self.prove(fix, case)
        self._company.forget()
        return result

    def _is_large(self, case: Case) -> bool:
        return self.device == "cuda" and case.device_bytes >= turns.MUCH

    def _plan(self, out: Sequence[str], involved: Sequence[str]) -> Any:
        """As a prover's, which is asked for the same few over and over here."""
        named = tuple(out), tuple(involved)
        if named not in self._planned:
            self._planned[named] = super()._plan(out, involved)
        return self._planned[named]


def draw(options: SearchStrategy[Options], examples: int, seed: int) -> list[Options]:
    """That many shapes, some of them twice; fewer where there are no more."""
    drawn: list[Options] = []

    def keep(shape: Options) -> bool:
        drawn.append(shape)
        return False

    _first(options, keep, examples, seed)
    return drawn


def _first(
    options: SearchStrategy[Options], holds: Callable[[Options], bool], examples: int, seed: int
) -> Options | None:
    """The first of the shapes drawn for which it holds, shrunk; None where it holds for none."""
    phases = [Phase.generate, Phase.shrink]
    how = settings(max_examples=examples, database=None, deadline=None, phases=phases)
    with contextlib.suppress(NoSuchExample):
        return find(options, holds, settings=how, random=Random(seed))  # nosec B311
    return None


def _name(case: Case) -> str:
    """What tells a case from the others of its fix, whose ids cut long lists short."""
    return json.dumps([case.params, case.detector], default=dict)
