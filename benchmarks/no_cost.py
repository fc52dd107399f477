"""With nothing taken out the harness costs nothing: `python benchmarks/no_cost.py [--device cuda] [--release V]`.

    compiled   every Triton kernel at every stage, and the store kernel's builds, in a leg and in a Python that has no
               harness on its path: the same bytes? Without a GPU, for sm_90.
    launched   on a GPU: what a draft round and a store compile as they are launched, in a leg with and without a red
               zone, and without the harness: the same bytes?
    imports    seconds to import the code under test, with torch and triton there: under `unfix exec` with nothing out,
               and in a plain Python, in turn. As ratios: median, and where 8 of 10 lie. "plain / plain" is the noise.
               With --release, SGLang's draft backends, too, from that release's light environment.

Prints a table and writes results/no-cost-DEVICE.json (--json for another place). Exit code 1 where bytes differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

import record  # noqa: E402

from harness import auditfile, lightenv  # noqa: E402
from harness.device import resolve_device  # noqa: E402
from harness.sandbox import Request, Sandbox  # noqa: E402

LEGS = ROOT / "benchmarks" / "no_cost_legs.py"
PATH = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks")]
SHAPE = {"topk": 8, "num_steps": 5, "max_bs": 8, "max_context_len": 4096, "page_size": 1}
MODULES = {
    "eagle_kv": ["eagle_kv.backends", "eagle_kv.store", "eagle_kv.draft_loop"],
    "sglang": ["sglang.srt.layers.attention.flashinfer_backend", "sglang.srt.speculative.spec_utils"],
}


def plain(entry: str, params: dict[str, Any], device: str, *, under: tuple[str, ...] = (), path: str = "") -> Any:
    """The answer of an entry of no_cost_legs.py in a Python of its own, started by ``under``."""
    command = [*under, sys.executable, str(LEGS), entry, json.dumps(params), device]
    inherited = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each not in ("", str(ROOT))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([path or str(ROOT / "kernels"), *inherited])}
    return json.loads(subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])


def leg(sandbox: Sandbox, entry: str, params: dict[str, Any], device: str, detector: str) -> Any:
    request = Request(f"no_cost_legs:{entry}", params, device, PATH, detector=detector, timeout=600)
    report = sandbox.run(request).report
    if not report or report["raised"]:
        raise SystemExit(f"{entry} failed in a leg: {report and report['raised']['trace']}")
    return report["facts"]


def same_bytes(device: str) -> dict[str, dict[str, Any]]:
    """For each comparison how many files were compiled, and those that differ."""
    chosen = auditfile.load(ROOT / "audits" / "eagle_kv.yaml").choose(ROOT / "kernels")
    kernels = [(build.target, build.arguments) for kernel in chosen for build in kernel.builds.values()]
    found = {}
    with tempfile.TemporaryDirectory() as folder, Sandbox("cuda") as sandbox:  # a CPU's server would interpret
        params = {"cache": f"{folder}/caches", "kernels": kernels, "stores": ["cpu", "cuda"], "shape": SHAPE}
        found["compiled"] = _differing(
            plain("compiled", params, device), leg(sandbox, "compiled", params, "cpu", "none")
        )
        if device == "cuda":
            without = plain("launched", params, device)
            for detector in ("none", "red-zone"):
                under = leg(sandbox, "launched", params, device, detector)
                found[f"launched, detector {detector}"] = _differing(without, under)
    return found


def _differing(without: dict[str, str], under: dict[str, str]) -> dict[str, Any]:
    names = sorted({**without, **under})
    return {"files": len(names), "differ": [name for name in names if without.get(name) != under.get(name)]}


def imports(name: str, path: list[str], rounds: int) -> dict[str, Any]:
    """Seconds to import ``name``'s modules, in turn."""
    params, where = {"modules": MODULES[name]}, os.pathsep.join(path)
    seconds: dict[str, list[float]] = {"plain": [], "under unfix exec": [], "plain again": []}
    nothing_out = (sys.executable, "-m", "harness.cli", "exec", "--")
    for at in range(-1, rounds):
        for how, found in seconds.items():
            under = nothing_out if how == "under unfix exec" else ()
            answer = plain("imported", params, "cpu", under=under, path=where)
            if at >= 0:  # the first round compiles to .pyc files
                found.append(round(answer["seconds"], 4))
    return {
        "seconds": seconds,
        "under unfix exec / plain": record.ratio(seconds["under unfix exec"], seconds["plain"]),
        "plain / plain": record.ratio(seconds["plain again"], seconds["plain"]),
    }


def main() -> int:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--device", default="auto")
    arguments.add_argument("--release", help="of SGLang, installed by `unfix upstream install`")
    arguments.add_argument("--rounds", type=int, default=10, help="of imports; 1: none")
    arguments.add_argument("--json", type=Path)
    asked = arguments.parse_args()
    device = resolve_device(asked.device)
    compared = same_bytes(device)
    for name, found in compared.items():
        print(f"{name:30} {found['files']:4} files, {len(found['differ'])} differ {' '.join(found['differ'][:3])}")
    figures: dict[str, Any] = {"same_bytes": compared}
    to = asked.json or ROOT / "results" / f"no-cost-{device}.json"
    record.save(to, device, figures)
    paths = {"eagle_kv": [str(ROOT / "kernels")], **({"sglang": lightenv.path(asked.release)} if asked.release else {})}
    for name, path in paths.items() if asked.rounds > 1 else ():
        found = figures[f"imports {name}"] = imports(name, path, asked.rounds)
        for pair in ("under unfix exec / plain", "plain / plain"):
            print(f"imports {name:10} {pair:25} {record.shown(found[pair])}")
        record.save(to, device, figures)
    return int(any(found["differ"] for found in compared.values()))


if __name__ == "__main__":
    sys.exit(main())
