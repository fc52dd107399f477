"""Faults of a leg on a GPU: a kernel that never ends, asserts or strays, memory that runs out, a death that held some.

Each is one ending, said in one line; its process is gone, the GPU's memory is free again, and the next leg computes.
On a CPU, `test_faults_leg.py` has what corresponds.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
import torch

from harness import outcome
from harness.sandbox import Request, Sandbox

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

HELD = 2 << 30  # bytes of device memory that a leg holds as its fault comes
GIVEN_BACK = 120.0  # seconds that only a driver which hangs takes for that
LEGS = f"""
import os, signal

import torch
import triton
import triton.language as tl

@triton.jit
def store_far_away(buffer, offset):
    tl.store(buffer + offset, 1)

def computes(params, device):
    numbers = torch.arange(1000, device=device)
    assert int(numbers.sum()) == 499500
    return {{"free": torch.cuda.mem_get_info()[0]}}

def fault(params, device):
    held = torch.ones({HELD}, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    with open(params["note"], "w") as note: note.write(str(os.getpid()))
    globals()[params["fault"]](device)

def hangs(device): torch.cuda._sleep(1 << 62)
def hangs_and_waits(device):
    torch.cuda._sleep(1 << 62)
    torch.cuda.synchronize()
def asserts(device): torch.zeros(3, device=device)[torch.tensor([5], device=device)].sum().item()
def asserts_unnoticed(device): torch.zeros(3, device=device)[torch.tensor([5], device=device)]
def strays(device): store_far_away[(1,)](torch.zeros(1, dtype=torch.int32, device=device), 1 << 40)
def runs_out(device):
    torch.cuda.set_per_process_memory_fraction(0.05)
    kept = []
    while True: kept.append(torch.empty(1 << 28, dtype=torch.uint8, device=device))
def asks_for_too_much(device): torch.empty(1 << 45, dtype=torch.uint8, device=device)
def is_killed(device): os.kill(os.getpid(), signal.SIGKILL)
def aborts(device): os.abort()
def vanishes(device): os._exit(0)
"""
# fault -> outcome, a part of the line that says it, and whether the machine is at fault
FAULTS = {
    "hangs": ("hung", "did not end within ", False),
    "hangs_and_waits": ("hung", "did not end within ", False),
    "asserts": ("crashed", "device-side assert triggered", False),
    "asserts_unnoticed": ("crashed", "device-side assert triggered", False),
    "strays": ("crashed", "illegal memory access", False),
    "runs_out": ("error", "OutOfMemoryError: CUDA out of memory", True),
    "asks_for_too_much": ("error", "OutOfMemoryError: CUDA out of memory", True),
    "is_killed": ("crashed", "SIGKILL", True),
    "aborts": ("crashed", "SIGABRT in aborts", False),
    "vanishes": ("error", "exit 0 without a report", True),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("legs")
    (folder / "unfix_fault_legs_gpu.py").write_text(LEGS)
    with Sandbox("cuda") as sandbox:

        def run(name, params=None, shared=False, timeout=120.0):
            request = Request(
                f"unfix_fault_legs_gpu:{name}", params or {}, device="cuda", path=[str(folder)], timeout=timeout
            )
            ending = sandbox.run(request, shared=shared)
            if not shared or ending.left:
                sandbox.settle()
            return ending

        yield run


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("shared", [False, True])
def test_what_a_fault_is_and_that_nothing_of_it_is_left(run, tmp_path, fault, shared):
    before = run("computes").report["facts"]["free"]
    note = tmp_path / "pid"
    hangs = fault.startswith("hangs")
    ending = run("fault", {"fault": fault, "note": str(note)}, shared, timeout=30.0 if hangs else 120.0)
    leg = outcome.read(ending, reverted=(), guards=(), detector="none", predicted=None, targets=())
    kind, part, infra = FAULTS[fault]
    assert (leg.outcome, bool(leg.infra)) == (kind, infra) and part in leg.error and "\n" not in leg.error
    assert ending.shared == shared and note.exists(), "it came as far as its fault"
    pid = int(note.read_text())
    if not (shared and kind == "error" and ending.report):  # running out of memory leaves a process as it was
        assert not Path(f"/proc/{pid}").exists() and pid not in holders()
    end = time.monotonic() + GIVEN_BACK
    while (free := run("computes").report["facts"]["free"]) < before - HELD // 2:  # others use the same GPU, a little
        assert time.monotonic() < end, f"{before - free} bytes of device memory are not given back"


def holders() -> set[int]:
    """The processes that hold device memory, as NVML lists them; in a container it may list none."""
    ask = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    listed = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=False).stdout
    return {int(pid) for pid in listed.split() if pid.isdecimal()}
