"""The GPU matrix on one GPU and on several of one host: the same verdicts, no context where none belongs, the speed-up.

    python benchmarks/many_gpus.py [SEL…] [--jobs N…] [--json results/h200-x2.json]

Runs `unfix run --device cuda` once for each value of CUDA_VISIBLE_DEVICES: the last GPU alone (a context on device 0
would be a stray one), all of them, and all in reverse; then, for each further N, the first two with so many workers a
GPU. Meanwhile NVML is asked which GPUs have a context. A run before them builds what is compiled at first use. Needs
these GPUs for itself: a context that is there before ends it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from harness import device  # noqa: E402
from harness.commit import commit  # noqa: E402

WARM_UP = ["27338:topk-factor", "27460:topk-factor", "27486:slot-assert"]  # FlashInfer's modules, the store kernel's


class Observer(threading.Thread):
    """Looks 20 times a second: the most contexts that each GPU had, by its index, and when a run's verdicts came."""

    def __init__(self, log: Path) -> None:
        """``log``: where the run writes a line for each verdict."""
        super().__init__(daemon=True)
        self._log, self._since = log, time.monotonic()
        self.verdicts: list[tuple[float, int]] = []  # seconds from the start, verdicts by then
        self._nvml, self._done = ctypes.CDLL("libnvidia-ml.so.1"), threading.Event()
        self._nvml.nvmlInit_v2()
        self.most = [0] * len(device.uuids())
        self.asked = 0

    def contexts(self) -> list[int]:
        return [self._count(index) for index in range(len(self.most))]

    def _count(self, index: int) -> int:
        handle, count = ctypes.c_void_p(), ctypes.c_uint(0)
        self._nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
        # without room for an answer, it says how many there are
        self._nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), None)
        return count.value

    def run(self) -> None:
        while not self._done.wait(0.05):
            self.most = [max(pair) for pair in zip(self.most, self.contexts(), strict=True)]
            self.asked += 1
            found = self._log.read_bytes().count(b'{"result"') if self._log.exists() else 0
            if found and (not self.verdicts or found > self.verdicts[-1][1]):
                self.verdicts.append((round(time.monotonic() - self._since, 1), found))

    def quarters(self) -> list[float]:
        """When the first verdict came, a quarter of them, half, three quarters and all; [] where none came."""
        parts = range(5) if self.verdicts else ()
        return [next(at for at, found in self.verdicts if 4 * found >= part * self.verdicts[-1][1]) for part in parts]

    def stop(self) -> None:
        self._done.set()
        self.join()


def matrix(visible: str, select: list[str], jobs: int) -> dict[str, Any]:
    """One run: its wall time, its cases' verdicts, and where contexts were."""
    with tempfile.TemporaryDirectory() as scratch:
        out, log = Path(scratch, "matrix.json"), Path(scratch, "matrix.jsonl")
        observer = Observer(log)
        if any(observer.contexts()):
            sys.exit("something else has a context on one of these GPUs")
        observer.start()
        command = [sys.executable, "-m", "harness.cli", "run", *select, "--device", "cuda", "--jobs", str(jobs)]
        command += ["--json", str(out), "--jsonl", str(log)]
        env = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": visible,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]),
        }
        started = time.monotonic()
        ended = subprocess.run(command, cwd=ROOT, env=env, stdout=2, check=False)
        wall = time.monotonic() - started
        observer.stop()
        document = json.loads(out.read_text())
    legs = [leg for row in document["results"] for leg in row["legs"]]
    return {
        "visible": visible, "jobs": jobs, "wall_seconds": round(wall, 1), "exit": ended.returncode,
        "verdict_seconds": observer.quarters(),
        "cases": len(document["results"]), "verdicts": document["verdicts"], "environment": document["environment"],
        "most_contexts": observer.most, "times_asked": observer.asked,
        "by_test": {row["test"]: [row["verdict"], *map(_outcome, row["legs"])] for row in document["results"]},
        "leg_seconds": round(sum(leg.get("seconds", 0) for leg in legs), 1),
        "legs": len(legs), "legs_with_a_context_of_their_own": sum(not leg.get("shared") for leg in legs),
    }  # fmt: skip


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("select", nargs="*", help="fixes; all without")
    asked.add_argument("--jobs", type=int, nargs="+", default=[8], help="workers a GPU")
    asked.add_argument("--json", type=Path)
    options = asked.parse_args()
    every = [str(index) for index in range(len(device.uuids()))]
    if len(every) < 2:
        sys.exit("this needs two GPUs or more")
    matrix(",".join(every), WARM_UP, options.jobs[0] * len(every))
    lists = [every[-1], ",".join(every), ",".join(reversed(every))]
    runs: list[dict[str, Any]] = []
    for jobs in options.jobs:
        for each in lists if jobs == options.jobs[0] else lists[:2]:
            runs.append({"workers_a_gpu": jobs, **matrix(each, options.select, jobs * (each.count(",") + 1))})
            found = compared(runs, every)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    shown = [{**run, "environment": None, "by_test": None} for run in found["runs"]]
    print(json.dumps({**found, "runs": shown}, indent=1))


def compared(runs: list[dict[str, Any]], every: list[str]) -> dict[str, Any]:
    """Every run beside the first, and the time of those on more GPUs beside that of one with as many workers on each.

    What each case did is kept of the first run, and of the others where it differs.
    """
    first = runs[0]
    alone = {run["workers_a_gpu"]: run["wall_seconds"] for run in runs if run["visible"] == first["visible"]}
    for run in runs:
        run["speed_up"] = round(alone[run["workers_a_gpu"]] / run["wall_seconds"], 2)
        run["cases_that_differ"] = _differing(first["by_test"], run["by_test"])
        strays = {index: run["most_contexts"][int(index)] for index in every if index not in run["visible"].split(",")}
        run["most_contexts_where_none_belongs"] = strays
    return {
        "command": " ".join(["python", *sys.argv]), "commit": commit(ROOT), "gpus": len(every),
        "runs": [first, *({**run, "by_test": None} for run in runs[1:])],
    }  # fmt: skip


def _outcome(leg: dict[str, Any]) -> str:
    return str(leg["outcome"])


def _differing(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {test: [one.get(test), other.get(test)] for test in {**one, **other} if one.get(test) != other.get(test)}


if __name__ == "__main__":
    main()
