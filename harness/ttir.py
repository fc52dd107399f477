"""Compiles Triton kernels to TTIR, without a GPU, and prints what came out. Runs in a process of its own.

`compile_all` starts that process: a fresh one, because Triton decides at its import whether it interprets
(`TRITON_INTERPRET`), and because a kernel's module may be slow to import or come from an overlay. It stops after
Triton's first stage (inlined, canonicalised), where integer widths are settled and pointers are still pointers, so
neither ptxas nor a driver is asked. Works on Triton 3.6 to 3.9; the GPU that is compiled for is named, never detected.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.errors import InfraError

TARGET = ("cuda", 90, 32)  # backend, compute capability, threads a warp
_SECONDS = 600


@dataclass(frozen=True)
class Build:
    """One kernel (`pkg.mod.name`) and its arguments: a type ("*i64", "i32", "fp32") or, for a constexpr, its value.

    A parameter that is left out gets its default as a constexpr, as a launch without it would.
    """

    target: str
    arguments: dict[str, Any]


def compile_all(builds: Sequence[Build], path: Sequence[Path | str]) -> list[str]:
    """The TTIR of each, with locations, from one fresh process whose import path starts with `path`.

    Raises InfraError with the first failure.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    harness = Path(__file__).parents[1]
    inherited = environment.get("PYTHONPATH", "").split(os.pathsep)
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, path), str(harness), *filter(None, inherited)])
    request = json.dumps([asdict(build) for build in builds])
    command = [sys.executable, "-m", "harness.ttir"]
    try:
        done = subprocess.run(
            command, input=request, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise InfraError(f"compiling {len(builds)} kernels took more than {_SECONDS} s") from None
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise InfraError(f"compiling kernels to TTIR failed: {said}") from None
    if "error" in answer:
        raise InfraError(answer["error"])
    return list(answer["compiled"])


def compile_here(build: Build) -> str:
    """Compile in this process. Raises whatever the import or Triton raises."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget, Language
    from triton.compiler import ASTSource, make_backend

    module, _, name = build.target.rpartition(".")
    kernel = getattr(importlib.import_module(module), name)
    while not hasattr(kernel, "arg_names") or hasattr(kernel, "configs"):  # an autotuner or heuristics around it
        kernel = kernel.fn
    given = build.arguments
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    for parameter in kernel.params:
        value = given.get(parameter.name, parameter.default)
        if isinstance(value, str):
            signature[parameter.name] = value
        else:
            signature[parameter.name], constexprs[parameter.name] = "constexpr", value
    target = GPUTarget(*TARGET)
    backend = make_backend(target)
    options = backend.parse_options({})
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, Language.TRITON)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs)
    helpers = backend.get_codegen_implementation(options)
    made = source.make_ir(target, options, helpers, backend.get_module_map(), context)
    return str(stages["ttir"](made, {}))


def _main() -> None:
    out = os.dup(1)
    os.dup2(2, 1)  # what an import prints must not get between the answer's lines
    warnings.simplefilter("ignore")
    compiled: list[str] = []
    answer: dict[str, Any] = {"compiled": compiled}
    for request in json.load(sys.stdin):
        build = Build(**request)
        try:
            compiled.append(compile_here(build))
        except Exception as error:
            why = (str(error).strip().splitlines() or [""])[-1]
            answer = {"error": f"{build.target} does not compile to TTIR: {type(error).__name__}: {why}"}
            break
    with os.fdopen(out, "w") as stream:
        print(json.dumps(answer), file=stream, flush=True)
    os._exit(0)


if __name__ == "__main__":
    _main()
