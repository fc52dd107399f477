"""One build a source, whoever asks for it at once, and whatever dies meanwhile."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from eagle_kv import jit, store

from harness.early import Builds
from harness.fixes import Catalogue

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
ASKS = """
import sys, torch
from pathlib import Path
from eagle_kv import jit, store
print("asks", flush=True)
print(jit.build(Path(sys.argv[1]), torch.device("cpu"), "test"))
"""


class Compiler:
    """The machine's, but it says when it runs, and goes on when it is let."""

    def __init__(self, folder: Path) -> None:
        self.path, self.runs = folder / "c++", 0
        real = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))))
        self.path.write_text(
            f"""#!/bin/sh
case " $* " in *" -c "*) echo >{folder}/runs; read -r _ <{folder}/gate;; esac
exec {real} "$@"
"""
        )
        self.path.chmod(0o755)
        for name in ("runs", "gate"):
            os.mkfifo(folder / name)
        # open at both ends: no one who opens them has to wait for the other
        self._runs, self._gate = (os.open(folder / name, os.O_RDWR) for name in ("runs", "gate"))

    def await_run(self) -> None:
        assert select.select([self._runs], [], [], 60)[0], "no compiler ran"
        self.runs += len(os.read(self._runs, 1))

    def let_go(self) -> None:
        """As many runs as there may be."""
        os.write(self._gate, b"\n" * 16)

    def close(self) -> int:
        """How many times it has run."""
        while select.select([self._runs], [], [], 0)[0]:
            self.await_run()
        for end in (self._runs, self._gate):
            os.close(end)
        return self.runs


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler(tmp_path)
    monkeypatch.setenv("CXX", str(made.path))
    monkeypatch.setenv("EAGLE_KV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "kernels"), str(ROOT)]))
    return made


@pytest.fixture
def builders() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes of their own groups, none of which outlives the test."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def ask(source: Path = store.SOURCE) -> subprocess.Popen[str]:
    """A process that is about to build ``source``."""
    process = subprocess.Popen(
        [sys.executable, "-c", ASKS, str(source)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline() == "asks\n"
    return process


def test_processes_that_race_for_a_build_run_one_compiler(
    compiler: Compiler, builders: list[subprocess.Popen[str]]
) -> None:
    builders += [ask() for _ in range(3)]
    compiler.await_run()
    compiler.let_go()
    answers = {process.communicate(timeout=60)[0] for process in builders}
    assert [process.returncode for process in builders] == [0, 0, 0]
    assert answers == {f"{jit.build(store.SOURCE, CPU, 'test')}\n"}
    assert compiler.close() == 1


def test_what_a_killed_builder_left_is_never_used(compiler: Compiler, builders: list[subprocess.Popen[str]]) -> None:
    builders.append(ask())
    compiler.await_run()
    os.killpg(builders[0].pid, signal.SIGKILL)
    builders[0].wait()
    [home] = (compiler.path.parent / "cache").iterdir()
    half = home / "build-killed" / "store_kvcache.so"  # it may have died a moment later, as it copied
    half.parent.mkdir()
    half.write_bytes(b"half of")
    builders.append(ask())
    compiler.await_run()
    compiler.let_go()
    library = Path(builders[1].communicate(timeout=60)[0].strip())
    assert compiler.close() == 2
    assert sorted(path.name for path in home.iterdir()) == ["lock", "store_kvcache.cuh", "store_kvcache.so"]
    assert library.parent == home and jit.load(store.SOURCE, CPU, "test")["store_cache"]


def test_another_source_does_not_wait_for_a_build(
    compiler: Compiler, builders: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    changed = tmp_path / "changed" / store.SOURCE.name
    changed.parent.mkdir()
    changed.write_text(store.SOURCE.read_text() + "// changed\n")
    builders += [ask(), ask(changed)]
    for _ in builders:  # both compile, and neither has ended
        compiler.await_run()
    compiler.let_go()
    answers = {process.communicate(timeout=60)[0] for process in builders}
    assert len(answers) == 2


@pytest.mark.parametrize("what", ["a flag", "the compiler's version", "the target"])
def test_whatever_goes_into_a_build_makes_another(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tools, text = jit._Tools(CPU, "test"), store.SOURCE.read_bytes()
    before = jit._key(text, CPU, tools)
    assert before == jit._key(text, CPU, jit._Tools(CPU, "test"))
    if what == "a flag":
        monkeypatch.setattr(jit, "_FLAGS", [*jit._FLAGS, "-O1"])
    elif what == "the compiler's version":
        tools.versions = [*tools.versions[:-1], tools.versions[-1] + b"1"]
    else:
        tools.environment["TVM_FFI_CUDA_ARCH_LIST"] = "10.0"
    assert jit._key(text, CPU, tools) != before


SLOT, SIZE = "27486:slot-assert", "27338:topk-factor"


def test_what_is_begun_with_a_run_is_what_its_legs_need(
    compiler: Compiler, catalogue: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNFIX_CACHE", str(tmp_path / "unfix"))
    begun = Builds(catalogue, [SLOT, SIZE], ROOT, "cpu")
    as_it_is, fix_out = begun.sources()
    assert as_it_is == store.SOURCE and "assert(slot" not in fix_out.read_text()
    begun.pytest_sessionstart()
    compiler.let_go()
    assert [process.wait(timeout=60) for process in begun.processes] == [0, 0]
    begun.pytest_sessionfinish()
    assert all(jit.load(source, CPU, "test")["store_cache"] for source in (as_it_is, fix_out))
    assert compiler.close() == 2


def test_a_run_that_needs_no_build_begins_none(catalogue: Catalogue) -> None:
    assert Builds(catalogue, [SIZE, "own:int32-rows"], ROOT, "cpu").sources() == []


def test_builds_end_with_their_run(compiler: Compiler, catalogue: Catalogue) -> None:
    begun = Builds(catalogue, [SLOT], ROOT, "cpu")
    begun.pytest_sessionstart()
    compiler.await_run()
    begun.pytest_sessionfinish()
    assert {process.returncode for process in begun.processes} == {-signal.SIGKILL}
    compiler.let_go()  # ninja's own child outlives it
