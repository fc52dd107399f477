"""A leg on SGLang's own classes, beside a bare fork: `python benchmarks/isolation_sglang.py RELEASE [--device cuda]`.

    bare            as in isolation.py: a fork of a process that has torch loaded, and on a GPU makes a context
    nothing, first  a leg that does nothing, and before it what happens once for a selection: its overlay is found, and
                    a server imports SGLang from there
    nothing         ten more of these, one right after the other, each in a process of its own
    draft           the same with a real leg: draft kv_indices by SGLang's backend, topk 8, 5 steps, a context of 4096

The release's light environment must be there (`unfix upstream install RELEASE`). A line is printed, and
results/isolation-sglang-DEVICE.json written, as soon as each is measured.
"""

from __future__ import annotations

import argparse
import functools
import os

import isolation
import record

from harness import code_base, fixes, overlay
from harness.device import resolve_device
from harness.prover import Prover
from harness.sandbox import Sandbox

ROOT = record.ROOT
OUT = "27338:capacity-assert"  # what is out: a guard, which a batch that fits does not miss


def measure(log: isolation.Log, device: str, release: str) -> None:
    target = code_base.sglang(release)
    with Prover(fixes.load(ROOT / "toggles"), device=device, root=ROOT, target=target) as prover:
        path = [str(overlay.build(prover.edits([OUT]))), *prover.path, str(ROOT / "benchmarks")]
    log.note("bare", lambda: isolation.bares(device, 8))
    with Sandbox(device, target.preload, path) as sandbox:
        for name, request in isolation.requests(device, target.name, path).items():
            log.note(f"{name}, first", functools.partial(isolation.many, sandbox, request, 1))
            log.note(name, functools.partial(isolation.many, sandbox, request, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release")
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args()
    device = resolve_device(asked.device)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # nothing before a fork may initialise CUDA
    import torch  # noqa: F401

    log = isolation.Log(ROOT / "results" / f"isolation-sglang-{device}.json")
    measure(log, device, asked.release)
    found = isolation.ratios(log.found)
    for name, ratio in found.items():
        print(f"{name:34} {ratio:8}")
    record.save(log.path, device, {"release": asked.release, "out": OUT, "figures": log.found, "ratios": found})


if __name__ == "__main__":
    main()
