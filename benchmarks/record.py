"""What every benchmark's JSON has besides its figures, and how a ratio and its spread are worked out."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def ratio(one: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """How many times ``other`` ``one`` is, both measured in turn: of the pairs the median, and 8 of 10 lie between
    ``low`` and ``high``. Two values at least."""
    pairs = [a / b for a, b in zip(one, other, strict=True)]
    tenths = quantiles(pairs, n=10, method="inclusive")
    return {"median": round(median(pairs), 4), "low": round(tenths[0], 4), "high": round(tenths[-1], 4)}


def shown(found: dict[str, float]) -> str:
    return f"{found['median']:.3f} ({found['low']:.3f} to {found['high']:.3f})"


def environment(device: str) -> dict[str, Any]:
    """Versions, the machine and the checkout. On ``cuda`` it makes a context: to be called last."""
    versions: dict[str, Any] = {"python": platform.python_version(), "machine": platform.machine()}
    for name in ("torch", "triton", "flashinfer-python", "sglang"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    if device == "cuda":
        import torch

        versions |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    else:
        versions["device"] = "cpu"
    return {**versions, "cores": len(os.sched_getaffinity(0)), **made_of()}


def made_of() -> dict[str, Any]:
    """The checkout: its commit, None where there is none, and the digest of what ran."""
    from harness.code_base import eagle_kv
    from harness.commit import commit, digest

    return {"commit": commit(ROOT), "sources": digest(ROOT, eagle_kv(ROOT))}


def save(path: Path, device: str, figures: dict[str, Any]) -> None:
    """Write them with the command that found them, and say where."""
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    document = {"schema_version": 1, "command": command, "environment": environment(device), **figures}
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"benchmark: wrote {path}", file=sys.stderr)
