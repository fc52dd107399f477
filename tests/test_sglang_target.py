"""SGLang as the code base under test: what its light environment, stand-ins and scenarios promise."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import lightenv
from harness.errors import InfraError, MissingPackageError, UsageError
from harness.memory import DETECTORS
from harness.memory.cuda_is_cpu import CudaIsCpu

ROOT = Path(__file__).parents[1]
RELEASES = ("0.5.13", "0.5.23")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNFIX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    package = tmp_path / "no_kernels"
    package.mkdir()
    shutil.copyfile(lightenv.STUB, package / "__init__.py")
    return tmp_path


def _python(code: str, *path: str | Path, **env: str) -> str:
    """What a fresh interpreter prints."""
    full = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **env}
    done = subprocess.run([sys.executable, "-c", code], env=full, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_every_pin_names_one_version_and_none_is_the_interpreters_own() -> None:
    names = [pin.partition("==")[0].lower() for pin in lightenv.pins()]
    assert all(pin.count("==") == 1 for pin in lightenv.pins())
    assert len(set(names)) == len(names)
    assert not {"torch", "triton", "numpy", "sglang", *lightenv.STUBBED} & set(names)


def test_a_release_that_is_no_version_is_refused(cache: Path) -> None:
    with pytest.raises(UsageError, match="must be a version"):
        lightenv.path("0.5.13 --index-url x")


def test_a_release_that_is_not_installed_says_what_to_run(cache: Path) -> None:
    with pytest.raises(MissingPackageError, match=r"unfix upstream install 0\.5\.13"):
        lightenv.path("0.5.13")
    assert not lightenv.is_installed("0.5.13")


def test_wheels_that_lack_a_package_are_named_and_nothing_is_left(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    with pytest.raises(InfraError, match="has sglang, .*transformers"):
        lightenv.install("0.5.13", tmp_path / "wheels")
    assert not list(cache.glob("upstream/*"))


def test_a_broken_wheel_is_one_line_and_nothing_is_left(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lightenv, "pins", list)
    wheel = tmp_path / "sglang-0.5.13-py3-none-any.whl"
    wheel.write_bytes(b"no zip")
    with pytest.raises(InfraError, match="pip could not install SGLang 0.5.13") as caught:
        lightenv.install("0.5.13", tmp_path)
    assert "\n" not in str(caught.value)
    assert not list(cache.glob("upstream/*"))


def test_a_checkout_must_hold_the_package(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="python/sglang"):
        lightenv.sources("0.5.13", tmp_path)
    (tmp_path / "python" / "sglang").mkdir(parents=True)
    (tmp_path / "python" / "sglang" / "__init__.py").touch()
    assert lightenv.sources("0.5.13", tmp_path) == tmp_path / "python"


def test_a_stub_can_be_imported_and_never_called(stub: Path) -> None:
    code = """
import no_kernels, torch
from no_kernels.deep.below import thing
class Child(no_kernels.Base): pass
torch.library.register_fake("no_kernels::op")(lambda x: x)
try:
    thing.more(1)
except RuntimeError as error:
    print(error)
"""
    assert _python(code, stub) == (
        "no_kernels.deep.below.thing.more was called, but no_kernels is an import stub here: install the real package"
    )


def test_a_detector_sees_what_cuda_means_here_and_who_allocated() -> None:
    with DETECTORS["red-zone"](zone_bytes=512) as zone, CudaIsCpu():
        made = torch.zeros(4, dtype=torch.int32, device="cuda")
        other = torch.empty(2).to("cuda:0")
    assert made.device.type == other.device.type == "cpu"
    assert zone.allocation_of(made).site.startswith(f"{__file__}:")
    torch.empty(0, dtype=torch.int32).set_(made.untyped_storage(), made.storage_offset(), (5,))[4] = 7
    assert [(hit.side, hit.elements) for hit in zone.check()] == [("after", 1)]


def test_asking_about_the_device_makes_no_context() -> None:
    code = """
import harness.device
harness.device.compute_capabilities = lambda: ["9.0", "8.6"]
import torch, harness.cuda_untouched
print(torch.cuda.get_device_capability(), torch.cuda.get_device_capability("cuda:1"), torch.cuda.get_device_name(0))
print(torch.cuda.is_initialized())
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
print(len(TorchInGraphFunctionVariable._get_handlers()) > 0)  # torch.compile, which names torch's functions, loads
"""
    assert _python(code, ROOT) == "(9, 0) (8, 6) GPU of compute capability 9.0\nFalse\nTrue"


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    if not lightenv.is_installed(request.param):
        pytest.skip(f"needs SGLang {request.param}: run `unfix upstream install {request.param}`")
    return request.param


CASES = [  # backend, path, seq_lens, then what must come of it
    ("flashinfer", "cuda_graph", [3], None),
    ("flashinfer_mla", "eager", [3], None),
    ("aiter", "cuda_graph", [3], None),
    ("triton", "cuda_graph", [3], None),
    ("flashinfer", "eager", [6], "used 16 > capacity 12"),
    ("flashinfer_mla", "cuda_graph", [6], "used 16 > capacity 12"),
]


def test_real_backends_agree_with_the_reference_and_guard_their_rows(release: str) -> None:
    """topk 2, 2 steps, context 6: 3 tokens need 10 of 12 elements, 6 tokens 16."""
    code = f"""
import json
from regressions.scenarios.draft_sglang import run
for backend, path, seq_lens, _ in {CASES!r}:
    params = dict(topk=2, num_steps=2, page_size=1, max_bs=1, max_context_len=6)
    try:
        print(run(dict(params, backend=backend, path=path, seq_lens=seq_lens), "cpu")["row"])
    except AssertionError as error:
        print(error)
"""
    path = [ROOT, ROOT / "kernels", *lightenv.path(release)]
    printed: list[Any] = _python(code, *path, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="").splitlines()
    said = [line for line in printed if not line.startswith("aiter is")]
    assert len(said) == len(CASES)
    for line, (*_, refusal) in zip(said, CASES, strict=True):
        assert line == "12" if refusal is None else refusal in line


def test_the_multi_layer_worker_checks_before_it_asks_for_a_model(release: str) -> None:
    code = """
from regressions.scenarios.multi_layer_sglang import run
print(run({"num_steps": 3, "num_draft_tokens": 4}, "cpu")["accepted"])
try:
    run({"num_steps": 3, "num_draft_tokens": 8}, "cpu")
except AssertionError as error:
    print(error)
"""
    path = [ROOT, ROOT / "kernels", *lightenv.path(release)]
    accepted, refused = _python(code, *path, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="").splitlines()[-2:]
    assert accepted == "True"
    assert "got 8 and 3" in refused


FINDINGS = {  # script: (the fix that mends what it shows, what it shows without, what with)
    "int32_rows": ("own:int32-rows", "the last one starts at 2400000000", "step 4: as it must be"),
    "draft_capacity": ("own:triton-capacity-assert", "2 elements written past the end", "refused: EAGLE draft"),
}


@pytest.mark.parametrize("script", FINDINGS)
def test_a_finding_shows_on_a_release_and_goes_with_its_fix(release: str, script: str) -> None:
    fix, without, with_it = FINDINGS[script]
    command = [sys.executable, str(ROOT / "docs" / "findings" / f"{script}.py")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(lightenv.path(release)), "TRITON_INTERPRET": "1"}
    env["CUDA_VISIBLE_DEVICES"] = ""
    plain = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert plain.returncode and without in plain.stdout, plain.stderr[-2000:]
    mended = [sys.executable, "-m", "harness.cli", "exec", "--apply", fix, "--target", "sglang", "--", *command]
    done = subprocess.run(mended, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and with_it in done.stdout, done.stderr[-2000:]


def test_mla_plans_its_eager_drafts_for_the_prefix_alone(release: str) -> None:
    """docs/findings/mla_eager_metadata.py; it says device="cuda" as the code that it calls does."""
    code = """
import runpy, sys
from harness.memory.cuda_is_cpu import CudaIsCpu
with CudaIsCpu():
    try:
        runpy.run_path("docs/findings/mla_eager_metadata.py", run_name="__main__")
    except SystemExit as ended:
        print(ended.code)
"""
    path = [ROOT, *lightenv.path(release)]
    handed, planned, code = _python(code, *path, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="").splitlines()[-3:]
    assert (handed, code) == ("handed over: kv_indptr [0, 7]", "1")
    assert planned == "planned: [0, 6]; the shared buffer now: [0, 6]"
