"""Build one C++/CUDA source into a tvm-ffi module, once a machine, and load it.

A build lies in ``$EAGLE_KV_CACHE``, else ``$XDG_CACHE_HOME/eagle_kv``, else ``~/.cache/eagle_kv``, in a directory named
by the digest of all that goes into it. That directory holds the exact source next to the library made from it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


class ToolchainError(RuntimeError):
    """A compiler or build tool that is not on this machine."""


def cache_root() -> Path:
    if named := os.environ.get("EAGLE_KV_CACHE"):
        return Path(named).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "eagle_kv"


def load(source: Path, device: torch.device, caller: str) -> Any:
    """The tvm-ffi module of ``source`` for ``device`` ("cpu" or "cuda"), built first if no build of it is there.

    Raises ToolchainError, one line that starts with ``caller``, if a tool is missing; RuntimeError with the compiler's
    own output if the source does not compile.
    """
    import tvm_ffi

    return tvm_ffi.load_module(str(build(source, device, caller)))


def build(source: Path, device: torch.device, caller: str) -> Path:
    """The path of the shared library; safe to call from many processes at once."""
    import tvm_ffi
    import tvm_ffi.cpp

    text = source.read_bytes()
    tools = _Tools(device, caller)
    key = hashlib.sha256()
    for part in (text, device.type.encode(), tools.environment["CXX"].encode(), *tools.versions):
        key.update(len(part).to_bytes(8, "little") + part)
    key.update(f"tvm_ffi {tvm_ffi.__version__} arch {tools.environment.get('TVM_FFI_CUDA_ARCH_LIST')}".encode())
    name = source.stem
    home = cache_root() / f"{name}-{device.type}-{key.hexdigest()[:32]}"
    library = home / f"{name}.so"
    if library.exists():
        return library
    home.mkdir(parents=True, exist_ok=True)
    with _locked(home / "lock"):
        if library.exists():
            return library
        # The library appears last and whole; whoever finds it finds the source that made it beside it.
        with tempfile.TemporaryDirectory(prefix="build-", dir=home) as scratch:
            kept = home / source.name
            staged = Path(scratch) / source.name
            staged.write_bytes(text)
            os.replace(staged, kept)
            unit = Path(scratch) / (f"{name}.cu" if device.type == "cuda" else f"{name}.cc")
            unit.write_text(f'#include "{kept}"\n')
            files: dict[str, Any] = {"cuda_files" if device.type == "cuda" else "cpp_files": [str(unit)]}
            with _environment(tools.environment):
                built = tvm_ffi.cpp.build(
                    name, build_directory=scratch, extra_cflags=["-UNDEBUG"], extra_ldflags=tools.link_flags, **files
                )
            os.replace(built, library)
    return library


class _Tools:
    """What a build on ``device`` takes: ``environment`` points tvm-ffi at it, ``versions`` tell builds apart."""

    def __init__(self, device: torch.device, caller: str) -> None:
        path = os.environ.get("PATH", os.defpath)
        cxx = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
        if cxx is None or shutil.which(cxx.split()[0]) is None:
            found = f"CXX={cxx} is not there" if cxx else "none on PATH"
            raise ToolchainError(f"{caller} needs a C++ compiler (g++ or clang++; set CXX): {found}")
        if shutil.which("ninja") is None:
            try:
                import ninja
            except ImportError:
                raise ToolchainError(f"{caller} needs ninja to build its kernel: pip install ninja") from None
            path = f"{path}{os.pathsep}{ninja.BIN_DIR}"
        self.environment = {"CXX": cxx, "PATH": path}
        self.link_flags: list[str] = []
        self.versions = [_version([*cxx.split(), "--version"])]
        if device.type == "cuda":
            nvcc = _find_nvcc(caller)
            self.link_flags = [f"-L{nvcc.parent.parent / where}" for where in ("lib64", "lib")]
            self.environment |= {"CUDA_HOME": str(nvcc.parent.parent), "TVM_FFI_GPU_BACKEND": "cuda"}
            self.environment["TVM_FFI_CUDA_ARCH_LIST"] = os.environ.get("TVM_FFI_CUDA_ARCH_LIST") or _arch(device)
            self.versions.append(_version([str(nvcc), "--version"]))


def _find_nvcc(caller: str) -> Path:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    candidates = [Path(home) / "bin" / "nvcc" for home in homes if home]
    if on_path := shutil.which("nvcc"):
        candidates.append(Path(on_path).resolve())
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    compilers = [nvcc for nvcc in candidates if os.access(nvcc, os.X_OK)]
    if not compilers:
        raise ToolchainError(f"{caller} on CUDA needs nvcc: none in $CUDA_HOME/bin, on PATH or in /usr/local/cuda/bin")
    # An nvcc on PATH may be a wrapper script outside its toolkit; tvm-ffi looks for the libraries from here.
    whole = (nvcc for nvcc in compilers if (nvcc.parent.parent / "include" / "cuda_runtime.h").exists())
    return next(whole, compilers[0])


def _arch(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}.{minor}"


def _version(command: list[str]) -> bytes:
    return subprocess.run(command, capture_output=True, check=True).stdout


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
