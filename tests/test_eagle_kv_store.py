"""The store kernel and its slot assert, on the C++ build of the CUDA source (case table: store rows 10 to 14)."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from eagle_kv import jit, store
from eagle_kv.kv_pool import KVPool
from eagle_kv.store import store_cache

ROOT = Path(__file__).parent.parent
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory):
    """One build directory for this file, so that the tests build what is in the tree now."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE_KV_CACHE", str(tmp_path_factory.mktemp("eagle_kv")))
        yield


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "kernels"), str(ROOT)])
    env = os.environ | {"PYTHONPATH": path} | environment
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)


def rows_and_caches(rows: int, elems: int, slots: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + elems)
    shapes = [(rows, elems)] * 2 + [(slots, elems)] * 2
    return [torch.randint(0, 100, s, generator=generator).to(dtype).to(device) for s in shapes]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("row_bytes", [4, 8, 12, 20, 256, 512, 1024, 2048, 4096])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32])
def test_rows_of_every_size_are_stored_exactly(row_bytes: int, dtype: torch.dtype, device: str) -> None:
    k, v, k_cache, v_cache = rows_and_caches(19, row_bytes // dtype.itemsize, 40, dtype, device)
    indices = torch.randperm(40, generator=torch.Generator().manual_seed(1))[:19].to(device)
    want_k, want_v = k_cache.clone(), v_cache.clone()
    want_k[indices], want_v[indices] = k, v
    store_cache(k, v, k_cache, v_cache, indices)
    assert torch.equal(k_cache, want_k)
    assert torch.equal(v_cache, want_v)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("pitch", [8, 9, 11, 24])
def test_strided_rows_caches_and_indices(pitch: int, index_dtype: torch.dtype, device: str) -> None:
    wide = rows_and_caches(5, pitch + 1, 9, torch.float16, device)
    views = [t[:, 1 : 1 + 8] for t in wide]  # odd pitches leave 2-byte alignment only
    k, v, k_cache, v_cache = views
    want = [t.clone() for t in wide]
    indices = torch.tensor([8, 77, 0, 77, 3, 77, 4, 77, 1], device=device).to(index_dtype)[::2]
    want[2][indices.long(), 1:9], want[3][indices.long(), 1:9] = k, v
    store_cache(k, v, k_cache, v_cache, indices)
    for got, expected in zip(wide, want, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_zero_rows_store_nothing(device: str) -> None:
    k, v, k_cache, v_cache = rows_and_caches(0, 8, 4, torch.float16, device)
    before = k_cache.clone()
    store_cache(k, v, k_cache, v_cache, torch.empty(0, dtype=torch.int64, device=device))
    assert torch.equal(k_cache, before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 2])
def test_a_lone_row_is_stored_whatever_its_stride(rows: int, device: str) -> None:
    k, v, k_cache, v_cache = rows_and_caches(rows, 24, rows, torch.float16, device)
    lone = k[:, :8], v[:, :8], k_cache[:, 8:16], v_cache[:, 16:]
    want = k_cache.clone()
    want[:, 8:16] = k[:, :8]
    store_cache(*lone, torch.arange(rows, device=device))
    assert torch.equal(k_cache, want)
    assert torch.equal(v_cache[:, 16:], v[:, :8])


@pytest.mark.parametrize("device", DEVICES)
def test_padding_slot_last_slot_and_a_repeated_slot_are_accepted(device: str) -> None:
    pool = KVPool(num_slots=8, page_size=4, num_kv_heads=2, head_dim=4, dtype=torch.float16, device=device)
    assert pool.k_buffer.shape == pool.v_buffer.shape == (12, 2, 4)
    k = torch.arange(32, device=device).view(4, 2, 4).half()
    pool.set_kv_buffer(torch.tensor([0, 11, 5, 5], device=device), k, -k)
    assert torch.equal(pool.k_buffer[[0, 11]], k[:2])
    assert torch.equal(pool.v_buffer[[0, 11]], -k[:2])
    assert any(torch.equal(pool.k_buffer[5], k[row]) for row in (2, 3))
    assert not pool.k_buffer[[1, 2, 3, 4, 6, 7, 8, 9, 10]].any()


BAD_SLOT = """
import torch
from eagle_kv.store import store_cache
k = torch.ones(3, 8, dtype=torch.float16, device={device!r})
cache = torch.zeros({slots}, 8, dtype=torch.float16, device={device!r})
store_cache(k, k, cache, cache.clone(), torch.tensor([1, {slot}, 2], device={device!r}), size_limit={limit})
if cache.is_cuda:
    torch.cuda.synchronize()
print("stored")
"""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("slot", "limit"),
    [(-1, 12), (12, 12), (13, 12), (2**31, 12), (2**40, 12), (10, 10), (12, 0), (-(2**31), 0)],
)
def test_a_slot_out_of_bounds_aborts_at_the_write_and_names_the_bound(slot: int, limit: int, device: str) -> None:
    done = python(BAD_SLOT.format(device=device, slots=12, slot=slot, limit=limit))
    assert "stored" not in done.stdout
    assert "slot >= 0 && slot < params.size_limit" in done.stderr
    if device == "cpu":
        assert done.returncode == -signal.SIGABRT
    else:
        assert "device-side assert" in done.stderr


@pytest.mark.parametrize(("slot", "limit"), [(11, 0), (11, 12), (9, 10), (0, 10)])
def test_the_slots_next_to_the_bound_pass(slot: int, limit: int) -> None:
    k, v, k_cache, v_cache = rows_and_caches(1, 8, 12, torch.float16, "cpu")
    store_cache(k, v, k_cache, v_cache, torch.tensor([slot]), size_limit=limit)
    assert torch.equal(k_cache[slot], k[0])
    assert torch.equal(v_cache[slot], v[0])


def test_the_assert_is_one_line_and_the_kernel_stores_without_it(tmp_path: Path) -> None:
    lines = store.SOURCE.read_text().splitlines(keepends=True)
    kept = [line for line in lines if line.strip() != "assert(slot >= 0 && slot < params.size_limit);"]
    assert len(kept) == len(lines) - 1
    source = tmp_path / store.SOURCE.name
    source.write_text("".join(kept))
    kernel = jit.load(source, torch.device("cpu"), "test")["store_cache"]
    whole = torch.zeros(5, 8, dtype=torch.float16)
    k = torch.ones(1, 8, dtype=torch.float16)
    # Rows 1 to 3 are the cache, so slots -1 and 3 land in rows 0 and 4.
    for slot in (-1, 3):
        store._launch(kernel, k, k, whole[1:4], whole[1:4], torch.tensor([slot]), 3)
    assert whole[:, 0].tolist() == [1, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"k": torch.zeros(2, 3, dtype=torch.float16)},
            "v holds rows of 8 x float32 on cpu: must match k's, 3 x float16",
        ),
        ({"k": torch.zeros(2, 8, 1)}, "k has shape (2, 8, 1): must be 2-D"),
        ({"v": torch.zeros(8, 2).t()}, "v has stride 2 within a row: elements of a row must be adjacent"),
        ({"indices": torch.zeros(2, dtype=torch.int16)}, "indices are int16 on cpu: must be int32 or int64 on cpu"),
        ({"indices": torch.zeros(3, dtype=torch.int64)}, "indices have shape (3) for 2 rows of k and 2 of v"),
        ({"indices": torch.zeros((), dtype=torch.int64)}, "indices have shape () for 2"),
        ({"k": torch.zeros(2, 8, device="meta")}, "tensors are on meta: must be on cpu or cuda"),
        ({"v": None}, "takes five tensors and an integer"),
        ({"size_limit": 7}, "size_limit is 7: must be 0 to 6"),
        ({"size_limit": -1}, "size_limit is -1"),
        ({"size_limit": 2.0}, "takes five tensors and an integer"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(change: dict, message: str) -> None:
    arguments = {"k": torch.zeros(2, 8), "v": torch.zeros(2, 8), "indices": torch.zeros(2, dtype=torch.int64)}
    caches = {"k_cache": torch.zeros(6, 8), "v_cache": torch.zeros(6, 8)}
    with pytest.raises(ValueError) as caught:
        store_cache(**(arguments | caches | change))
    assert message in str(caught.value)


def test_a_row_of_6_bytes_is_refused() -> None:
    k, cache = torch.zeros(1, 3, dtype=torch.float16), torch.zeros(4, 3, dtype=torch.float16)
    with pytest.raises(ValueError, match="row of 6 bytes: must be a multiple of 4"):
        store_cache(k, k, cache, cache, torch.tensor([0]))


def test_a_build_lies_beside_its_source_and_is_reused() -> None:
    library = jit.build(store.SOURCE, torch.device("cpu"), "test")
    assert (library.parent / store.SOURCE.name).read_bytes() == store.SOURCE.read_bytes()
    assert sorted(p.name for p in library.parent.iterdir()) == ["lock", "store_kvcache.cuh", "store_kvcache.so"]
    stamp = library.stat().st_mtime_ns
    assert jit.build(store.SOURCE, torch.device("cpu"), "test") == library
    assert library.stat().st_mtime_ns == stamp


def test_a_changed_source_is_another_build(tmp_path: Path) -> None:
    source = tmp_path / store.SOURCE.name
    source.write_text(store.SOURCE.read_text() + "// changed\n")
    changed = jit.build(source, torch.device("cpu"), "test")
    assert changed.parent != jit.build(store.SOURCE, torch.device("cpu"), "test").parent


def test_processes_that_build_at_once_share_one_build(tmp_path: Path) -> None:
    code = "import torch; from eagle_kv import jit, store; print(jit.build(store.SOURCE, torch.device('cpu'), 'test'))"
    path = os.pathsep.join([str(ROOT / "kernels"), str(ROOT)])
    env = os.environ | {"PYTHONPATH": path, "EAGLE_KV_CACHE": str(tmp_path)}
    runs = [subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) for _ in "123"]
    answers = {run.communicate(timeout=120)[0].strip() for run in runs}
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert len(answers) == 1
    assert Path(answers.pop()).exists()


def test_the_source_is_found_next_to_the_file_that_was_imported(tmp_path: Path) -> None:
    package = ROOT / "kernels" / "eagle_kv"
    overlay = tmp_path / "eagle_kv"
    (overlay / "csrc").mkdir(parents=True)
    for entry in package.iterdir():
        if entry.name not in ("csrc", "__pycache__"):
            (overlay / entry.name).symlink_to(entry)
    (overlay / "csrc" / store.SOURCE.name).write_text("")
    done = python("from eagle_kv.store import SOURCE; print(SOURCE)", PYTHONPATH=str(tmp_path))
    assert done.stdout.strip() == str(overlay / "csrc" / store.SOURCE.name)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PATH": "/nowhere"}, "store_cache needs a C++ compiler (g++ or clang++; set CXX): none on PATH"),
        ({"CXX": "/nowhere/g++"}, "store_cache needs a C++ compiler (g++ or clang++; set CXX): CXX=/nowhere/g++"),
    ],
)
def test_a_missing_compiler_is_one_clear_line(environment: dict, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError) as caught:
        jit.build(store.SOURCE, torch.device("cpu"), "store_cache")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_ninja_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "g++").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setitem(sys.modules, "ninja", None)
    with pytest.raises(RuntimeError, match="^store_cache needs ninja to build its kernel: pip install ninja$"):
        jit.build(store.SOURCE, torch.device("cpu"), "store_cache")


@pytest.mark.parametrize("name", ["with blank", "a$b", "a:b", "a'b", 'a"b\\c', "a&b;#", "ü"])
def test_a_cache_of_any_name_holds_a_build_whose_assert_names_the_kept_source(name: str, tmp_path: Path) -> None:
    code = BAD_SLOT.format(device="cpu", slots=12, slot=-1, limit=12)
    done = python(code, EAGLE_KV_CACHE=str(tmp_path / name))
    assert done.returncode == -signal.SIGABRT
    [kept] = (tmp_path / name).glob("*/store_kvcache.cuh")
    line = next(n for n, text in enumerate(kept.read_text().splitlines(), 1) if "assert(slot" in text)
    assert f"{kept}:{line}: " in done.stderr
    assert sorted(p.name for p in kept.parent.iterdir()) == ["lock", "store_kvcache.cuh", "store_kvcache.so"]


def test_a_temporary_folder_with_a_blank_in_its_path_is_not_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "t m p").mkdir()
    code = "import torch; from eagle_kv import jit, store; print(jit.build(store.SOURCE, torch.device('cpu'), 'test'))"
    done = python(code, EAGLE_KV_CACHE=str(tmp_path / "c"), TMPDIR=str(tmp_path / "t m p"))
    assert Path(done.stdout.strip()).is_file(), done.stderr


def no_cache(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that can't be used, each in its own way."""
    cache = tmp_path / "cache"
    if kind == "a file":
        cache.touch()
    elif kind == "below a file":
        (tmp_path / "file").touch()
        cache = tmp_path / "file" / "cache"
    elif kind == "a lock that is a directory":
        tools = jit._Tools(torch.device("cpu"), "test")
        key = jit._key(store.SOURCE.read_bytes(), torch.device("cpu"), tools)
        (cache / f"store_kvcache-cpu-{key}" / "lock").mkdir(parents=True)
    else:

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(jit.shutil, "copy", full)
    return cache


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("a file", "File exists"),
        ("below a file", "Not a directory"),
        ("a lock that is a directory", "Is a directory"),
        ("a full disk", "No space left on device"),
    ],
)
def test_a_cache_that_cannot_be_used_is_one_clear_line(
    kind: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = no_cache(kind, tmp_path, monkeypatch)
    monkeypatch.setenv("EAGLE_KV_CACHE", str(cache))
    with pytest.raises(jit.ToolchainError) as caught:
        jit.build(store.SOURCE, torch.device("cpu"), "store_cache")
    assert str(caught.value).startswith(f"store_cache can't keep its build in {cache}: ")
    assert message in str(caught.value) and str(caught.value).endswith("; set EAGLE_KV_CACHE")
    assert "\n" not in str(caught.value)
    assert not list(cache.glob("*/build-*") if cache.is_dir() else [])


def compiler(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("script", ["exit 3", "kill -9 $$"])
def test_a_compiler_that_does_not_tell_its_version_is_one_clear_line(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cxx = compiler(tmp_path / "g++", script)
    monkeypatch.setenv("CXX", cxx)
    with pytest.raises(jit.ToolchainError, match="^store_cache needs a working compiler: ") as caught:
        jit.build(store.SOURCE, torch.device("cpu"), "store_cache")
    assert f"{cxx} --version: " in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ('[ "$1" = --version ] && exit; echo "no licence today" >&2; exit 1', "no licence today"),
        ("exit 0", "wrote no probe.so"),
    ],
)
def test_a_compiler_that_builds_nothing_at_all_is_the_machine_s_fault(
    script: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cxx = compiler(tmp_path / "g++", script)
    monkeypatch.setenv("CXX", cxx)
    with pytest.raises(jit.ToolchainError, match="^store_cache needs a working compiler: ") as caught:
        jit.build(store.SOURCE, torch.device("cpu"), "store_cache")
    first, _, rest = str(caught.value).partition("\n")
    assert cxx in first and words in rest


def test_a_source_that_does_not_compile_is_the_source_s_fault(tmp_path: Path) -> None:
    source = tmp_path / store.SOURCE.name
    source.write_text(store.SOURCE.read_text() + "int broken = missing;\n")
    with pytest.raises(RuntimeError, match="missing") as caught:
        jit.build(source, torch.device("cpu"), "store_cache")
    assert not isinstance(caught.value, jit.ToolchainError)
    assert f"store_kvcache.cuh:{len(source.read_text().splitlines())}:" in str(caught.value)


def test_a_build_that_is_damaged_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_KV_CACHE", str(tmp_path))
    library = jit.build(store.SOURCE, torch.device("cpu"), "test")
    library.write_bytes(b"no library")
    with pytest.raises(jit.ToolchainError, match="^store_cache can't load its build .*store_kvcache.so: ") as caught:
        jit.load(store.SOURCE, torch.device("cpu"), "store_cache")
    assert "\n" not in str(caught.value)


def test_a_missing_nvcc_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit.os, "access", lambda path, mode: not str(path).endswith("nvcc"))
    with pytest.raises(RuntimeError, match="^store_cache on CUDA needs nvcc: none in "):
        jit.build(store.SOURCE, torch.device("cuda"), "store_cache")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_store_is_captured_and_replayed_by_a_cuda_graph() -> None:
    k, v, k_cache, v_cache = rows_and_caches(4, 64, 16, torch.float16, "cuda")
    indices = torch.tensor([3, 5, 7, 9], device="cuda")
    store_cache(k, v, k_cache, v_cache, indices)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        store_cache(k, v, k_cache, v_cache, indices)
    k.fill_(42)
    indices.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert (k_cache[indices] == 42).all()
