"""Build one C++/CUDA source into a tvm-ffi module, once a machine, and load it.

``python -m eagle_kv.jit DEVICE SOURCE…`` builds for later.

A build lies in ``$EAGLE_KV_CACHE``, else ``$XDG_CACHE_HOME/eagle_kv``, else ``~/.cache/eagle_kv``, in a directory named
by the digest of all that goes into it. That directory holds the exact source next to the library made from it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


class ToolchainError(RuntimeError):
    """This machine can't build or keep the library: a tool that is missing or broken, a cache that can't be used."""


def cache_root() -> Path:
    if named := os.environ.get("EAGLE_KV_CACHE"):
        return Path(named).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "eagle_kv"


def load(source: Path, device: torch.device, caller: str) -> Any:
    """The tvm-ffi module of ``source`` for ``device`` ("cpu" or "cuda"), built first if no build of it is there.

    Raises ToolchainError, which starts with ``caller``, for what the machine lacks: one line, and below it a broken
    compiler's last words. Raises RuntimeError with the compiler's own output if the source does not compile.
    """
    import tvm_ffi

    library = build(source, device, caller)
    try:
        return tvm_ffi.load_module(str(library))
    except (OSError, RuntimeError) as error:
        if "undefined symbol" in str(error):  # what the source calls is not there: no fault of the machine's
            raise
        why = (str(error).strip().splitlines() or [""])[-1]
        raise ToolchainError(f"{caller} can't load its build {library}: {why}; remove it to build it again") from None


def build(source: Path, device: torch.device, caller: str) -> Path:
    """The path of the shared library; safe to call from many processes at once."""
    text = source.read_bytes()
    tools = _Tools(device, caller)
    home = cache_root() / f"{source.stem}-{device.type}-{_key(text, device, tools)}"
    library = home / f"{source.stem}.so"
    try:
        _owned(home, caller)
        if library.exists():
            return library
        with _locked(home / "lock"):
            if not library.exists():
                _fill(home, source.name, text, library, tools)
    except OSError as error:
        where = error.filename or home
        raise ToolchainError(
            f"{caller} can't keep its build in {cache_root()}: {where}: {error.strerror or error}; set EAGLE_KV_CACHE"
        ) from None
    return library


def _owned(home: Path, caller: str) -> None:
    """Make a folder for a build, mode 0700. Raises ToolchainError where others may decide what is loaded from there."""
    home.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    home.mkdir(mode=0o700, exist_ok=True)
    for folder in (home.parent, home):
        status = folder.stat()
        if {status.st_uid, folder.lstat().st_uid} != {os.getuid()} or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ToolchainError(
                f"{caller} can't use {folder}, whose builds others could change: remove it, or set"
                " EAGLE_KV_CACHE to a folder of your own"
            )


def _key(text: bytes, device: torch.device, tools: _Tools) -> str:
    import tvm_ffi

    key = hashlib.sha256()
    said = [tools.environment["CXX"], *_FLAGS, *tools.link_flags, tvm_ffi.__version__]
    said.append(str(tools.environment.get("TVM_FFI_CUDA_ARCH_LIST")))
    for part in (text, device.type.encode(), *map(os.fsencode, said), *tools.versions):
        key.update(len(part).to_bytes(8, "little") + part)
    return key.hexdigest()[:32]


def _fill(home: Path, name: str, text: bytes, library: Path, tools: _Tools) -> None:
    """Put the source and its library into ``home``. The library appears last and whole: who finds it finds both.

    To be called under the lock: what is staged there before is of a builder that was killed.
    """
    for left in home.glob("build-*"):
        shutil.rmtree(left, ignore_errors=True)
    kept = home / name
    with tempfile.TemporaryDirectory(prefix="build-", dir=home) as staging:
        staged = Path(staging) / name
        staged.write_bytes(text)
        os.replace(staged, kept)
        with tempfile.TemporaryDirectory(prefix="eagle_kv-", dir=_plain_folder()) as scratch:
            # What an assert prints is the kept file's path, wherever the compiler read it.
            built = tools.compile(Path(scratch), library.stem, b'#line 1 "%s"\n%s' % (_c_string(kept), text))
            shutil.copy(built, Path(staging) / library.name)
        os.replace(Path(staging) / library.name, library)


def _plain_folder() -> Path:
    """A temporary folder whose path ninja and the shell take as it is: the cache's may have blanks, ``$`` or ``:``."""
    for folder in (tempfile.gettempdir(), "/tmp", "/var/tmp"):  # nosec B108
        real = Path(folder).resolve()
        if re.fullmatch(r"[\w./+-]+", str(real), re.ASCII) and os.access(real, os.W_OK | os.X_OK):
            return real
    raise OSError(errno.EINVAL, "no temporary folder with a plain path; set TMPDIR to one", tempfile.gettempdir())


def _c_string(path: Path) -> bytes:
    return os.fsencode(path).replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n")


_FLAGS = ["-UNDEBUG"]  # the source's assert is its slot check
# What any source needs. Tools that can't build this are broken, whatever the source.
_PROBE = b"#include <assert.h>\n#include <tvm/ffi/c_api.h>\n"
_LAST_LINES = 20


class _Tools:
    """What a build on ``device`` takes: ``environment`` points tvm-ffi at it, ``versions`` tell builds apart."""

    def __init__(self, device: torch.device, caller: str) -> None:
        self.device, self.caller = device, caller
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
        self.versions = [_version([*cxx.split(), "--version"], caller)]
        if device.type == "cuda":
            nvcc = _find_nvcc(caller)
            self.link_flags = [f"-L{nvcc.parent.parent / where}" for where in ("lib64", "lib")]
            self.environment |= {"CUDA_HOME": str(nvcc.parent.parent), "TVM_FFI_GPU_BACKEND": "cuda"}
            self.environment["TVM_FFI_CUDA_ARCH_LIST"] = os.environ.get("TVM_FFI_CUDA_ARCH_LIST") or _arch(device)
            self.versions.append(_version([str(nvcc), "--version"], caller))

    def compile(self, scratch: Path, name: str, text: bytes) -> Path:
        """The library made of this text. Raises RuntimeError if it is at fault, ToolchainError if the tools are."""
        try:
            return self._run(scratch, name, text)
        except RuntimeError as error:
            try:
                self._run(scratch, "probe", _PROBE)
            except RuntimeError as broken:
                said = "\n".join(str(broken).strip().splitlines()[-_LAST_LINES:])
                cxx = self.environment["CXX"]
                names = f"nvcc with CXX={cxx}" if self.device.type == "cuda" else f"CXX={cxx}"
                line = f"{self.caller} needs a working compiler: {names} can't build a file of two includes"
                raise ToolchainError(f"{line}\n{said}") from None
            raise error

    def _run(self, scratch: Path, name: str, text: bytes) -> Path:
        import tvm_ffi.cpp

        folder = scratch / name
        folder.mkdir()
        unit = folder / f"{name}{'.cu' if self.device.type == 'cuda' else '.cc'}"
        unit.write_bytes(text)
        files: dict[str, Any] = {"cuda_files" if self.device.type == "cuda" else "cpp_files": [str(unit)]}
        with _environment(self.environment):
            built = tvm_ffi.cpp.build(
                name, build_directory=str(folder), extra_cflags=_FLAGS, extra_ldflags=self.link_flags, **files
            )
        if not Path(built).is_file():
            raise RuntimeError(f"the compiler ended well and wrote no {Path(built).name}")
        return Path(built)


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


def _version(command: list[str], caller: str) -> bytes:
    try:
        return subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        why = str(getattr(error, "strerror", None) or error).rpartition("] ")[2]
        raise ToolchainError(f"{caller} needs a working compiler: {shlex.join(command)}: {why}") from None


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


if __name__ == "__main__":
    for path in sys.argv[2:]:
        build(Path(path), torch.device(sys.argv[1]), "eagle_kv.jit")
