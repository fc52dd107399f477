"""What tests/test_properties*.py try, on other inputs and for long: `python benchmarks/fuzz.py [--seconds 600]`.

Each property has its share of the time, and of each is said: how many inputs it held for, the processor's seconds that
the slowest took, and what failed, by the smallest input that shows it. An input that takes more than a second fails.

    files    before that, each file of the standard library with its tests, of this checkout and of what is cached of
             SGLang, the largest first: split into tokens, outlined, and edited in whole at its last statement

Prints a table and writes results/fuzz.json (--json for another place). Exit code 1 where anything failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import record  # noqa: E402

from harness import outline  # noqa: E402
from harness.edits import Change, Edit, apply  # noqa: E402
from harness.errors import RottedError  # noqa: E402
from harness.targets import Source  # noqa: E402
from harness.tokens import lex  # noqa: E402
from tests import python_texts, test_properties, test_properties_input  # noqa: E402
from tests.fuzzing import Property  # noqa: E402

PROPERTIES = {**test_properties.PROPERTIES, **test_properties_input.PROPERTIES}
MOST = 1.0  # seconds of the processor that one input may take
ROUND = 200  # inputs of one seed


class TooSlow(Exception):
    """An input that took longer than MOST."""


def fuzz(tried: Property, seconds: float, seed: int) -> dict[str, Any]:
    """Try a property for so many seconds, or until it fails."""
    inputs, slowest = 0, 0.0

    def check(drawn: Any) -> None:
        nonlocal inputs, slowest
        gc.disable()  # its pauses are those of all that is in memory, and of no input
        began = time.process_time()
        try:
            tried.check(drawn)
            inputs += 1  # one that it says nothing of doesn't come here
        finally:
            took = time.process_time() - began
            gc.enable()
            slowest = max(slowest, took)
        if took > MOST:
            raise TooSlow(f"{took:.2f} s")

    watched = dataclasses.replace(tried, check=check)
    began = time.monotonic()
    failure = None
    while failure is None and time.monotonic() - began < seconds:
        try:
            watched.hold(ROUND, of=seed)
        except Exception as error:  # whatever it is, it is what was looked for
            notes = " ".join([str(error), *getattr(error, "__notes__", ())])
            failure = f"seed {seed}: {type(error).__name__}: {notes[:2000]}"
        seed += 1
    spent = round(time.monotonic() - began, 1)
    return {"inputs": inputs, "seconds": spent, "slowest_s": round(slowest, 3), "failure": failure}


def files(most: float) -> dict[str, Any]:
    """How long each real file takes; those that don't parse here are counted apart."""
    took, unread, began = [], 0, time.monotonic()
    found = dict.fromkeys([*test_properties.real_files(), *python_texts.standard_library(tests=True)])
    for file in sorted(found, key=lambda file: -file.stat().st_size):  # whatever time allows: the largest
        if time.monotonic() - began > most:
            break
        lex.cache_clear()
        gc.disable()
        start = time.process_time()
        try:
            whole(file)
        except (SyntaxError, ValueError, LookupError):
            unread += 1
        took.append((time.process_time() - start, file))
        gc.enable()
    took.sort(reverse=True)
    slow = [{"file": "/".join(f.parts[-3:]), "bytes": f.stat().st_size, "seconds": round(s, 3)} for s, f in took[:5]]
    over = sum(seconds > MOST for seconds, _ in took)
    return {"files": len(took), "of": len(found), "not_python": unread, "over_1_s": over, "slowest": slow}


def whole(file: Path) -> None:
    """What a reversal of the module's last statement takes, with nothing remembered."""
    text = Source.decode(file.read_bytes(), "python").text
    outline.definitions.__wrapped__(text)
    edit = Edit("unfix_was_here = 1", "unfix_was_here = 2")
    text += "\nunfix_was_here = 1\n"
    try:
        apply(text, [Change(edit, ((0, len(text)),))])
    except RottedError as error:
        raise SyntaxError(str(error)) from None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="for all properties together (600)")
    parser.add_argument("--file-seconds", type=float, default=600.0, help="for the real files, at most (600)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="properties with this in their names")
    parser.add_argument("--json", type=Path, default=ROOT / "results" / "fuzz.json")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    names = [name for name in PROPERTIES if options.only in name]
    say: Callable[[str], None] = lambda line: print(line, flush=True)  # noqa: E731
    warnings.simplefilter("ignore", SyntaxWarning)  # of what the inputs say
    real = files(options.file_seconds)
    say(f"{real['files']} real files, {real['over_1_s']} over {MOST} s; slowest {real['slowest'][:1]}")
    for name in names:
        found = results[name] = fuzz(PROPERTIES[name], options.seconds / len(names), options.seed * 1_000_000)
        say(f"{name:52} {found['inputs']:7} inputs  slowest {found['slowest_s']:.3f} s  {found['failure'] or 'held'}")
    failures = sum(found["failure"] is not None for found in results.values())
    totals = {
        "inputs": sum(found["inputs"] for found in results.values()),
        "seconds": round(sum(found["seconds"] for found in results.values()), 1),
        "failures": failures,
    }
    record.save(options.json, "cpu", {"seed": options.seed, "totals": totals, "properties": results, "files": real})
    return int(failures > 0 or real["over_1_s"] > 0)


if __name__ == "__main__":
    sys.exit(main())
