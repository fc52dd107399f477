"""Would a test notice if the harness itself were wrong? `python benchmarks/mutation.py [MODULE…]`, `edits` for one.

Each module of `MODULES` is changed in one small place at a time (`mutants.py`), in a copy of the checkout, and its
tests run there, those first that run the changed line (`traced.py`): a test that fails kills the mutant, and so does
one that does not end in time, which is counted apart. What survives is a hole in the tests, or a change that makes no
difference; the latter are explained, one a line, in results/survivors.tsv. A change of a line that no test runs
survives untried. An explanation is found by its line's text and not by its number, so it goes with the line, and is
told of once nothing survives there any more. One that says that a line runs only on a GPU holds only where there is
none.

Needs cosmic-ray (`pip install cosmic-ray`; not a dependency of unfix) and `unshare`: mutants run in a PID namespace of
their own (`nursery.py`), since one of the sandbox may well signal every process there is. Before a module's mutants the
tests must pass as they are, forwards and backwards, and must fail where the module can't be imported: else they run
something else than the copy.

Two at a time (--jobs), or each N-th mutant only (--every), which the figures say. With --again only what survived the
last time runs, where the module is still the same text. Adds to results/mutation.json (--json for another place), each
module with where it ran, and prints a table; ends with 1 where a module's score is below 90 % or an explanation
explains nothing. All of them take about an hour on two cores.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import csv
import hashlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import record  # noqa: E402
import torch  # noqa: E402
from mutants import Mutant, mutants  # noqa: E402
from traced import Ran, nearest, never_run  # noqa: E402

ENOUGH = 90.0  # per cent of a module's mutants, killed or explained
PLAIN = 1200.0  # seconds in which a module's tests must end as they are
MODULES = {  # the tests that must kill each one's mutants, the quick ones first
    "verdict": ("verdict",),
    "outcome": ("outcome",),
    "selection": ("selection",),
    "bisect": ("bisect",),
    "edits": ("edits", "overlay", "pieces"),
    "tokens": ("edits", "pieces"),
    "snippets": ("edits", "pieces"),
    "overlay": ("overlay",),
    "memory/watch": ("memory",),
    "memory/red_zone": ("memory",),
    "memory/guard_page": ("memory",),
    "memory/victim": ("memory",),
    "memory/poison": ("memory",),
    "memory/scrub": ("memory",),
    "sandbox": ("sandbox_client", "sandbox"),
}
USE_TORCH = {"memory", "sandbox"}
EXPLAINED = ROOT / "results" / "survivors.tsv"
LATE = 5.0  # seconds; a test that fails after that must do so twice: it may be one that a busy machine fails
ELSEWHERE = "runs only on a GPU"  # begins the explanations that are none there
Figures = dict[str, Any]


class Copy:
    """A copy of the checkout in which one mutant at a time is tried."""

    def __init__(self, folder: Path, imported: Sequence[str]) -> None:
        """``imported``: packages that the tests need and that take long to import."""
        self._imported = imported
        self.root, self._cache = folder / "checkout", folder / "cache"
        self.root.mkdir(parents=True)
        self._cache.mkdir(mode=0o700)
        self._nursery: subprocess.Popen[bytes] | None = None
        listing = ["git", "ls-files", "-coz", "--exclude-standard", "--deduplicate"]
        names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True).stdout.split(b"\0")
        listed = b"\0".join(name for name in names if name and (ROOT / os.fsdecode(name)).exists())
        pack = ["tar", "-c", "--null", "-T", "-"]
        packed = subprocess.run(pack, cwd=ROOT, input=listed, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", str(self.root)], input=packed, check=True)
        compile_all = ["-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "harness", "kernels"]
        subprocess.run([sys.executable, *compile_all], cwd=self.root, check=True)

    def passes(self, seconds: float, **asked: Any) -> bool | None:
        """Whether the tests that nursery.py is asked for pass here; None where they, or one of them, did not end."""
        nursery = self._nursery = self._nursery or self._started()
        assert nursery.stdin and nursery.stdout
        nursery.stdin.write(json.dumps(asked).encode() + b"\n")
        nursery.stdin.flush()
        if not select.select([nursery.stdout], [], [], seconds)[0]:
            self.close()
            return None
        if not (said := nursery.stdout.readline()):  # it was killed, too
            self.close()
            return False
        return None if int(said) == -signal.SIGALRM else int(said) == 0

    def traced(self, tests: Sequence[str], module: str) -> Ran | None:
        """What each test of the module as it is takes and runs; None where they don't pass."""
        into = self.root.parent / "ran.json"
        passed = self.passes(PLAIN, tests=tests, trace=f"/harness/{module}.py", into=str(into))
        return json.loads(into.read_text()) if passed else None

    def close(self) -> None:
        if self._nursery:
            self._nursery.kill()  # and with it all of the namespace
            self._nursery.communicate()
            self._nursery = None

    def _started(self) -> subprocess.Popen[bytes]:
        alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        kept = {
            name: text for name, text in os.environ.items() if not name.startswith(("UNFIX_", "SGLANG_", "PYTEST_"))
        }
        env = kept | {
            "PYTHONPATH": os.pathsep.join([str(self.root), str(self.root / "kernels")]),
            "PYTHONDONTWRITEBYTECODE": "1",  # a mutant's would be taken for the next one's
            "UNFIX_CACHE": str(self._cache), "TMPDIR": str(self._cache.parent),
        }  # fmt: skip
        command = [*alone, sys.executable, str(Path(__file__).with_name("nursery.py")), *self._imported]
        nursery = subprocess.Popen(command, cwd=self.root, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert nursery.stdout
        if nursery.stdout.readline() != b"ready\n":
            raise SystemExit("no process in which mutants can be tried could be started: see above")
        return nursery

    @contextmanager
    def changed(self, module: str, source: str) -> Iterator[None]:
        file = self.root / "harness" / f"{module}.py"
        whole = file.read_bytes()
        file.write_text(source)
        try:
            yield
        finally:
            file.write_bytes(whole)


def try_module(module: str, copies: Sequence[Copy], every: int, last: Figures, here: Figures) -> Figures:
    """The mutants of one module; `last`: figures of an earlier run, to run its survivors only if they still hold.

    `here`: the environment. The figures have that of each run that they are of.
    """
    tests = [f"tests/test_{test}.py" for test in MODULES[module]]
    source = (copies[0].root / "harness" / f"{module}.py").read_text()
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(len(copies)) as pool:
        tracing = pool.submit(copies[0].traced, tests, module)
        backwards = pool.submit(copies[-1].passes, PLAIN, tests=tests, limits={})
        if (ran := tracing.result()) is None or not backwards.result():
            raise SystemExit(f"{module}: its tests don't pass as they are, or not backwards")
    limit = 60 + 5 * (time.monotonic() - began)  # for a whole try; each test has its own, too
    with copies[0].changed(module, "raise RuntimeError\n"):
        if copies[0].passes(limit, tests=tests, limits={}) is not False:
            raise SystemExit(f"{module}: its tests pass without it, so they don't run this copy")
    never = never_run(source, ran)
    text = hashlib.sha256(source.encode()).hexdigest()[:16]
    todo = list(mutants(module, source))[::every]
    count = len(todo)
    killed = timed_out = 0
    runs = [here]
    if (last.get("text"), last.get("every")) == (text, every):
        lived = {(each["text"], each["operator"]) for each in last["survivors"]}
        todo = [mutant for mutant in todo if mutant.key[1:] in lived]
        timed_out = last["timed_out"]
        killed = count - len(todo) - timed_out
        runs = [*last.get("runs", []), here]
    free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def lives(mutant: Mutant) -> bool | None:
        if mutant.line in never:
            return True
        copy = free.get()
        try:
            with copy.changed(module, mutant.source):
                began, limits = time.monotonic(), nearest(mutant.line, ran)
                answer = copy.passes(limit, tests=tests, limits=limits)
                if answer is False and time.monotonic() - began > LATE:
                    answer = copy.passes(limit, tests=tests, limits=limits)
                return answer
        finally:
            free.put(copy)

    survivors = []
    with concurrent.futures.ThreadPoolExecutor(len(copies)) as pool:
        for at, (mutant, answer) in enumerate(zip(todo, pool.map(lives, todo), strict=True), 1):
            killed, timed_out = killed + (answer is False), timed_out + (answer is None)
            if answer:
                survivors.append(mutant)
                print(
                    f"{module}:{mutant.line}: {mutant.operator}: {mutant.text}  ->  {mutant.becomes}", file=sys.stderr
                )
            if at % 50 == 0:
                print(f"{module}: {at} of {len(todo)}, {len(survivors)} survived", file=sys.stderr)
    return {
        "runs": runs, "text": text, "tests": tests, "every": every, "mutants": count,
        "killed": killed, "timed_out": timed_out, "seconds": round(time.monotonic() - began),
        "survivors": [
            {"line": each.line, "text": each.text, "operator": each.operator, "becomes": each.becomes}
            for each in survivors
        ],
    }  # fmt: skip


def explain(module: str, found: Figures, why: dict[tuple[str, str, str], str]) -> Figures:
    """The same figures with what is known of the survivors, and the score."""
    survivors = [{**each, "why": why.get((module, each["text"], each["operator"]))} for each in found["survivors"]]
    explained = sum(each["why"] is not None for each in survivors)
    score = 100 * (found["killed"] + found["timed_out"] + explained) / found["mutants"]
    return {
        **found, "survived": len(survivors), "explained": explained, "score": round(score, 1), "survivors": survivors
    }  # fmt: skip


def explanations() -> dict[tuple[str, str, str], str]:
    """(module, line's text, operator) -> why it makes no difference. On a GPU, nothing runs only there."""
    if not EXPLAINED.exists():
        return {}
    rows = csv.reader(EXPLAINED.read_text().splitlines()[1:], delimiter="\t", quoting=csv.QUOTE_NONE)
    here = [row for row in rows if not (row[3].startswith(ELSEWHERE) and torch.cuda.is_available())]
    return {(module, text, operator): why for module, text, operator, why in here}


def saved(path: Path) -> Figures:
    """Each module's figures so far."""
    found: Figures = json.loads(path.read_text())["modules"] if path.exists() else {}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=", ".join(MODULES))
    parser.add_argument("--json", type=Path, default=ROOT / "results" / "mutation.json")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each N-th mutant only")
    parser.add_argument("--again", action="store_true", help="only what survived the last time")
    asked = parser.parse_args()
    if unknown := [module for module in asked.modules if module not in MODULES]:
        parser.error(f"no such module: {', '.join(unknown)}; known: {', '.join(MODULES)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for module in asked.modules or MODULES:
        here = record.environment(device)
        with tempfile.TemporaryDirectory(prefix="unfix-mutation-") as folder:
            imported = ["torch"] if set(MODULES[module]) & USE_TORCH else []
            copies = [Copy(Path(folder) / str(at), imported) for at in range(asked.jobs)]
            try:
                last = saved(asked.json).get(module, {}) if asked.again else {}
                found = try_module(module, copies, asked.every, last, here)
            finally:
                for copy in copies:
                    copy.close()
        known, why = {**saved(asked.json), module: found}, explanations()  # as another run may have saved it meanwhile
        known = {each: explain(each, known[each], why) for each in MODULES if each in known}
        record.save(asked.json, device, {"modules": known})
    lived = {(name, each["text"], each["operator"]) for name, found in known.items() for each in found["survivors"]}
    stale = [key for key in explanations() if key[0] in known and key not in lived]
    print(f"{'module':20}{'mutants':>9}{'killed':>9}{'timed out':>11}{'survived':>10}{'explained':>11}{'score':>8}")
    for module, found in known.items():
        row = [found[name] for name in ("mutants", "killed", "timed_out", "survived", "explained")]
        print(f"{module:20}{row[0]:9}{row[1]:9}{row[2]:11}{row[3]:10}{row[4]:11}{found['score']:7} %")
    for key in stale:
        print(f"results/survivors.tsv explains what does not survive: {' | '.join(key)}")
    return 1 if stale or any(found["score"] < ENOUGH for found in known.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
