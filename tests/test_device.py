"""Which device legs run on: what NVML and CUDA_VISIBLE_DEVICES say, with a stand-in for NVML's library."""

from __future__ import annotations

import ctypes

import pytest

from harness import device
from harness.errors import InfraError


class Nvml:
    """Two GPUs of compute capability 9.0. ``failing`` calls return NVML_ERROR_UNKNOWN, the last one for GPU 0 only."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing

    def _code(self, name: str) -> int:
        return 999 if name in self.failing else 0

    def nvmlInit_v2(self) -> int:
        return self._code("init")

    def nvmlShutdown(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count) -> int:
        count._obj.value = 2
        return self._code("count")

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle) -> int:
        handle._obj.value = index + 1
        return self._code(f"handle {index}")

    def nvmlDeviceGetCudaComputeCapability(self, handle, major, minor) -> int:
        major._obj.value, minor._obj.value = 9, 0
        return self._code(f"capability {handle.value - 1}")


@pytest.fixture
def nvml(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def put(*failing: str) -> None:
        monkeypatch.setattr(ctypes, "CDLL", lambda name: Nvml(*failing))

    put()
    return put


@pytest.mark.parametrize(
    ("failing", "found"),
    [
        ((), ["9.0", "9.0"]),
        (("init",), []),
        (("count",), []),
        (("handle 0",), ["9.0"]),
        (("capability 0", "capability 1"), []),
    ],
)
def test_a_gpu_that_does_not_answer_is_none(nvml, failing, found):
    nvml(*failing)
    assert device.compute_capabilities() == found
    assert device.resolve_device("auto") == ("cuda" if found else "cpu")


@pytest.mark.parametrize(
    ("visible", "kind"), [("", "cpu"), ("-1", "cpu"), (" -1,0", "cpu"), ("0", "cuda"), ("1,-1", "cuda")]
)
def test_hidden_gpus_are_none(nvml, monkeypatch, visible, kind):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device.resolve_device("auto") == kind
    if kind == "cpu":
        with pytest.raises(InfraError, match="CUDA_VISIBLE_DEVICES hides every GPU"):
            device.resolve_device("cuda")
