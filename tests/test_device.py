"""Which device legs run on: what NVML and CUDA_VISIBLE_DEVICES say, with a stand-in for NVML's library."""

from __future__ import annotations

import ctypes

import pytest

from harness import device
from harness.errors import InfraError

GPUS = [("GPU-8932f937-d72c", 9, 0), ("GPU-e429a63e-c61c", 9, 0)]
OTHERS = [("GPU-8932f937-d72c", 9, 0), ("GPU-e429a63e-c61c", 8, 0), ("GPU-0c1d2e3f-aaaa", 12, 0)]


class Nvml:
    """GPUs as (UUID, major, minor). ``failing`` calls return NVML_ERROR_UNKNOWN, "handle 0" for GPU 0 only."""

    def __init__(self, gpus, failing) -> None:
        self.gpus, self.failing = gpus, failing

    def _code(self, name: str) -> int:
        return 999 if name in self.failing else 0

    def nvmlInit_v2(self) -> int:
        return self._code("init")

    def nvmlShutdown(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count) -> int:
        count._obj.value = len(self.gpus)
        return self._code("count")

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle) -> int:
        handle._obj.value = index + 1
        return self._code(f"handle {index}")

    def nvmlDeviceGetUUID(self, handle, buffer, length: int) -> int:
        uuid = self.gpus[handle.value - 1][0].encode()
        assert len(uuid) < length <= len(buffer)
        buffer.value = uuid
        return self._code(f"uuid {handle.value - 1}")

    def nvmlDeviceGetCudaComputeCapability(self, handle, major, minor) -> int:
        _, major._obj.value, minor._obj.value = self.gpus[handle.value - 1]
        return self._code(f"capability {handle.value - 1}")


@pytest.fixture
def nvml(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)

    def put(*failing: str, gpus=GPUS) -> None:
        monkeypatch.setattr(ctypes, "CDLL", lambda name: Nvml(gpus, failing))

    put()
    return put


@pytest.mark.parametrize(
    ("failing", "found"),
    [
        ((), [0, 1]),
        (("init",), []),
        (("count",), []),
        (("handle 0",), [1]),
        (("uuid 1",), [0]),
        (("capability 0", "capability 1"), []),
    ],
)
def test_a_gpu_that_does_not_answer_is_none(nvml, failing, found):
    nvml(*failing)
    assert device.uuids() == [GPUS[index][0] for index in found]
    assert device.visible() == device.uuids()
    assert device.compute_capabilities() == ["9.0"] * len(found)
    assert device.resolve_device("auto") == ("cuda" if found else "cpu")
    if not found:
        with pytest.raises(InfraError, match="asked for, but no NVIDIA GPU is here; --device cpu"):
            device.resolve_device("cuda")


def test_no_driver_is_no_gpu(nvml, monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert device.uuids() == device.visible() == device.compute_capabilities() == []
    assert device.resolve_device("auto") == "cpu"


@pytest.mark.parametrize(
    ("visible", "kind"),
    [
        *[("", "cpu"), ("-1", "cpu"), (" -1,0", "cpu"), ("2", "cpu"), ("0,0", "cpu"), ("none", "cpu")],
        *[("GPU-dead", "cpu"), ("0", "cuda"), ("1,-1", "cuda"), ("GPU-e4", "cuda"), ("MIG-89c850dc", "cuda")],
    ],
)
def test_hidden_gpus_are_none(nvml, monkeypatch, visible, kind):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device.resolve_device("auto") == kind
    assert bool(device.compute_capabilities()) == (kind == "cuda")
    if kind == "cpu":
        with pytest.raises(InfraError) as hidden:
            device.resolve_device("cuda")
        assert f"CUDA_VISIBLE_DEVICES={visible!r} shows none of the 2 here" in str(hidden.value)
        assert hidden.value.exit_code == 4 and "\n" not in str(hidden.value)


@pytest.mark.parametrize(
    ("gpus", "visible", "order", "capabilities"),
    [
        (OTHERS, None, None, ["9.0", "8.0", "12.0"]),
        (OTHERS, "GPU-0c,GPU-8", None, ["12.0", "9.0"]),
        (OTHERS, "2,0", "PCI_BUS_ID", ["12.0", "9.0"]),
        (OTHERS, "1", "PCI_BUS_ID", ["8.0"]),
        (OTHERS, "1", None, ["9.0", "8.0", "12.0"]),  # CUDA counts in an order of its own
        (OTHERS, "1", "FASTEST_FIRST", ["9.0", "8.0", "12.0"]),
        (OTHERS, "MIG-89c850dc", None, ["9.0", "8.0", "12.0"]),
        (OTHERS, "7", None, []),
        (GPUS, "1", None, ["9.0"]),  # in any order
        (GPUS, "1,0,3", None, ["9.0", "9.0"]),
    ],
)
def test_legs_are_told_the_architecture_of_their_gpu(nvml, monkeypatch, gpus, visible, order, capabilities):
    nvml(gpus=gpus)
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("CUDA_DEVICE_ORDER", order)):
        if value is not None:
            monkeypatch.setenv(name, value)
    assert device.compute_capabilities() == capabilities


@pytest.mark.parametrize(
    ("triton", "numpy", "fits"),
    [
        ("3.6.0", "2.4.0", False),
        ("3.6.0", "2.10.1", False),
        ("3.6.0", "2.3.5", True),
        ("3.7.0", "2.4.6", True),
        (None, "2.4.0", True),
    ],
)
def test_an_interpreter_that_cannot_compute_is_infra(nvml, monkeypatch, triton, numpy, fits):
    def version(name: str) -> str:
        if (found := {"triton": triton, "numpy": numpy}[name]) is None:
            raise device.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(device.metadata, "version", version)
    nvml(gpus=[])
    for asked in ("cpu", "auto"):
        if fits:
            assert device.resolve_device(asked) == "cpu"
        else:
            with pytest.raises(
                InfraError, match=f"Triton {triton}'s interpreter needs NumPy below 2.4, this is {numpy}"
            ):
                device.resolve_device(asked)
    nvml(gpus=GPUS)
    assert device.resolve_device("auto") == "cuda"
