"""How many trials a search takes, beside two plain ones: `python benchmarks/bisect_trials.py`.

Prints a table and writes results/bisect-trials.json. A trial is a selection that the command is run with beyond the two
ends. `unfix bisect` counts what it runs again before it names a set, too; the other two never run anything again.

Linear search puts one fix after the other back in and leaves it there where the command still fails. Ddmin is Zeller
and Hildebrandt's. Each of them finds one minimal set, and goes on with all other fixes while these make the command
fail, which finds every set where no two share a fix. Up to MOST choices of culprits are all tried; of more than that,
MOST are drawn, the same ones each time.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable, Collection, Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean

from harness.bisect import Answer, Selection, search

ROOT = Path(__file__).resolve().parents[1]
SIZES = (8, 16, 32, 64)
MOST = 2016  # every pair of 64 fixes
CASES = {
    "one culprit": (1, 1),
    "an interacting pair": (2, 2),
    "three independent": (3, 1),
}  # culprits; of them in a set


class Command:
    """Fails with all fixes of one of the sets out. `asked` has the selections that it was run with."""

    def __init__(self, fixes: Sequence[str], sets: Collection[Selection]) -> None:
        self.fixes, self.sets = fixes, sets
        self.asked: set[Selection] = set()

    def fails(self, out: Collection[str]) -> bool:
        self.asked.add(frozenset(out))
        return any(one <= frozenset(out) for one in self.sets)

    @property
    def trials(self) -> int:
        return len(self.asked - {frozenset(), frozenset(self.fixes)})


def ours(command: Command) -> tuple[set[Selection], int]:
    def ask(selections: Sequence[Selection], runs: int) -> list[Answer]:
        return [Answer.of({"fail" if command.fails(one) else "pass": runs}) for one in selections]

    result = search(command.fixes, ask)
    return {frozenset(one.out) for one in result.sets}, result.trials


def linear(room: list[str], command: Command) -> list[str]:
    for fix in list(room):
        if command.fails(set(room) - {fix}):
            room = [other for other in room if other != fix]
    return room


def ddmin(room: list[str], command: Command) -> list[str]:
    parts = 2
    while len(room) > 1:
        cuts = [len(room) * part // parts for part in range(parts + 1)]
        chunks = [room[start:end] for start, end in zip(cuts, cuts[1:], strict=False)]
        rests = [[fix for fix in room if fix not in chunk] for chunk in chunks]
        if chunk := next(filter(command.fails, chunks), None):
            room, parts = chunk, 2
        elif rest := next(filter(command.fails, rests), None):
            room, parts = rest, max(parts - 1, 2)
        elif parts < len(room):
            parts = min(2 * parts, len(room))
        else:
            break
    return room


def again_and_again(plain: Callable[[list[str], Command], list[str]], command: Command) -> tuple[set[Selection], int]:
    found, room = set(), list(command.fixes)
    while command.fails(room):
        one = plain(room, command)
        found.add(frozenset(one))
        room = [fix for fix in room if fix not in one]
    return found, command.trials


SEARCHES: dict[str, Callable[[Command], tuple[set[Selection], int]]] = {
    "unfix bisect": ours,
    "linear": lambda command: again_and_again(linear, command),
    "ddmin": lambda command: again_and_again(ddmin, command),
}


def measure(size: int, culprits: int, joined: int) -> dict[str, dict[str, float]]:
    """Mean and worst number of trials of each search; every answer is checked."""
    fixes = [f"{number:02}" for number in range(size)]
    choices = list(combinations(fixes, culprits))
    if len(choices) > MOST:
        choices = random.Random(0).sample(choices, MOST)
    row: dict[str, dict[str, float]] = {}
    for name, method in SEARCHES.items():
        counts = []
        for chosen in choices:
            sets = {frozenset(chosen[start : start + joined]) for start in range(0, culprits, joined)}
            found, trials = method(Command(fixes, sets))
            assert found == sets, (name, size, sets, found)
            counts.append(trials)
        row[name] = {"mean": round(mean(counts), 1), "worst": max(counts)}
    return row


def main() -> None:
    rows = [
        {"case": case, "fixes": size, "trials": measure(size, *shape)}
        for case, shape in CASES.items()
        for size in SIZES
    ]
    print("| mean (worst) trials | fixes | " + " | ".join(SEARCHES) + " |")
    print("|---|--:|" + "--:|" * len(SEARCHES))
    for row in rows:
        cells = [f"{cell['mean']:.1f} ({cell['worst']})" for cell in row["trials"].values()]  # type: ignore[attr-defined]
        print(f"| {row['case']} | {row['fixes']} | " + " | ".join(cells) + " |")
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    document = {
        "schema_version": 1,
        "command": "python benchmarks/bisect_trials.py",
        "commit": commit.stdout.strip(),
        "rows": rows,
    }
    (ROOT / "results" / "bisect-trials.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
