"""What no_cost.py and tests/test_no_cost.py run twice: in a leg, and in a Python that has no harness on its path.

Each answers with digests of all that it compiled. It compiles into caches of its own, which are empty before it: a
digest is never of what the other one left.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TARGET = ("cuda", 90, 32)  # what kernels are compiled for where there is no GPU


def compiled(params: dict[str, Any], device: str) -> dict[str, Any]:
    """Every Triton kernel in ``params["kernels"]``, (path, arguments) each, and the store kernel for each of
    ``params["stores"]``: without a GPU, for sm_90. Caches are made below ``params["cache"]``."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    with _Caches(params["cache"]) as caches:
        for path, arguments in params["kernels"]:
            module, _, name = path.rpartition(".")
            kernel = getattr(importlib.import_module(module), name)
            signature, constexprs = {}, {}
            for parameter in kernel.params:
                value = arguments.get(parameter.name, parameter.default)
                if isinstance(value, str):
                    signature[parameter.name] = value
                else:
                    signature[parameter.name], constexprs[parameter.name] = "constexpr", value
            compile(ASTSource(kernel, signature, constexprs), target=GPUTarget(*TARGET))
        for kind in params["stores"]:
            _build_store(kind)
        return caches.digests()


def launched(params: dict[str, Any], device: str) -> dict[str, Any]:
    """What launches compile: a draft round of ``params["shape"]`` (topk, num_steps, max_bs, max_context_len) with the
    Triton backend, and a store."""
    import torch
    from eagle_kv.backends import BACKENDS
    from eagle_kv.batch import DraftBatch, DraftConfig, make_req_to_token
    from eagle_kv.kv_pool import KVPool

    with _Caches(params["cache"]) as caches:
        config = DraftConfig(**params["shape"], num_qo_heads=4, num_kv_heads=2, dtype=torch.float16, device=device)
        lens = [config.max_context_len - config.num_steps] * config.max_bs
        batch = DraftBatch.of(lens, config.topk, req_pool_indices=list(range(config.max_bs)), device=device)
        backend = BACKENDS["triton"](config, make_req_to_token(config, seed=7))
        backend.init_forward_metadata(batch)
        pool = KVPool(64, 1, 2, 64, torch.float16, device)
        rows = torch.ones(4, 2, 64, dtype=torch.float16, device=device)
        q = torch.ones(config.max_bs * config.topk, 4, 64, dtype=torch.float16, device=device)
        backend.kv_indices.remainder_(64)
        backend.forward_decode(0, q, (pool.k_buffer, pool.v_buffer))
        pool.set_kv_buffer(torch.arange(4, device=device), rows, rows)
        torch.cuda.synchronize()
        return caches.digests()


def imported(params: dict[str, Any], device: str) -> dict[str, Any]:
    """Seconds to import ``params["modules"]``, once torch and triton are there, and whether harness is, too."""
    import torch  # noqa: F401
    import triton  # noqa: F401

    started = time.perf_counter()
    for name in params["modules"]:
        importlib.import_module(name)
    return {"seconds": time.perf_counter() - started, "harness": "harness" in sys.modules}


class _Caches:
    """Empty caches of Triton's and of eagle_kv's, at the same place each time: some paths are compiled in."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def __enter__(self) -> _Caches:
        shutil.rmtree(self._folder, ignore_errors=True)
        os.environ["TRITON_CACHE_DIR"] = str(self._folder / "triton")
        os.environ["EAGLE_KV_CACHE"] = str(self._folder / "eagle_kv")
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def digests(self) -> dict[str, str]:
        """Path below the caches -> sha256. Of a CUDA library its device code: nvcc puts a random name beside that.

        Triton's own host modules are left out: gcc compiles them from a temporary path, which their errors name.
        """
        found = {}
        for file in sorted(path for path in self._folder.rglob("*") if path.is_file()):
            name = str(file.relative_to(self._folder))
            if file.suffix == ".so" and name.startswith("triton/"):
                continue
            if file.suffix == ".so" and "-cuda-" in file.parent.name:
                found[f"{name} (device code)"] = _device_code(file)
            else:
                found[name] = hashlib.sha256(file.read_bytes()).hexdigest()
        return found


def _build_store(kind: str) -> None:
    import torch
    from eagle_kv import jit, store

    if not torch.cuda.is_available():
        os.environ["TVM_FFI_CUDA_ARCH_LIST"] = f"{TARGET[1] // 10}.{TARGET[1] % 10}"
    jit.build(store.SOURCE, torch.device(kind), "no_cost")


def _device_code(library: Path) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([tool, "-xelf", "all", library], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        cubins = sorted(Path(folder).iterdir())
        if not cubins:
            raise RuntimeError(f"{library} holds no device code")
        for cubin in cubins:
            digest.update(cubin.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    import json

    sys.path.pop(0)  # this folder: transformers takes kernels.py for a package that it looks for
    entry, params, device = sys.argv[1:]
    answer = globals()[entry](json.loads(params), device)
    assert "harness" not in sys.modules, "this Python must be without the harness"
    print(json.dumps(answer))
