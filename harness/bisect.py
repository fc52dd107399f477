"""Which fixes matter to a command: the search, with no process in it.

A *trial* is a set of fixes that are out together, and its *answer* is what the command said then: pass, fail, timeout,
skip, or flaky where the runs of the trial differ. The two ends come first: everything in (the near end) and everything
out (the far end). A set *flips* when its answer is the far end's and *stays* when it is the near end's. Anything else,
such as a skip, is unresolved and is never taken for either.

What is looked for are the minimal sets: they flip, and stay when any one of their fixes is back in.

One minimal set. Of ever longer prefixes of the fixes, some length is the first to flip; halving finds a border between
a prefix that stays and one that flips. The fix at the border belongs to the set. It is out from then on, and what else
the set needs lies before it; when what was collected flips by itself, that is it. Unresolved prefixes are stepped over;
where none is left to ask, all fixes between the two nearest answers are collected. In the end each fix is put back in,
and a set that still flips is gone on with: so the result is minimal by trials and not by reasoning, whatever the
command does. A set that flips, but can't be told to be minimal for want of an answer, is unresolved.

Before it is named. The runs that led to a set were picked by their answers. So the set is run again, and so are the set
less each of its fixes (the near end, for a single fix) and everything but the set. One run that differs makes it flaky:
it isn't named, and the search ends there.

The other sets. Another set survives when one fix of each known set is back in. So all but those fixes are taken out,
for each minimal choice of them: where that flips, another set is inside, and where every choice stays, there is none.
That is exact as long as more fixes out never undo a flip. For other commands every named set is right, but there may be
more of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from harness.errors import UnfixError, UsageError

Kind = Literal["pass", "fail", "timeout", "skip", "flaky"]
Direction = Literal["breaking", "blaming"]
Selection = frozenset[str]  # the ids of the fixes that are out

CONFIRM = 3  # runs of each end, and at least so many in all of everything that a named set rests on
MAX_CHECKS = 32  # for further sets; many sets of several fixes have more choices than anyone wants to wait for
_SAYS: dict[Kind, str] = {"fail": "fails", "timeout": "times out", "skip": "skips", "pass": "passes"}


@dataclass(frozen=True)
class Answer:
    """What the runs of one trial said."""

    kind: Kind  # what all runs said, or "flaky"
    counts: Mapping[str, int]  # runs by what they said: {"fail": 3}

    @classmethod
    def of(cls, counts: Mapping[str, int]) -> Answer:
        """The answer that these runs give: `Answer.of({"fail": 2, "pass": 1})` is flaky."""
        seen = [kind for kind in _SAYS if counts.get(kind)]
        return cls(seen[0] if len(seen) == 1 else "flaky", {kind: counts[kind] for kind in seen})

    @property
    def runs(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        """`fails`, or for a flaky one `fails in 1 of 3 runs (33 %, 95 % interval 6 to 79 %)`."""
        if self.kind != "flaky":
            return _SAYS[self.kind]
        kind = next(kind for kind in _SAYS if kind in self.counts)
        hits = self.counts[kind]
        low, high = wilson(hits, self.runs)
        rate = f"{100 * hits / self.runs:.0f} %, 95 % interval {100 * low:.0f} to {100 * high:.0f} %"
        return f"{_SAYS[kind]} in {hits} of {self.runs} runs ({rate})"


Ask = Callable[[Sequence[Selection], int], Sequence[Answer]]  # run each selection so many times; answers in order


@dataclass(frozen=True)
class FoundSet:
    """A set of fixes that flips, and that stays with any one of them back in. Ids are in the order of the search."""

    out: tuple[str, ...]  # the fixes
    answer: Answer  # what all runs with them out said
    without: tuple[Answer, ...]  # for each of them: what the runs with only the others out said
    complement: Answer  # what the runs with everything out but them said
    passing: tuple[str, ...]  # two selections that differ by the last fix of the set: with one the command passes ...
    failing: tuple[str, ...]  # ... and with the other it doesn't (the direction decides which of the two is `out`)


@dataclass(frozen=True)
class Unresolved:
    """A set that flips, and of which nobody can say whether it is minimal."""

    out: tuple[str, ...]  # the fixes
    open: tuple[str, ...]  # those of them that may or may not be needed
    answers: tuple[Answer, ...]  # for each of `open`: what the runs with only the others out said


@dataclass(frozen=True)
class Flaky:
    """A trial whose runs differ."""

    out: tuple[str, ...]  # the fixes that were out
    answer: Answer  # what its runs said


@dataclass(frozen=True)
class Search:
    """What a search found."""

    direction: Direction  # breaking: passes with everything in; blaming: passes with everything out
    near: Answer  # what the runs with everything in said
    far: Answer  # what the runs with everything out said
    sets: tuple[FoundSet, ...]  # the minimal sets, in the order they were found
    unresolved: tuple[Unresolved, ...]  # sets that flip, and that contain no named one
    flaky: tuple[Flaky, ...]  # all trials whose runs differ
    trials: int  # beyond the two ends; a selection that is run again counts again
    runs: int  # of the command, the ends' included
    complete: bool  # whether these are all sets (of a command for which more fixes out never undo a flip)
    notes: tuple[str, ...]  # why it isn't complete, a line each


class EndsError(UnfixError):
    """Nothing to search for: both ends say the same, one of them is flaky or skips, or neither passes."""

    def __init__(self, message: str, near: Answer, far: Answer) -> None:
        super().__init__(message)
        self.near = near
        self.far = far


def search(
    fixes: Sequence[str],
    ask: Ask,
    *,
    find: Direction | None = None,
    jobs: int = 1,
    repeat: int = 1,
    note: Callable[[str], None] = lambda line: None,
) -> Search:
    """Find the minimal sets of `fixes` whose revert changes the command's answer.

    `ask` runs each of several selections so many times, in parallel if it can; `jobs` (1 or more) is how many different
    ones the search tries to find for it, `repeat` (1 or more) how often a trial is run. Raises EndsError where the ends
    leave nothing to search for, UsageError without fixes or where the ends run the other way round than `find` says.
    """
    if not fixes:
        raise UsageError("no fix to search among")
    near, far = ask([frozenset(), frozenset(fixes)], max(CONFIRM, repeat))
    direction = _direction(near, far, find)
    note(f"it {near} with everything in and {far} with everything out: looking for what changes it")
    searcher = _Searcher(tuple(fixes), ask, (near, far), jobs, repeat)
    searcher.run(note)
    return searcher.result(direction)


def wilson(hits: int, runs: int) -> tuple[float, float]:
    """The 95 % interval of a rate that was seen as `hits` of `runs` (Wilson's score interval)."""
    z = 1.959964
    middle = hits + z * z / 2
    spread = z * math.sqrt(hits * (runs - hits) / runs + z * z / 4)
    return max(0.0, (middle - spread) / (runs + z * z)), min(1.0, (middle + spread) / (runs + z * z))


def hitting_sets(sets: Sequence[Selection], order: Sequence[str]) -> Iterator[Selection]:
    """Every minimal choice of fixes that takes at least one out of each set; each once, as soon as it is known."""
    seen: set[Selection] = set()

    def grow(chosen: Selection) -> Iterator[Selection]:
        # a fix is of use only while it alone hits some set, and a larger choice never makes it so again
        if any(all(chosen & one != {fix} for one in sets) for fix in chosen) or chosen in seen:
            return
        seen.add(chosen)
        missed = next((one for one in sets if not one & chosen), None)
        if missed is None:
            yield chosen
            return
        for fix in order:
            if fix in missed:
                yield from grow(chosen | {fix})

    return grow(frozenset())


def _direction(near: Answer, far: Answer, find: Direction | None) -> Direction:
    ends = f"{near} with everything in and {far} with everything out"
    kinds = {near.kind, far.kind}
    if "flaky" in kinds:
        raise EndsError(f"flaky before any search: it {ends}", near, far)
    if "skip" in kinds:
        raise EndsError(f"nothing to compare with: it {ends}, and neither end may skip", near, far)
    if len(kinds) == 1:
        raise EndsError(f"no fix changes it: it {ends}", near, far)
    if "pass" not in kinds:
        raise EndsError(f"it must pass at one end, but it {ends}", near, far)
    direction: Direction = "breaking" if near.kind == "pass" else "blaming"
    if find not in (None, direction):
        must = "pass" if find == "breaking" else "fail"
        raise UsageError(f"to find {find} fixes, it must {must} with everything in, but it {ends} (find {direction})")
    return direction


class _Searcher:
    """One search: what is known so far, and the steps that ask for more."""

    def __init__(self, fixes: tuple[str, ...], ask: Ask, ends: tuple[Answer, Answer], jobs: int, repeat: int) -> None:
        self.fixes, self.ask, self.jobs, self.repeat = fixes, ask, jobs, repeat
        self.near, self.far = frozenset[str](), frozenset(fixes)
        self.known: dict[Selection, Answer] = dict(zip((self.near, self.far), ends, strict=True))
        self.stay, self.flip = (answer.kind for answer in ends)
        self.trials = 0
        self.confirmed: set[Selection] = set()
        self.checked: list[Selection] = []
        self.named: list[FoundSet] = []
        self.unresolved: list[Unresolved] = []
        self.notes: list[str] = []

    def run(self, note: Callable[[str], None]) -> None:
        room: Selection | None = self.far
        while room is not None:
            found = self.minimal(room)
            note(f"it {self.known[found]} with only {self.names(found)} out")
            room = self.another() if self.settle(found) else None

    def minimal(self, room: Selection) -> Selection:
        """A set inside `room`, which flips, that flips too and of which no fix is known to be spare."""
        base, rest = frozenset[str](), self.ordered(room)
        while not self.flips(base):
            base, rest = self.narrow(base, rest)
        return self.shrink(base)

    def narrow(self, base: Selection, rest: tuple[str, ...]) -> tuple[Selection, tuple[str, ...]]:
        """Base with the fix at the border, and the rest before it; as before, base and rest together flip."""
        prefixes = [base.union(rest[:length]) for length in range(len(rest) + 1)]
        while True:
            high = next(at for at, prefix in enumerate(prefixes) if self.flips(prefix))
            low = next((at for at in range(high - 1, 0, -1) if self.stays(prefixes[at])), 0)
            first = [base] if base not in self.known else []
            between = [prefix for prefix in prefixes[low + 1 : high] if prefix not in self.known]
            if not first and not between:
                return base.union(rest[low:high]), rest[:low]
            cuts = min(self.jobs - len(first), len(between))
            self.learn(first + [between[len(between) * cut // (cuts + 1)] for cut in range(1, cuts + 1)])

    def shrink(self, found: Selection) -> Selection:
        """Put back every fix without which it still flips."""
        needed: list[str] = []
        todo = [*self.ordered(found)]
        while todo:
            batch, todo = todo[: self.jobs], todo[self.jobs :]
            self.learn([found - {fix} for fix in batch])
            spare = next((at for at, fix in enumerate(batch) if self.flips(found - {fix})), None)
            if spare is None:
                needed += batch
            else:
                found -= {batch[spare]}
                todo, needed = batch[spare + 1 :] + todo + needed + batch[:spare], []
        return found

    def settle(self, found: Selection) -> bool:
        """Name it, or file it as unresolved. False where runs differ: what follows would be built on sand."""
        out = self.ordered(found)
        less = [found - {fix} for fix in out]
        if doubt := {fix: self.known[one] for fix, one in zip(out, less, strict=True) if not self.stays(one)}:
            self.unresolved.append(Unresolved(out, tuple(doubt), tuple(doubt.values())))
            return True
        rest = self.far - found
        claims = [
            *dict.fromkeys((found, *less, rest))
        ]  # of a single fix that is all there is, the rest is the near end
        self.again(claims)
        if differ := [one for one in claims if self.known[one].kind == "flaky"]:
            why = "; ".join(f"it {self.known[one]} with {self.names(one)} out" for one in differ)
            self.notes.append(f"{self.names(found)}: not named, for {why}")
            return False
        pair = (out[:-1], out) if self.stay == "pass" else (out, out[:-1])
        answers = tuple(self.known[one] for one in less)
        self.named.append(FoundSet(out, self.known[found], answers, self.known[rest], *pair))
        return True

    def another(self) -> Selection | None:
        """Everything but one fix of each known set, where that flips."""
        while True:
            choices = (one for one in hitting_sets(self.sets(), self.fixes) if one not in self.checked)
            todo = list(islice(choices, self.jobs))
            if todo and len(self.checked) >= MAX_CHECKS:
                self.notes.append(f"stopped after {MAX_CHECKS} checks for further sets: there may be more")
                return None
            self.learn([self.far - one for one in todo])
            for one in todo:
                self.checked.append(one)
                if self.flips(self.far - one):
                    return self.far - one
            if not todo:
                return None

    def result(self, direction: Direction) -> Search:
        named = [set(one.out) for one in self.named]
        unresolved = [one for one in self.unresolved if not any(found <= set(one.out) for found in named)]
        for one in unresolved:
            said: dict[str, list[str]] = {str(answer): [] for answer in one.answers}
            for fix, answer in zip(one.open, one.answers, strict=True):
                said[str(answer)].append(fix)
            why = "; ".join(f"it {answer} with {' or '.join(fixes)} back in" for answer, fixes in said.items())
            out = ", ".join(one.out)
            self.notes.append(f"it {_SAYS[self.flip]} with {out} out, but can't be told to need each of them: {why}")
        sets = self.sets()
        unsure = [one for one in self.checked if not self.stays(self.far - one) and all(one & known for known in sets)]
        if unsure:
            answer, others = self.known[self.far - unsure[0]], len(unsure) - 1
            more = f" ({others} more such trial{'s' * (others > 1)})" if others else ""
            self.notes.append(f"there may be more: it {answer} with all but {self.names(unsure[0])} out{more}")
        return Search(
            direction,
            self.known[self.near],
            self.known[self.far],
            tuple(self.named),
            tuple(unresolved),
            tuple(Flaky(self.ordered(one), answer) for one, answer in self.known.items() if answer.kind == "flaky"),
            self.trials,
            sum(answer.runs for answer in self.known.values()),
            not self.notes,
            tuple(self.notes),
        )

    def sets(self) -> list[Selection]:
        return [frozenset(one.out) for one in self.named] + [frozenset(one.out) for one in self.unresolved]

    def learn(self, selections: Sequence[Selection]) -> None:
        """Ask for those that nobody has asked for yet."""
        self.put([one for one in selections if one not in self.known], self.repeat)

    def again(self, selections: Sequence[Selection]) -> None:
        """Run what a claim rests on once more: CONFIRM times in all at least, and not only as often as before."""
        fresh = [one for one in selections if one not in self.confirmed]
        self.put([one for one in fresh if one in self.known], CONFIRM - 1)
        self.put([one for one in fresh if one not in self.known], max(CONFIRM, self.repeat))
        self.confirmed.update(fresh)

    def put(self, selections: Sequence[Selection], runs: int) -> None:
        if selections:
            for one, answer in zip(selections, self.ask(selections, runs), strict=True):
                before = self.known[one].counts if one in self.known else {}
                self.known[one] = Answer.of(Counter(before) + Counter(answer.counts))
                self.trials += one not in (self.near, self.far)

    def flips(self, selection: Selection) -> bool:
        return selection in self.known and self.known[selection].kind == self.flip

    def stays(self, selection: Selection) -> bool:
        return selection in self.known and self.known[selection].kind == self.stay

    def ordered(self, selection: Selection) -> tuple[str, ...]:
        return tuple(fix for fix in self.fixes if fix in selection)

    def names(self, selection: Selection) -> str:
        return ", ".join(self.ordered(selection)) or "nothing"
