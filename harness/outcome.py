"""An outcome: what one leg did, read off how its process ended.

    clean      ran, every value equal to the reference, nothing written outside
    guarded    the guard that was meant to stop it did, before any stray write
    overflow   wrote outside of a buffer
    wrong      a value differs from the reference
    crashed    killed by a signal, or a device error
    hung       did not end in time
    error      raised anything else

A guard that fires after the write is no guard: a stray write makes a leg ``overflow`` whatever was raised next.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.sandbox import Ending

# what torch and the driver call an error of the device itself
_DEVICE_ERROR = re.compile(r"CUDA error|device-side assert|illegal memory access|CUDA_ERROR_|cudaError", re.I)
# not a fact about the code under test: the machine could not run it
_INFRA_TYPES = {"OutOfMemoryError", "MemoryError", "ToolchainError", "ModuleNotFoundError", "PermissionError"}
_INFRA_TEXT = re.compile(
    r"CUDA out of memory|can't allocate memory|No space left on device|CUDA_ERROR_OUT_OF_MEMORY"
    r"|CUDA error: (out of memory|no kernel image|initialization error|all CUDA-capable devices are busy)"
)
# sent from outside: by a user, a scheduler, a limit
_INFRA_SIGNALS = {"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGXCPU", "SIGXFSZ"}


@dataclass(frozen=True)
class Leg:
    """One leg: what was reverted, and what came of it."""

    reverted: tuple[str, ...]
    outcome: str
    seconds: float
    error: str = ""  # one line, for a reader
    evidence: str = ""  # everything that a declared reason is searched in
    overflow: dict[str, Any] | None = None
    reached: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    infra: str = ""  # why the machine, and not the code under test, is at fault
    facts: dict[str, Any] = field(default_factory=dict)
    trace: str = ""
    shared: bool = False  # it ran in a process in which others did

    def as_dict(self, trace: bool = False) -> dict[str, Any]:
        """The leg as the JSON contract has it; empty fields left out.

        ``trace``: with what it printed as it failed, which of every leg would be most of a matrix.
        """
        row: dict[str, Any] = {"reverted": list(self.reverted), "outcome": self.outcome, "seconds": self.seconds}
        more = {"error": self.error, "overflow": self.overflow, "facts": self.facts, "shared": self.shared}
        more["trace"] = trace and self.trace
        return row | {name: value for name, value in more.items() if value}


def read(
    ending: Ending,
    *,
    reverted: Sequence[str],
    guards: Sequence[str],
    detector: str,
    predicted: int | None,
    targets: Sequence[str],
) -> Leg:
    """The leg that an ending amounts to. ``guards``: regexes of what the registered guards say when they fire."""
    report = ending.report or {}
    raised, hits = report.get("raised"), report.get("hits", [])
    error, infra = _error(ending)
    said = "\n".join(filter(None, [error, (raised or {}).get("message", ""), report.get("wrong") or "", ending.stderr]))
    guarded = bool(ending.signal or raised) and any(re.search(guard, said) for guard in guards)
    if ending.timed_out:
        outcome = "hung"
    elif hits and not (raised and detector == "victim"):  # a victim is there to show what the stray write leads to
        outcome = "overflow"
    elif guarded:
        outcome = "guarded"
    elif ending.signal or (raised and _DEVICE_ERROR.search(f"{raised['type']}: {raised['message']}")):
        outcome = "crashed"
    elif raised or not ending.report:
        outcome = "error"
    else:
        outcome = "wrong" if report["wrong"] else "clean"
    if outcome == "clean" and detector != "none" and not report.get("watched", 1):
        outcome, error = "error", f"the {detector} detector watched no allocation: clean would mean nothing"
    overflow = _overflow(hits, detector, predicted) if hits else None
    return Leg(
        reverted=tuple(reverted),
        outcome=outcome,
        seconds=ending.seconds,
        error=error,
        evidence="\n".join([said, *(str(hit) for hit in hits)]),
        overflow=overflow,
        reached=ending.reached,
        targets=tuple(targets),
        infra=infra,
        facts=report.get("facts", {}),
        trace=(raised or {}).get("trace", "") or ending.stderr[-4000:],
        shared=ending.shared,
    )


def _error(ending: Ending) -> tuple[str, str]:
    """One line that says what went wrong, and the same line again where it is the machine's fault."""
    report = ending.report or {}
    if ending.timed_out:
        return f"did not end within {ending.seconds:.0f} s", ""
    if ending.signal:
        line = f"{ending.signal}{_last_words(ending.stderr)}"
        return line, line if ending.signal in _INFRA_SIGNALS else ""
    if raised := report.get("raised"):
        first = (raised["message"].strip().splitlines() or [""])[0]
        line = f"{raised['type']}: {first}" + (_assertion(ending.stderr) if "device-side assert" in first else "")
        infra = raised["type"] in _INFRA_TYPES or _INFRA_TEXT.search(raised["message"])
        return line, line if infra else ""
    if not ending.report:
        line = f"exit {ending.exit_code} without a report{_last_words(ending.stderr)}"
        return line, line
    return report["wrong"] or "", ""


def _assertion(stderr: str) -> str:
    found = re.search(r"Assertion .*failed\.?", stderr)
    return f" ({found.group(0)})" if found else ""


def _last_words(stderr: str) -> str:
    """Which assertion, or which Python function, a dying process named."""
    # faulthandler prints the innermost frame first; a library's own frames say less than the code that called it
    frames = re.findall(r'File "([^"]*)", line \d+ in (\w+)', stderr)
    own = [name for file, name in frames if "/site-packages/" not in file and "/lib/python" not in file]
    return _assertion(stderr) or "".join(f" in {name}" for name in (own or [name for _, name in frames])[:1])


def _overflow(hits: list[dict[str, Any]], detector: str, predicted: int | None) -> dict[str, Any]:
    """The hits of one leg as the JSON contract has them: counts added up over all buffers, the outermost offsets."""
    return {
        "side": "/".join(sorted({hit["side"] for hit in hits})),
        "predicted_elements": predicted,
        "observed_elements": sum(hit["elements"] for hit in hits),
        "first_offset_bytes": min(hit["first_offset_bytes"] for hit in hits),
        "last_offset_bytes": max(hit["last_offset_bytes"] for hit in hits),
        "detector": detector,
        **({"lower_bound": True} if any(hit.get("lower_bound") for hit in hits) else {}),
        "buffers": [_buffer(hit["allocation"]) for hit in hits],
        "hits": [_hit(hit) for hit in hits],
        "values": [value for hit in hits for value in hit["values"]][:8],
    }


def _buffer(allocation: dict[str, Any]) -> str:
    """``(5, 32768) int32 at base.py:91: self.cuda_graph_kv_indices = torch.zeros(``."""
    site = allocation["site"].rpartition("/")[2]
    return f"{tuple(allocation['shape'])} {allocation['dtype']} at {site}: {allocation['label']}"


def _hit(hit: dict[str, Any]) -> dict[str, Any]:
    """One hit, in one buffer: what a picture of it needs."""
    kept = {key: hit[key] for key in ("side", "elements", "first_offset_bytes", "last_offset_bytes")}
    return kept | {key: hit["allocation"][key] for key in ("shape", "dtype")}
