"""With nothing taken out, what is compiled under the harness is what is compiled without it, byte for byte."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import auditfile, overlay, variants
from harness.fixes import Catalogue
from harness.sandbox import Request, Sandbox

ROOT = Path(__file__).parents[1]
BENCHMARKS, KERNELS = ROOT / "benchmarks", ROOT / "kernels"
nvcc = pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")

Compile = Callable[..., dict[str, str]]


@pytest.fixture(scope="module")
def compiling() -> Iterator[Sandbox]:
    """A server whose legs compile: that of a GPU, which need not be here. One for the CPU has Triton interpret."""
    with Sandbox("cuda") as sandbox:
        yield sandbox


@pytest.fixture
def in_a_leg(compiling: Sandbox, catalogue: Catalogue, tmp_path: Path) -> Compile:
    """``in_a_leg(out, **params)``: what a leg compiles with these fixes out."""

    def run(out: list[str], **params: Any) -> dict[str, str]:
        plan = overlay.plan(variants.choose_all(catalogue, out, "eagle_kv", [KERNELS]), [KERNELS])
        path = [str(each) for each in (overlay.build(plan), ROOT, KERNELS, BENCHMARKS) if each]
        wanted = {"cache": str(tmp_path / "caches"), **params}
        ending = compiling.run(Request("no_cost_legs:compiled", wanted, "cpu", path, detector="red-zone"))
        assert ending.report and not ending.report["raised"], ending
        return ending.report["facts"]

    return run


@pytest.fixture
def without(tmp_path: Path) -> Compile:
    """``without(**params)``: the same in a Python that can't import the harness."""

    def run(**params: Any) -> dict[str, str]:
        wanted = json.dumps({"cache": str(tmp_path / "caches"), **params})
        code = [sys.executable, str(BENCHMARKS / "no_cost_legs.py"), "compiled", wanted, "cpu"]
        inherited = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each not in ("", str(ROOT))]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(KERNELS), *inherited])}
        env.pop("TRITON_INTERPRET", None)  # a leg in a test's own process sets it
        return json.loads(subprocess.run(code, env=env, check=True, stdout=subprocess.PIPE, timeout=240).stdout)

    return run


def triton_kernels() -> dict[str, Any]:
    chosen = auditfile.load(ROOT / "audits" / "eagle_kv.yaml").choose(KERNELS)
    builds = [kernel.builds[""] for kernel in chosen]
    return {"kernels": [(build.target, build.arguments) for build in builds], "stores": []}


CPU, CUDA = {"kernels": [], "stores": ["cpu"]}, {"kernels": [], "stores": ["cuda"]}


def test_triton_kernels_are_the_same_at_every_stage(in_a_leg: Compile, without: Compile) -> None:
    params = triton_kernels()
    ours = in_a_leg([], **params)
    stages = [Path(name).suffix for name in ours]
    assert all(stages.count(stage) == len(params["kernels"]) for stage in (".ttir", ".ttgir", ".ptx", ".cubin"))
    assert ours == without(**params)
    out = in_a_leg(["own:int32-rows"], **params)  # its names are digests of what was compiled
    assert {name for name in out if "attention" in name} == {name for name in ours if "attention" in name}
    assert not [name for name in out if "draft" in name and name in ours]


@pytest.mark.parametrize("params", [CPU, pytest.param(CUDA, marks=nvcc)], ids=["cpu", "cuda"])
def test_the_store_kernel_is_the_same_library_at_the_same_place(
    params: dict[str, Any], in_a_leg: Compile, without: Compile
) -> None:
    ours = in_a_leg([], **params)
    assert [name for name in ours if "store_kvcache.so" in name]
    assert ours == without(**params)
    assert not set(ours) & set(in_a_leg(["27486:slot-assert"], **params))


def test_a_leg_without_an_overlay_has_nothing_in_front(compiling: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text("import sys\n\ndef run(params, device): return {'path': sys.path[:2]}\n")
    assert overlay.build({}) is None
    report = compiling.run(Request("look:run", path=[str(tmp_path), str(KERNELS)])).report
    assert report and report["facts"]["path"] == [str(tmp_path), str(KERNELS)]
