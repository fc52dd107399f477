"""What detectors cost: `python benchmarks/detectors.py [--device cuda] [--rounds N]`, and `--sanitizer`.

    legs       a draft leg of topk 8, 8 steps and a context of 4096 under each detector and under none, in turn. As
               ratios to none: of the whole leg, and of what runs in its process (the case and the check of memory).
    int32      each case whose rows need gigabytes, with the fix in or out as it allocates them: seconds of the leg and
               the memory of its tensors; on a GPU also with all of every row backed by memory, as a plain buffer is.
               A CPU backs what is touched in any case.

Prints tables and writes results/detectors-DEVICE.json (--json for another place). `--sanitizer` is another table: which
overflows compute-sanitizer and Triton's debug mode see. See benchmarks/sanitizer.py.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

import record  # noqa: E402
import sanitizer  # noqa: E402

from harness import fixes, overlay  # noqa: E402
from harness.case import Case  # noqa: E402
from harness.device import resolve_device  # noqa: E402
from harness.prover import Prover  # noqa: E402
from harness.sandbox import Request, Sandbox  # noqa: E402
from regressions import test_27486, test_own  # noqa: E402
from regressions.scenarios import draft  # noqa: E402

PATH = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks")]
DETECTORS = ("none", "red-zone", "guard-page", "poison")
TARGETS = {"red zone": 1.05, "bytes": 64 << 20, "seconds": 1.0}


def shape(device: str) -> dict[str, Any]:
    lens = [4088 if device == "cuda" else 60] * 8  # Triton's interpreter takes a while
    return {"topk": 8, "num_steps": 8, "max_bs": 8, "max_context_len": 4096, "seq_lens": lens}


def legs(device: str, rounds: int) -> dict[str, Any]:
    """Seconds of each leg under each detector, in turn, and the ratios to none."""
    case = draft.case("27338:topk-factor", **shape(device))
    wanted = {
        name: Request(
            case.entry.replace("{target}", "eagle_kv"), case.params, device, PATH,
            detector=name, zone_bytes=case.zone_bytes, timeout=600,
        )
        for name in DETECTORS
    }  # fmt: skip
    seen: dict[str, dict[str, list[float]]] = {name: {"leg": [], "inside": []} for name in DETECTORS}
    watched = {}
    with Sandbox(device) as sandbox:
        for at in range(-1, rounds):
            for name, request in wanted.items():
                ending = sandbox.run(request)
                sandbox.settle()
                if not ending.report or ending.report["raised"] or ending.report["wrong"] or ending.report["hits"]:
                    raise SystemExit(f"the leg under {name} is not clean: {ending}")
                watched[name] = ending.report["watched"]
                if at >= 0:  # the first round builds what is built once
                    inside = ending.report["seconds"]
                    seen[name]["leg"].append(ending.seconds)
                    seen[name]["inside"].append(round(inside["run"] + inside["check"], 5))
    ratios = {
        name: {what: record.ratio(seen[name][what], seen["none"][what]) for what in ("leg", "inside")}
        for name in DETECTORS[1:]
    }
    return {"case": case.id, "zone_bytes": case.zone_bytes, "watched": watched, "seconds": seen, "ratios": ratios}


def int32(device: str, rounds: int) -> Iterator[dict[str, Any]]:
    """For each case the median seconds of the leg and the bytes that its tensors took, sparse and plain."""
    cases = [("own:int32-rows", each) for each in test_own.wide_rows(device)]
    cases += [("27486:int32-guard", each) for each in test_27486.widths(device)]
    with Prover(fixes.load(ROOT / "toggles"), device=device, root=ROOT) as prover, Sandbox(device) as sandbox:
        for fix, case in cases:
            if case.needs_cuda and device != "cuda":
                continue
            out = [fix] if case.on == "guarded" else []  # a guard refuses the rows before they are made
            tree = overlay.build(prover.edits(out))
            found: dict[str, Any] = {"fix": fix, "case": case.id, "out": out, "plain_bytes": _plain_bytes(case)}
            for how in ("sparse", "plain") if device == "cuda" else ("sparse",):
                found[how] = _measured(sandbox, case, [str(tree)] if tree else [], how == "plain", rounds)
            yield found


def _plain_bytes(case: Case) -> int:
    made = draft.Shape(**case.params)
    return made.num_steps * made.wide * (8 if made.backend == "triton" else 4)


def _measured(sandbox: Sandbox, case: Case, tree: list[str], dense: bool, rounds: int) -> dict[str, Any]:
    params = {"entry": case.entry.replace("{target}", "eagle_kv"), "params": case.params, "dense": dense}
    path = [*tree, *PATH]
    request = Request(
        "detector_legs:measured", params, sandbox.device, path, detector="guard-page", zone_bytes=case.zone_bytes,
        timeout=600,
    )  # fmt: skip
    seconds, taken = [], 0
    for at in range(0 if dense else -1, rounds):  # what is built once was, by the sparse ones
        ending = sandbox.run(request)
        sandbox.settle()
        if not ending.report or ending.report["raised"]:
            return {"failed": (ending.report or {}).get("raised") or ending.signal}
        taken = max(taken, ending.report["facts"]["bytes"])
        if at >= 0:
            seconds.append(ending.seconds)
    return {"seconds": round(median(seconds), 4), "bytes": taken, "wrong": ending.report["facts"]["wrong"]}


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--device", default="auto")
    arguments.add_argument("--rounds", type=int, default=10)
    arguments.add_argument("--sanitizer", action="store_true")
    arguments.add_argument("--jobs", type=int, default=1, help="of --sanitizer: runs side by side; memory needs one")
    arguments.add_argument("--only", default="", help="of --sanitizer: rows whose name has this in it")
    arguments.add_argument("--json", type=Path)
    asked = arguments.parse_args()
    device = resolve_device(asked.device)
    name = "sanitizer" if asked.sanitizer else "detectors"
    to = asked.json or ROOT / "results" / f"{name}-{device}.json"
    if asked.sanitizer:
        for rows in sanitizer.tables(device, asked.jobs, asked.only):
            record.save(to, device, {"tools": sanitizer.versions(), "rows": rows})
        sanitizer.show(rows)
        return 0
    found = legs(device, asked.rounds)
    print(f"{found['case']}, {found['watched']['red-zone']} tensors, zones of {found['zone_bytes']} bytes")
    for detector, ratios in found["ratios"].items():
        print(f"{detector:12} leg {record.shown(ratios['leg'])}   inside {record.shown(ratios['inside'])}")
    rows: list[dict[str, Any]] = []
    figures = {"targets": TARGETS, "legs": found, "int32": rows}
    record.save(to, device, figures)
    for row in int32(device, max(1, asked.rounds // 3)):
        rows.append(row)
        record.save(to, device, figures)
        shown = "".join(f"   {how}: {_shown(row[how])}" for how in ("sparse", "plain") if how in row)
        print(f"{row['case'][:70]:70} {row['plain_bytes'] / 1e9:5.1f} GB{shown}")
    return 0


def _shown(found: dict[str, Any]) -> str:
    with contextlib.suppress(KeyError):
        return f"{found['seconds']:.3f} s, {found['bytes'] / (1 << 20):.0f} MiB"
    return f"failed: {found['failed']}"


if __name__ == "__main__":
    sys.exit(main())
