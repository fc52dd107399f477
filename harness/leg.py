"""What runs inside a leg's throwaway process: one case, watched, and a report of what was seen.

This side imports the standard library and torch only, so that a leg costs a fork and no imports. It judges nothing: it
writes facts, and :mod:`harness.outcome` reads them.

A leg's directory holds ``request.json`` (in), ``reached`` (a line for each reverted target, written as it is entered),
``read`` (where it is asked for: the files that it reads), ``stdout``, ``stderr`` and ``report.json`` (out; absent when
the process died).
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import importlib
import json
import resource
import signal
import sys
import time
import traceback
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from harness import reads


class WrongValues(Exception):
    """A result that differs from the reference; the message names the tensor and the first difference.

    ``facts``: what the leg would have returned.
    """

    def __init__(self, message: str, facts: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.facts = facts or {}


def run_directory(directory: str, own: Collection[Path] | None = None) -> str:
    """Run the leg that ``request.json`` describes and write ``report.json``, whole or not at all. Its SHA-256.

    ``own``: as `harness.reach.Reach` has it, in a process that ran other legs.
    """
    brace()
    folder = Path(directory)
    request = json.loads((folder / "request.json").read_text())
    if roots := request.get("roots"):
        reads.log(folder / "read", roots)
    with open(folder / "reached", "a", encoding="utf-8", buffering=1) as marks:
        report = run(request, lambda name: print(name, file=marks), own)
    part = folder / "report.json.part"
    written = _written(report)
    part.write_bytes(written)
    part.rename(folder / "report.json")
    return hashlib.sha256(written).hexdigest()


def _written(report: dict[str, Any]) -> bytes:
    try:
        return json.dumps(report).encode()
    except (TypeError, ValueError, RecursionError) as error:  # what the code under test returned
        return json.dumps({**report, "facts": {}, "raised": report["raised"] or _describe(error)}).encode()


def brace() -> None:
    """A fault ends this process by its own signal, without a core, and names the Python function that it was in."""
    faulthandler.disable()
    for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL):
        signal.signal(number, signal.SIG_DFL)  # a preloaded library's handler would run on, and may die otherwise
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # legs die on purpose


def run(
    request: dict[str, Any], record: Any = lambda name: None, own: Collection[Path] | None = None
) -> dict[str, Any]:
    """Run one leg in this process. Returns ``{"raised", "wrong", "hits", "facts", "watched", "seconds"}``.

    ``watched`` is how many allocations the detector saw: where it saw none, no hits say nothing. ``seconds`` has how
    long it took to import the code under test, to run it, and to check memory.
    """
    import torch

    from harness import memory
    from harness.reach import Reach, Target

    laps = _Laps()
    torch.set_num_threads(1)  # libgomp's pool does not survive a fork, and legs already run side by side
    report: dict[str, Any] = {"raised": None, "wrong": None, "hits": [], "facts": {}, "watched": 0}
    detector = memory.DETECTORS[request["detector"]](zone_bytes=request["zone_bytes"])
    with Reach([Target(**target) for target in request["targets"]], record, own):
        try:
            module, _, name = request["entry"].partition(":")
            entry = getattr(importlib.import_module(module), name)
            laps.end("import")
            with detector:
                try:
                    report["facts"] = entry(request["params"], request["device"]) or {}
                except WrongValues as error:
                    report["wrong"], report["facts"] = str(error), error.facts
                if request["device"] == "cuda":
                    torch.cuda.synchronize()  # a leg is not clean before the device says so
        except (Exception, SystemExit) as error:  # code under test that exits has failed like any other
            report["raised"] = _describe(error)
        laps.end("run")
        report["watched"] = len(detector.allocations)
        with _or_keep_first(report):
            report["hits"] = [hit.as_dict() for hit in detector.check()]
    laps.end("check")
    return {**report, "seconds": laps}


class _Laps(dict[str, float]):
    """Seconds from the end of one phase to the end of the next."""

    def __init__(self) -> None:
        super().__init__()
        self._from = time.monotonic()

    def end(self, phase: str) -> None:
        now = time.monotonic()
        self[phase], self._from = round(now - self._from, 6), now


@contextlib.contextmanager
def _or_keep_first(report: dict[str, Any]) -> Iterator[None]:
    """After a device error every later device call fails, too: the first error is the one that says why."""
    try:
        yield
    except Exception as error:
        report["raised"] = report["raised"] or _describe(error)


def _describe(error: BaseException) -> dict[str, str]:
    frames = traceback.extract_tb(error.__traceback__)
    return {
        "type": type(error).__name__,
        "message": str(error),
        "where": f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "",
        "trace": "".join(traceback.format_exception(error))[-8000:],
    }


def environment(params: dict[str, Any], device: str) -> dict[str, Any]:
    """A leg's entry that reports the versions and the device which the legs beside it run on."""
    import platform

    import torch

    versions: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    for name in ("triton", "flashinfer"):
        loaded = sys.modules.get(name)
        versions[name] = getattr(loaded, "__version__", None) if loaded else None
    on_gpu = device == "cuda" and torch.cuda.is_available()
    if on_gpu:
        torch.cuda.init()  # the name of the device itself, and not what a fork server was told of it
    versions["device"] = torch.cuda.get_device_name() if on_gpu else "cpu"
    versions["cuda"] = torch.version.cuda if on_gpu else None
    versions["usable"] = on_gpu or device == "cpu"
    return versions


if __name__ == "__main__":
    run_directory(sys.argv[1])
