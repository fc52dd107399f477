"""Turns on a GPU, across processes; and which cases take turns, by what their buffers really hold."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from eagle_kv.sizing import draft_kv_indices_buffer_width

from harness import device, turns
from harness.errors import InfraError
from harness.turns import MUCH, turn
from regressions import draft_tables, test_27486, test_28788, test_own
from regressions.scenarios import draft
from regressions.scenarios.draft import GUARDS

ROOT = Path(__file__).parents[1]
INSTALLED = ["GPU-8932f937-d72c", "GPU-e429a63e-c61c"]
# says a line before it asks for the turn and one when it has it, and keeps it for good
HOLDER = """
import sys
from harness.turns import turn
print("asks", flush=True)
with turn(sys.argv[1], int(sys.argv[2])):
    print("has it", flush=True)
    sys.stdin.readline()
"""
Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("UNFIX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def start() -> Iterator[Start]:
    """Another process that asks for a turn; it can be read from once it does."""
    with ExitStack() as ends:

        def started(gpu: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", HOLDER, gpu, str(MUCH)]
            env = {**os.environ, "PYTHONPATH": str(ROOT)}
            process = subprocess.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            ends.callback(kill, process)
            assert says(process) == "asks\n"
            return process

        yield started


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline()


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def is_free(gpu: str, device_bytes: int = MUCH) -> bool:
    """Whether a turn would be had without waiting."""

    class Busy(Exception):
        pass

    def at_once(lock: int, operation: int) -> None:
        try:
            fcntl.flock(lock, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy from None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns, "fcntl", type("Fcntl", (), {"flock": staticmethod(at_once), "LOCK_EX": fcntl.LOCK_EX}))
        try:
            with turn(gpu, device_bytes):
                return True
        except Busy:
            return False


def test_a_turn_is_one_process_s_until_it_dies(start):
    first = start("5")
    assert says(first) == "has it\n"
    assert not is_free("5")
    assert is_free("3")  # another GPU
    assert is_free("5", MUCH - 1)  # needs little
    second = start("5")
    kill(first)
    assert says(second) == "has it\n"
    assert not is_free("5")
    kill(second)
    assert is_free("5")


def test_a_turn_ends_with_its_leg(cache):
    with pytest.raises(ZeroDivisionError), turn("0", MUCH):
        assert not is_free("0")
        server = subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False)  # started in a turn, and outlives it
        raise ZeroDivisionError
    assert is_free("0")
    server.communicate()


def test_little_memory_takes_no_turn_and_no_cache(monkeypatch):
    monkeypatch.setenv("UNFIX_CACHE", "/dev/null/cache")
    with turn("0", 0), turn("0", MUCH - 1):
        pass


@pytest.mark.parametrize(
    ("gpu", "same", "other"),
    [
        ("1", ["GPU-e429a63e-c61c", "GPU-e4", " 1", "1gpu"], ["0", "GPU-8"]),
        ("MIG-GPU-8932f937-d72c/1/2", ["MIG-GPU-8932f937-d72c/1/2"], ["GPU-8", "MIG-GPU-8932f937-d72c/1/0"]),
        ("../../x", ["../../x"], ["..", "x", "/x"]),
        ("..", [".."], [".", "0"]),
    ],
)
def test_a_gpu_has_one_turn_whatever_it_is_called(monkeypatch, cache, gpu, same, other):
    monkeypatch.setattr(device, "uuids", lambda: INSTALLED)
    with turn(gpu, MUCH):
        assert [is_free(name) for name in same] == [False] * len(same)
        assert [is_free(name) for name in other] == [True] * len(other)
    assert {path.parent for path in cache.parent.rglob("*") if path.is_file()} == {cache / "turns"}


def test_a_cache_that_can_t_be_written_is_one_line(cache):
    cache.mkdir(mode=0o700)
    (cache / "turns").write_text("")
    said = f"^no turn on GPU 5 can be taken in {cache}/turns: .*; set UNFIX_CACHE$"
    with pytest.raises(InfraError, match=said), turn("5", MUCH):
        pass


def test_a_file_system_without_locks_is_one_line(monkeypatch, cache):
    def flock(lock, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(turns.fcntl, "flock", flock)
    with pytest.raises(InfraError, match="can be taken in .*: No locks available; set UNFIX_CACHE$"), turn("5", MUCH):
        pass


BIG_DRAFTS = [*test_27486.widths("cuda"), *test_own.wide_rows("cuda")]
BIG_ATTENTION = [
    case
    for batches in (test_28788.STAGE1, test_28788.GROUPED, test_28788.STAGE2)
    for case in test_28788.batches(batches)("cuda")
    if case.params["stride"] > 1 << 20
]
SIZED = [case for fix in ("27338:topk-factor", "27460:topk-factor") for case in draft_tables.size_cases(fix)("cuda")]
WALLS = [case for fix in GUARDS.values() for case in draft_tables.wall_cases(fix)("cuda")]


def named(cases):
    return {"argvalues": cases, "ids": [case.id for case in cases]}


def row_bytes(params) -> int:
    """kv_indices, (num_steps, width), as the code under test sizes it."""
    rows = params["max_bs"] if params["path"] == "cuda_graph" else len(params["seq_lens"])
    width = draft_kv_indices_buffer_width(rows, params["topk"], params["max_context_len"])
    return params["num_steps"] * width * (8 if params["backend"] == "triton" else 4)


@pytest.mark.parametrize("case", **named([*BIG_DRAFTS, *BIG_ATTENTION]))
def test_rows_of_gigabytes_are_hardly_any_memory_and_take_no_turns(case):
    assert case.detector == "guard-page" and case.device_bytes < 64 << 20


@pytest.mark.parametrize(("max_context_len", "folded"), [(2**16, False), (2**17 - 1, False), (2**17, True)])
def test_only_rows_beyond_int32_are_folded(max_context_len, folded):
    """With kv_indptr intact, values are compared: they must be there."""
    sizes = {"backend": "aiter", "path": "eager", "topk": 512, "num_steps": 1, "page_size": 1, "max_bs": 32}
    lens = [max_context_len - 1] * 32
    shape = draft.Shape(**sizes, max_context_len=max_context_len, seq_lens=lens)
    assert shape.is_folded is folded and (shape.used >= 2**31) is folded


@pytest.mark.parametrize("case", **named(test_own.wide_rows("cuda")))
def test_wide_rows_that_are_all_memory_are_counted_and_take_turns(case):
    shape = draft.Shape(**case.params)
    assert MUCH <= row_bytes(case.params) <= shape.buffer_bytes("red-zone") <= 1.01 * row_bytes(case.params)


def test_ordinary_shapes_take_no_turns_and_the_largest_are_counted():
    assert all(row_bytes(case.params) < case.device_bytes < MUCH for case in [*SIZED, *WALLS])
    gigabyte = [case for case in SIZED if case.device_bytes >= 1 << 30]
    assert [case.params["max_bs"] * case.params["max_context_len"] for case in gigabyte] == [64 * 8192] * 2
    assert {case.backend for case in gigabyte} == {"flashinfer_mla"}
