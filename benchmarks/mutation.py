"""Would a test notice if the harness itself were wrong? `python benchmarks/mutation.py [MODULE…]`, `edits` for one.

Each module of `MODULES` is changed in one small place at a time (`mutants.py`), in a copy of the checkout, and its
tests run there: a test that fails kills the mutant, and so does one that does not end in time, which is counted apart.
What survives is a hole in the tests, or a change that makes no difference; the latter are explained, one a line, in
results/survivors.tsv. An explanation is found by its line's text and not by its number, so it goes with the line, and
is told of once nothing survives there any more.

Needs cosmic-ray (`pip install cosmic-ray`; not a dependency of unfix) and `unshare`: mutants run in a PID namespace of
their own, since one of the sandbox may well signal every process there is. Before a module's mutants the tests
must pass as they are, and must fail where the module can't be imported: else they run something else than the copy.

Two at a time (--jobs), or each N-th mutant only (--every), which the figures say. With --again only what survived the
last time runs, where the module is still the same text. Adds to results/mutation.json (--json for another place) and
prints a table; ends with 1 where a module's score is below 90 % or an explanation explains nothing. All of them take
about two hours on two cores.
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
from mutants import Mutant, mutants  # noqa: E402

ENOUGH = 90.0  # per cent of a module's mutants, killed or explained
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
    "memory/scrub": ("memory", "resident"),
    "sandbox": ("sandbox", "resident"),
}
USE_TORCH = {"memory", "resident", "sandbox"}
EXPLAINED = ROOT / "results" / "survivors.tsv"
Figures = dict[str, Any]


# First process of a PID namespace: whatever a mutant left running is killed after it, and cannot reach any further.
_NURSERY = """
import os, signal, sys
import hypothesis, jinja2, numpy, pydantic, pytest, rich, typer, xdist.plugin, yaml
for name in sys.argv[1:]:
    __import__(name)
print("ready", flush=True)
for tests in sys.stdin:
    child = os.fork()
    if not child:
        for stream in (0, 1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        os._exit(pytest.main(tests.split()))
    while (ended := os.wait())[0] != child:
        pass
    try:
        os.kill(-1, signal.SIGKILL)
        while True:
            os.wait()
    except (ProcessLookupError, ChildProcessError):
        pass
    print(os.waitstatus_to_exitcode(ended[1]), flush=True)
"""


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

    def passes(self, tests: Sequence[str], seconds: float) -> bool | None:
        """Whether these tests pass here; None where they did not end."""
        nursery = self._nursery = self._nursery or self._started()
        assert nursery.stdin and nursery.stdout
        paths = [f"tests/test_{test}.py" for test in tests]
        nursery.stdin.write(" ".join(["-x", "-q", "-n", "0", "-p", "no:cacheprovider", *paths]).encode() + b"\n")
        nursery.stdin.flush()
        if not select.select([nursery.stdout], [], [], seconds)[0]:
            self.close()
            return None
        if not (said := nursery.stdout.readline()):  # it was killed, too
            self.close()
            return False
        return int(said) == 0

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
        command = [*alone, sys.executable, "-c", _NURSERY, *self._imported]
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


def try_module(module: str, copies: Sequence[Copy], every: int, last: Figures) -> Figures:
    """The mutants of one module; `last`: figures of an earlier run, to run its survivors only if they still hold."""
    tests, source = MODULES[module], (copies[0].root / "harness" / f"{module}.py").read_text()
    began = time.monotonic()
    if not copies[0].passes(tests, 600):
        raise SystemExit(f"{module}: its tests don't pass as they are")
    limit = 20 + 5 * (time.monotonic() - began)
    with copies[0].changed(module, "raise RuntimeError\n"):
        if copies[0].passes(tests, limit) is not False:
            raise SystemExit(f"{module}: its tests pass without it, so they don't run this copy")
    text = hashlib.sha256(source.encode()).hexdigest()[:16]
    todo = list(mutants(module, source))[::every]
    count = len(todo)
    killed = timed_out = 0
    if (last.get("text"), last.get("every")) == (text, every):
        lived = {(each["text"], each["operator"]) for each in last["survivors"]}
        todo = [mutant for mutant in todo if mutant.key[1:] in lived]
        timed_out = last["timed_out"]
        killed = count - len(todo) - timed_out
    free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def lives(mutant: Mutant) -> bool | None:
        copy = free.get()
        try:
            with copy.changed(module, mutant.source):
                return copy.passes(tests, limit)
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
        "text": text, "tests": [f"tests/test_{test}.py" for test in tests], "every": every, "mutants": count,
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
    """(module, line's text, operator) -> why it makes no difference."""
    if not EXPLAINED.exists():
        return {}
    rows = csv.reader(EXPLAINED.read_text().splitlines()[1:], delimiter="\t", quoting=csv.QUOTE_NONE)
    return {(module, text, operator): why for module, text, operator, why in rows}


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
    known: Figures = json.loads(asked.json.read_text())["modules"] if asked.json.exists() else {}
    for module in asked.modules or MODULES:
        with tempfile.TemporaryDirectory(prefix="unfix-mutation-") as folder:
            imported = ["torch"] if set(MODULES[module]) & USE_TORCH else []
            copies = [Copy(Path(folder) / str(at), imported) for at in range(asked.jobs)]
            try:
                known[module] = try_module(module, copies, asked.every, known.get(module, {}) if asked.again else {})
            finally:
                for copy in copies:
                    copy.close()
        why = explanations()
        known = {each: explain(each, known[each], why) for each in MODULES if each in known}
        record.save(asked.json, "cpu", {"modules": known})
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
