"""Which GPUs CUDA_VISIBLE_DEVICES shows, which one a worker gets, and how a fork server counts a MIG device."""

from __future__ import annotations

import pytest
import torch

from harness import gpus
from harness.errors import InfraError
from harness.sandbox import Request, Sandbox

A, B, C, D = INSTALLED = [
    "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    "GPU-8932ffff-6b0a-49f1-ad3c-1c2b9d0e7a11",
    "GPU-e429a63e-c61c-4795-b757-5132caeb8e70",
    "GPU-0c1d2e3f-aaaa-bbbb-cccc-ddddeeeeffff",
]
MIG, OTHER_MIG = "MIG-89c850dc-38e3-57df-85c7-690c186b68e9", "MIG-f2b5fbbd-850e-51bb-8ffa-ac9fb48126da"
OLD_MIG = f"MIG-{A}/1/2"

VISIBLE = [  # CUDA_VISIBLE_DEVICES, installed, what workers get
    ("3,5", 8, ["3", "5"]),
    ("5,3", 8, ["5", "3"]),
    (" 3 , 5", 8, ["3", "5"]),
    ("1gpu2,+2ampere,-0", 4, ["1", "2", "0"]),
    ("0", 1, ["0"]),
    (f"{C},{A}", 4, [C, A]),
    ("GPU-e,GPU-8932f9", 4, ["GPU-e", "GPU-8932f9"]),
    ("GPU-e,GPU-8932f,GPU-0", 4, ["GPU-e"]),  # two start so
    ("GPU-", 1, ["GPU-"]),
    (f"{A},GPU-dead,{B}", 4, [A]),
    (f"{A}, {B}", 4, [A]),
    (f" {A}", 4, []),
    (A.lower(), 4, []),
    (MIG, 4, [MIG]),
    (f"{MIG},{OTHER_MIG}", 1, [MIG, OTHER_MIG]),
    (f"{OLD_MIG},{MIG}", 1, [OLD_MIG, MIG]),
    (f"{MIG},{MIG}", 4, []),
    (MIG, 0, []),
    (f"{A},{MIG}", 4, [A]),
    (f"{MIG},{A}", 4, [MIG]),
    (f"{A},1", 4, [A]),
    (f"1,{A}", 4, ["1"]),
    ("", 4, []),
    ("-1", 4, []),
    ("0,-1,1", 4, ["0"]),
    ("0,-1,0", 4, ["0"]),
    ("0,0", 4, []),
    ("0,1,00", 4, []),
    ("0,7,0", 4, []),
    (f"{A},{A}", 4, []),
    (f"GPU-8932f9,{A}", 4, []),
    ("7", 4, []),
    ("4", 4, []),
    ("0,7,1", 4, ["0"]),
    ("0,,1", 4, ["0"]),
    ("none", 4, []),
    ("0,one,2", 4, ["0"]),
    ("0", 0, []),
    (A, 0, []),
    (None, 0, []),
    (None, 1, [A]),
    (None, 8, None),  # all of them
]


def _installed(count: int) -> list[str]:
    return [*INSTALLED, *(f"GPU-{digit}{digit}" for digit in "4567")][:count]


@pytest.mark.parametrize(("listed", "count", "entries"), VISIBLE)
def test_what_a_list_shows(listed, count, entries):
    installed = _installed(count)
    assert gpus.visible(listed, installed) == (installed if entries is None else entries)


@pytest.mark.parametrize(("listed", "count"), [row[:2] for row in VISIBLE if "MIG-" not in (row[0] or "")[:4]])
def test_torch_counts_as_many(monkeypatch, listed, count):
    if listed is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: count)
    monkeypatch.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: _installed(count))
    assert len(gpus.visible(listed, _installed(count))) == torch.cuda._device_count_nvml()


@pytest.mark.parametrize(
    ("entry", "uuid"), [("1", B), ("GPU-e", C), (D, D), ("GPU-8932", None), ("4", None), ("-1", None), (MIG, None)]
)
def test_which_gpu_an_entry_names(entry, uuid):
    assert gpus.uuid(entry, INSTALLED) == uuid


def test_workers_are_spread_and_a_replacement_gets_what_the_dead_one_had():
    assigned = gpus.Assignment(["3", "5", MIG])
    assert [assigned.take(f"gw{n}") for n in range(7)] == ["3", "5", MIG, "3", "5", MIG, "3"]
    for dead, gpu, replacement in [("gw1", "5", "gw7"), ("gw2", MIG, "gw8"), ("gw7", "5", "gw9")]:
        assigned.give_back(dead)
        assert assigned.take(replacement) == gpu
    assigned.give_back("gw0")
    assigned.give_back("gw3")
    assigned.give_back("gw4")
    assert [assigned.take(f"gw{n}") for n in (10, 11, 12)] == ["3", "5", "3"]


def test_who_never_had_a_gpu_gives_none_back():
    assigned = gpus.Assignment([A, B])
    assigned.take("gw0")
    assigned.give_back("gw7")
    assert assigned.take("gw1") == B


def test_workers_without_a_gpu_are_one_line():
    with pytest.raises(InfraError, match="^no GPU is visible that a worker could have$"):
        gpus.Assignment(gpus.visible("-1", INSTALLED))


ASKS = """
import torch

def runtime():
    raise AssertionError("the CUDA runtime was asked")

torch.cuda._is_compiled = lambda: True
torch._C._cuda_getDeviceCount = runtime
torch.cuda.init = lambda: None  # a fork of the server tries it
assert torch.cuda.is_available() and torch.cuda.device_count() == 1

def counts():
    # as the torch that is here has it, and as torch 2.11 has it, which always asks NVML first
    by_nvml = torch.cuda._device_count_nvml()
    return [torch.cuda.device_count(), torch._C._cuda_getDeviceCount() if by_nvml < 0 else by_nvml]

def leg(params, device):
    before = counts()
    torch._C._cuda_getDeviceCount = lambda: 7
    torch.cuda._initialized = True
    after = counts()
    torch.cuda._initialized = False
    return {"before": before, "after": after}
"""


@pytest.mark.parametrize("visible", [f"{MIG},{OTHER_MIG}", OLD_MIG])
def test_a_fork_server_counts_one_mig_device_and_leaves_the_runtime_alone(tmp_path, monkeypatch, visible):
    (tmp_path / "unfix_asks.py").write_text(ASKS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with Sandbox("cuda", preload=["unfix_asks"], path=[str(tmp_path)]) as sandbox:
        ending = sandbox.run(Request("unfix_asks:leg", device="cpu", path=[str(tmp_path)]))
    assert ending.report["facts"] == {"before": [1, 1], "after": [7, 7]}
