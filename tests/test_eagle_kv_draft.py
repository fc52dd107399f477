"""Draft kv_indices: sizing, the kernel against the reference, and the backends' flow and guards."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import eagle_kv
import numpy
import triton
from eagle_kv import kernel, reference
from eagle_kv.backends import BACKENDS
from eagle_kv.backends.wrappers import StepWrappers
from eagle_kv.batch import DraftBatch, DraftConfig, make_req_to_token
from eagle_kv.kernel import fill_draft_kv_indices
from eagle_kv.multi_layer_eagle import MultiLayerEagleDraftWorker
from eagle_kv.sizing import (
    check_int32_width,
    check_row_fits,
    draft_kv_indices_buffer_width,
    draft_kv_indices_used_len,
)
from packaging.version import Version

from regressions.scenarios import draft_memory

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float32 if INTERPRETED else torch.float16
SOURCE_ROOT = Path(eagle_kv.__file__).parents[1]

# (topk, num_steps, page_size, seq_lens)
SHAPES = [
    pytest.param(2, 2, 1, [3], id="one-request"),
    pytest.param(1, 2, 1, [3], id="topk-1"),
    pytest.param(2, 3, 1, [5], id="context-full"),
    pytest.param(2, 3, 4, [6], id="pages"),
    pytest.param(1, 3, 4, [6, 3], id="pages-topk-1"),
    pytest.param(3, 5, 4, [9, 4, 7], id="pages-uneven"),
    pytest.param(2, 3, 1, [], id="empty-batch"),
    pytest.param(2, 3, 4, [0], id="only-empty"),
    pytest.param(3, 1, 1, [4, 0, 7], id="one-step"),
    pytest.param(2, 3, 1, [2, 0, 5, 1, 3], id="five-requests"),
    pytest.param(2, 2, 1, [1030, 1], id="longer-than-a-tile"),
    pytest.param(4, 3, 1, [0, 1, 2, 3, 4], id="shorter-than-16-bytes"),
    pytest.param(5, 9, 1, [2049], id="many-steps"),
    pytest.param(8, 7, 1, [602], id="edges-as-wide-as-they-get"),
]


def config_of(topk, num_steps, page_size=1, max_bs=6, max_context_len=16, **kwargs):
    return DraftConfig(
        topk=topk,
        num_steps=num_steps,
        page_size=page_size,
        max_bs=max_bs,
        max_context_len=max_context_len,
        dtype=DTYPE,
        device=DEVICE,
        **kwargs,
    )


def batch_of(seq_lens, topk):
    """Requests sit in pool rows that are neither sorted nor the batch's own order."""
    return DraftBatch.of(seq_lens, topk, req_pool_indices=[4, 1, 5, 0, 3][: len(seq_lens)], device=DEVICE)


def expected(config, batch, table):
    lens = batch.seq_lens.tolist()
    lists = reference.kv_indices(
        batch.req_pool_indices, table, lens, topk=config.topk, num_steps=config.num_steps, page_size=config.page_size
    )
    return lists, reference.kv_indptr(lens, topk=config.topk, num_steps=config.num_steps)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("topk", "num_steps", "page_size", "seq_lens"), SHAPES)
def test_kernel_writes_the_reference_and_nothing_else(topk, num_steps, page_size, seq_lens, dtype):
    config = config_of(topk, num_steps, page_size, max_context_len=max(seq_lens, default=0) + 8)
    table = make_req_to_token(config, seed=3)
    batch = batch_of(seq_lens, topk)
    lists, indptr = expected(config, batch, table)
    # A row of exactly the used length, with a stride wider than the row: what is between rows must stay.
    width = len(lists[-1])
    canvas = torch.full((num_steps, width + 5), -9, dtype=dtype, device=DEVICE)
    indptr_canvas = torch.full((num_steps, len(seq_lens) * topk + 3), -9, dtype=torch.int32, device=DEVICE)
    fill_draft_kv_indices(
        batch.req_pool_indices,
        table,
        batch.seq_lens,
        canvas[:, :width],
        indptr_canvas,
        topk=topk,
        page_size=page_size,
    )
    want = torch.full_like(canvas, -9, device="cpu")
    for i, slots in enumerate(lists):
        want[i, : len(slots)] = slots
    want_indptr = torch.full_like(indptr_canvas, -9, device="cpu")
    want_indptr[:, : indptr.shape[1]] = indptr
    assert torch.equal(canvas.cpu(), want)
    assert torch.equal(indptr_canvas.cpu(), want_indptr)


def test_programs_that_are_too_few_for_a_prefix_take_several_tiles_each(monkeypatch):
    monkeypatch.setattr(kernel, "PROGRAMS", 12)  # two a step and request
    config = config_of(2, 3, max_context_len=5000)
    table = make_req_to_token(config, seed=3)
    batch = batch_of([4990, 2100], 2)
    lists, indptr = expected(config, batch, table)
    rows = torch.full((3, len(lists[-1])), -9, dtype=torch.int32, device=DEVICE)
    starts = torch.full((3, 5), -9, dtype=torch.int32, device=DEVICE)
    fill_draft_kv_indices(batch.req_pool_indices, table, batch.seq_lens, rows, starts, topk=2, page_size=1)
    assert torch.equal(starts.cpu().long(), indptr)
    for row, want in zip(rows.cpu(), lists, strict=True):
        assert torch.equal(row[: len(want)].long(), want)


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_kernel_is_captured_once_and_replayed_for_other_lengths():
    config = config_of(3, 4, page_size=4, max_context_len=3000)
    table = make_req_to_token(config, seed=3)
    batch, later = batch_of([1, 1], 3), batch_of([2999, 1030], 3)
    _, last = expected(config, later, table)
    rows = torch.full((4, int(last[-1, -1])), -9, dtype=torch.int32, device=DEVICE)
    indptr = torch.full((4, 7), -9, dtype=torch.int32, device=DEVICE)

    def fill():
        fill_draft_kv_indices(batch.req_pool_indices, table, batch.seq_lens, rows, indptr, topk=3, page_size=4)

    fill()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill()
    batch.seq_lens.copy_(later.seq_lens)
    graph.replay()
    lists, starts = expected(config, later, table)
    assert torch.equal(indptr.cpu().long(), starts)
    for row, want in zip(rows.cpu(), lists, strict=True):
        assert torch.equal(row[: len(want)].long(), want)


def test_draft_positions_are_page_aligned_for_each_branch():
    assert reference.draft_positions(6, 2, 3, 4).tolist() == [[6, 7, 8], [14, 15, 16]]
    assert reference.draft_positions(6, 2, 3, 1).tolist() == [[6, 7, 8], [9, 10, 11]]
    assert reference.draft_positions(6, 1, 3, 4).tolist() == [[6, 7, 8]]
    assert reference.draft_positions(4, 3, 4, 4)[:, 0].tolist() == [4, 8, 12]
    assert reference.draft_positions(7, 2, 1, 4)[:, 0].tolist() == [7, 11]
    assert reference.draft_positions(7, 2, 2, 4)[:, 0].tolist() == [7, 15]
    assert reference.draft_positions(7, 2, 6, 4)[:, 0].tolist() == [7, 19]


def test_kernel_literal_page_4_topk_2_steps_3_seq_len_6():
    table = torch.arange(100, 132, dtype=torch.int32, device=DEVICE)[None]
    batch = DraftBatch.of([6], 2, device=DEVICE)
    rows = torch.zeros((3, 18), dtype=torch.int32, device=DEVICE)
    indptr = torch.full((3, 3), -1, dtype=torch.int32, device=DEVICE)
    fill_draft_kv_indices(batch.req_pool_indices, table, batch.seq_lens, rows, indptr, topk=2, page_size=4)
    prefix = [100, 101, 102, 103, 104, 105]
    assert rows[0, :14].tolist() == [*prefix, 106, *prefix, 114]
    assert rows[2].tolist() == [*prefix, 106, 107, 108, *prefix, 114, 115, 116]
    assert indptr.tolist() == [[0, 7, 14], [0, 8, 16], [0, 9, 18]]


def test_pool_rows_hold_every_draft_position_and_no_slot_twice():
    for topk, num_steps, page_size in [(2, 3, 4), (4, 5, 16), (3, 2, 1), (1, 7, 4)]:
        config = config_of(topk, num_steps, page_size, max_context_len=33)
        for seq_len in range(config.max_context_len + 1):
            assert reference.draft_positions(seq_len, topk, num_steps, page_size).max() < config.pool_len
        table = make_req_to_token(config, seed=0)
        assert table.unique().numel() == table.numel()
        assert page_size <= table.min() and table.max() < config.num_slots


# The row at which step * width passes 2**31, in a sparse mapping: only the touched pages exist.
WRAP_SCRIPT = """
import json, mmap, re, sys
import importlib.util
from pathlib import Path
import torch
from eagle_kv import kernel
from eagle_kv.batch import DraftBatch

def load(text):
    path = Path(sys.argv[1]) / "kernel_without_the_line.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("kernel_without_the_line", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module

source = Path(kernel.__file__).read_text()
reverted, count = re.subn(r"\\n    step = step\\.to\\(tl\\.int64\\)[^\\n]*", "", source)
assert count == 1
width, steps, before = 600_000_000, 5, 2_000_000_000
memory = mmap.mmap(-1, 4 * (before + steps * width), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
flat = torch.frombuffer(memory, dtype=torch.int32)
rows = flat[before:].view(steps, width)
table = torch.arange(1, 33, dtype=torch.int32).view(2, 16)
batch = DraftBatch.of([3, 2], 2)
result = {}
for name, module in (("as-it-is", kernel), ("line-deleted", load(reverted))):
    indptr = torch.zeros((steps, 5), dtype=torch.int32)
    args = (batch.req_pool_indices, table, batch.seq_lens, rows, indptr)
    module.fill_draft_kv_indices(*args, topk=2, page_size=1)
    wrapped = flat[before + 4 * width - 2**32 :][:30]
    result[name] = [rows[3, :26].tolist(), rows[4, :30].tolist(), wrapped.tolist(), indptr[4].tolist()]
    for part in (rows[3, :26], rows[4, :30], wrapped):
        part.zero_()
print(json.dumps(result))
"""


def run_script(script, *args, interpret):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(SOURCE_ROOT)}
    if interpret:
        env["TRITON_INTERPRET"] = "1"
    done = subprocess.run([sys.executable, "-c", script, *args], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a sparse anonymous mapping")
@pytest.mark.skipif(
    Version(triton.__version__) < Version("3.7") and Version(numpy.__version__) >= Version("2.4"),
    reason="the interpreter of Triton 3.6 and older needs NumPy below 2.4",
)
def test_rows_past_2_to_the_31_are_written_in_place(tmp_path):
    result = run_script(WRAP_SCRIPT, str(tmp_path), interpret=True)
    table = torch.arange(1, 33).view(2, 16)
    lists = reference.kv_indices([0, 1], table, [3, 2], topk=2, num_steps=5, page_size=1)
    row3, row4 = lists[3].tolist(), lists[4].tolist()
    nothing, indptr = [0] * 30, [0, 8, 16, 23, 30]
    assert result["as-it-is"] == [row3, row4, nothing, indptr]
    assert result["line-deleted"] == [row3, nothing, row4, indptr]


COMPILE_SCRIPT = """
import json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from eagle_kv.attention_kernel import paged_decode_attention_kernel
from eagle_kv.kernel import generate_draft_decode_kv_indices

def compile(fn, constants, **types):
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in fn.arg_names}
    return triton.compile(ASTSource(fn=fn, signature=signature, constexprs=constants), target=GPUTarget("cuda", 90, 32))

ttir = compile(
    generate_draft_decode_kv_indices,
    dict(page_size=4, seqs_upper=8, topk_upper=2, ends_upper=16, tile=1024),
    req_pool_indices="*i64", req_to_token="*i32", seq_lens="*i64",
    kv_indices="*i32", kv_indptr="*i32",
).asm["ttir"]
attention = compile(
    paged_decode_attention_kernel,
    dict(group_size=2, head_dim=80, dim_upper=128, block_kv=64),
    q="*fp16", k_buffer="*fp16", v_buffer="*fp16", out="*fp16", kv_indptr="*i32", kv_indices="*i64", sm_scale="fp32",
).asm
widened = re.search(r"(%\\w+) = arith\\.extsi %row_stride : i32 to i64", ttir)
offsets = re.findall(r"arith\\.muli [^:]*" + widened[1] + r" : (\\w+)", ttir) if widened else []
print(json.dumps({"row offset": offsets, "attention": "ptx" in attention}))
"""


def test_kernels_compile_for_cuda_with_a_64_bit_row_offset():
    assert run_script(COMPILE_SCRIPT, interpret=False) == {"row offset": ["i64"], "attention": True}


def test_sizing_values():
    assert draft_kv_indices_buffer_width(1, 2, 8) == 16
    assert draft_kv_indices_buffer_width(8, 8, 4096) == 262144
    assert draft_kv_indices_used_len(3, 2, 2, 2) == 10
    assert draft_kv_indices_used_len(7 * 1500, 8, 56, 5) == 84280
    assert draft_kv_indices_used_len(0, 8, 0, 5) == 0


def test_sizing_refuses_a_row_that_int32_cannot_index():
    assert draft_kv_indices_buffer_width(1, 1, 2**31 - 1) == 2**31 - 1
    with pytest.raises(AssertionError) as caught:
        draft_kv_indices_buffer_width(2**10, 2**3, 2**18)
    assert str(caught.value) == (
        "kv_indices row of 2147483648 elements reaches the int32 limit 2147483648 "
        "(num_seqs=1024, topk=8, max_context_len=262144)"
    )
    check_int32_width(2**31 - 1, num_seqs=1, topk=1, max_context_len=2**31 - 1)


def test_row_check_accepts_an_exact_fit_and_names_the_numbers_of_a_misfit():
    check_row_fits(16, 16, topk=2, num_seqs=1, seq_lens_sum=5, num_steps=3)
    with pytest.raises(AssertionError) as caught:
        check_row_fits(84280, 32768, topk=8, num_seqs=7, seq_lens_sum=10500, num_steps=5)
    assert str(caught.value) == (
        "EAGLE draft kv_indices row too small: need 84280, row has 32768 "
        "(topk=8, num_seqs=7, seq_lens_sum=10500, num_steps=5)"
    )


def make_backend(name, config, table):
    if DEVICE == "cuda" and name.startswith("flashinfer"):
        pytest.importorskip("flashinfer")
    return BACKENDS[name](config, table)


@pytest.mark.parametrize("name", list(BACKENDS))
@pytest.mark.parametrize(
    ("topk", "num_steps", "page_size", "seq_lens"),
    [(2, 3, 4, [6, 0, 3]), (2, 2, 1, []), (3, 1, 1, [4]), (1, 4, 1, [12])],
)
def test_backend_metadata_equals_the_reference(name, topk, num_steps, page_size, seq_lens):
    config = config_of(topk, num_steps, page_size, head_dim=64)
    table = make_req_to_token(config, seed=1)
    backend = make_backend(name, config, table)
    batch = batch_of(seq_lens, topk)
    lists, indptr = expected(config, batch, table)
    backend.init_cuda_graph_state(5)
    graph_buffer = backend.cuda_graph_kv_indices
    assert graph_buffer.shape == (num_steps, 5 * topk * 16)
    assert graph_buffer.dtype == (torch.int64 if name == "triton" else torch.int32)
    for init in (backend.init_forward_metadata, backend.init_forward_metadata_replay):
        backend.kv_indptr.fill_(-1)
        init(batch)
        replay = init == backend.init_forward_metadata_replay
        assert backend.kv_indices.shape == (num_steps, (5 if replay else len(seq_lens)) * topk * 16)
        assert (backend.kv_indices is graph_buffer) == replay
        assert len(backend.step_metadata) == num_steps - 1
        for i, (step_indptr, step_indices) in enumerate(backend.step_metadata):
            assert torch.equal(step_indptr.cpu().long(), indptr[i])
            assert torch.equal(step_indices.cpu().long(), lists[i])
        assert torch.equal(backend.kv_indices[-1, : len(lists[-1])].cpu().long(), lists[-1])


HUGE = {"topk": 2, "num_steps": 5, "page_size": 1, "max_bs": 2, "max_context_len": 150_000_000, "seq_lens": [100, 100]}


@pytest.mark.parametrize(
    ("name", "context", "mib"),
    [("flashinfer", 2**27, 2), ("flashinfer_mla", 2**27, 32), ("aiter", 2**27, 128), ("flashinfer", 9, 128)],
)
def test_rows_of_gigabytes_are_all_that_takes_memory(name, context, mib):
    params = {**HUGE, "backend": name, "path": "eager", "max_context_len": context}
    assert config_of(2, 2, **draft_memory.config(params)).workspace_bytes == mib << 20


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("path", ["eager", "cuda_graph"])
@pytest.mark.parametrize("name", ["flashinfer", "flashinfer_mla"])
def test_a_workspace_for_rows_of_gigabytes_is_enough(name, path):
    from harness.leg import run

    pytest.importorskip("flashinfer")
    params = {**HUGE, "backend": name, "path": path, "seq_lens": [100, 3000]}
    request = {"entry": "regressions.scenarios.draft_eagle_kv:run", "params": params, "device": "cuda", "targets": []}
    report = run({**request, "detector": "guard-page", "zone_bytes": 4096})
    assert (report["raised"], report["wrong"], report["facts"]["attended_steps"]) == (None, None, 4)


@pytest.mark.parametrize("name", list(BACKENDS))
@pytest.mark.parametrize("mode", ["eager", "replay"])
def test_backend_refuses_a_batch_that_its_row_cannot_hold_before_it_writes(name, mode):
    """The context wall: context 8, two branches, three steps. A prefix of 5 fits, and one of 6 needs 18 of 16."""
    config = config_of(2, 3, max_bs=1, max_context_len=8)
    backend = make_backend(name, config, make_req_to_token(config))
    backend.init_cuda_graph_state(1)
    init = backend.init_forward_metadata if mode == "eager" else backend.init_forward_metadata_replay
    init(DraftBatch.of([5], 2, device=DEVICE))
    assert len(backend.step_metadata[1][1]) == 14
    before = backend.kv_indices.clone()
    with pytest.raises(AssertionError, match="row too small: need 18, row has 16 .topk=2, num_seqs=1, seq_lens_sum=6"):
        init(DraftBatch.of([6], 2, device=DEVICE))
    assert torch.equal(backend.kv_indices, before)


@pytest.mark.parametrize("name", ["flashinfer", "triton"])
@pytest.mark.parametrize("mode", ["eager", "replay"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2)])
def test_attention_equals_the_reference(name, mode, heads, kv_heads):
    config = config_of(2, 3, 4, max_context_len=96, num_qo_heads=heads, num_kv_heads=kv_heads, head_dim=64)
    table = make_req_to_token(config, seed=1)
    backend = make_backend(name, config, table)
    batch = batch_of([70, 0, 3], 2)
    lists, indptr = expected(config, batch, table)
    backend.init_cuda_graph_state(3)
    (backend.init_forward_metadata if mode == "eager" else backend.init_forward_metadata_replay)(batch)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(6, heads, 64, generator=generator).to(DEVICE, DTYPE)
    k, v = torch.randn(2, config.num_slots, kv_heads, 64, generator=generator).to(DEVICE, DTYPE)
    for i in range(2):
        got = backend.forward_decode(i, q, (k, v))
        want = plain_attention(q, k, v, lists[i], indptr[i], 64**-0.5)
        tolerance = 1e-5 if torch.float32 == DTYPE else 5e-3
        torch.testing.assert_close(got.cpu().float(), want, atol=tolerance, rtol=tolerance)


def plain_attention(q, k, v, slots, indptr, scale):
    """torch's own attention, one branch at a time: what `reference.paged_decode_attention` must equal as well."""
    group = q.shape[1] // k.shape[1]
    out = []
    for z in range(q.shape[0]):
        at = slots[indptr[z] : indptr[z + 1]]
        keys, values = (x.cpu().float()[at].repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        query = q[z].cpu().float()[:, None]
        out.append(torch.nn.functional.scaled_dot_product_attention(query, keys, values, scale=scale)[:, 0])
    return torch.stack(out)


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_one_list_names_reaches_no_other(odd):
    """Slot 1 is the last of the first list, and nothing of the others: the second is empty, the third a shorter one."""
    k, v = torch.randn(3, 1, 4), torch.ones(3, 1, 4)
    v[1] = odd
    indptr, slots = torch.tensor([0, 2, 2, 3]), torch.tensor([0, 1, 2])
    got = reference.paged_decode_attention(torch.randn(3, 1, 4), k, v, indptr, slots, 0.5)
    assert got[1].eq(0).all() and torch.allclose(got[2], torch.ones(1, 4))


@pytest.mark.parametrize("mode", ["eager", "replay"])
def test_mla_attention_takes_topk_8(mode):
    config = config_of(8, 3, max_bs=2, num_qo_heads=4, head_dim=128)
    table = make_req_to_token(config, seed=1)
    backend = make_backend("flashinfer_mla", config, table)
    batch = DraftBatch.of([9, 4], 8, device=DEVICE)
    lists, indptr = expected(config, batch, table)
    backend.init_cuda_graph_state(2)
    (backend.init_forward_metadata if mode == "eager" else backend.init_forward_metadata_replay)(batch)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(16, 4, 576, generator=generator).to(DEVICE, DTYPE)
    cache = torch.randn(config.num_slots, 576, generator=generator).to(DEVICE, DTYPE)
    parts = (q[..., :512].contiguous(), q[..., 512:].contiguous())
    kv = (cache[:, :512].contiguous(), cache[:, 512:].contiguous())
    for i in range(2):
        got = backend.forward_decode(i, parts, kv)
        want = plain_attention(q, cache[:, None], cache[:, None, :512], lists[i], indptr[i], 192**-0.5)
        tolerance = 1e-5 if torch.float32 == DTYPE else 1e-2
        torch.testing.assert_close(got.cpu().float(), want, atol=tolerance, rtol=tolerance)


def test_aiter_says_that_its_attention_needs_rocm():
    config = config_of(2, 3)
    backend = BACKENDS["aiter"](config, make_req_to_token(config))
    backend.init_forward_metadata(batch_of([3], 2))
    with pytest.raises(NotImplementedError, match="ROCm"):
        backend.forward_decode(0, torch.zeros(2, 2, 64), (torch.zeros(1), torch.zeros(1)))


def test_backends_say_what_is_wrong_with_a_call():
    config = config_of(2, 3, max_bs=2)
    backend = BACKENDS["aiter"](config, make_req_to_token(config))
    with pytest.raises(RuntimeError, match="before init_cuda_graph_state"):
        backend.init_forward_metadata_replay(batch_of([3], 2))
    backend.init_cuda_graph_state(1)
    with pytest.raises(ValueError, match="batch of 2 requests: the graph state is for 1"):
        backend.init_forward_metadata_replay(DraftBatch.of([3, 3], 2, device=DEVICE))
    with pytest.raises(ValueError, match="batch of 3 requests: the request pool holds 2"):
        backend.init_forward_metadata(batch_of([1, 1, 1], 2))
    with pytest.raises(KeyError, match="no draft backend is called 'fa9'; there are: flashinfer"):
        BACKENDS["fa9"]
    with pytest.raises(ValueError, match="num_qo_heads=3 must be a multiple of num_kv_heads=2"):
        config_of(1, 1, num_qo_heads=3, num_kv_heads=2)
    with pytest.raises(ValueError, match="topk must be at least 1, got 0"):
        config_of(0, 1)
    with pytest.raises(ValueError, match="workspace_bytes must be at least 1, got 0"):
        config_of(1, 1, workspace_bytes=0)
    with pytest.raises(ValueError, match="2 seq_lens but 1 req_pool_indices"):
        DraftBatch.of([1, 2], 1, req_pool_indices=[0])


def test_importing_the_package_and_its_backends_imports_nothing_heavy():
    script = (
        "import json, sys, eagle_kv, eagle_kv.sizing, eagle_kv.backends as b; assert 'triton' in b.BACKENDS;"
        "print(json.dumps([m for m in ('torch', 'triton', 'flashinfer', 'harness') if m in sys.modules]))"
    )
    assert run_script(script, interpret=False) == []


def test_multi_layer_eagle_drafts_a_chain_behind_the_bonus_token():
    worker = MultiLayerEagleDraftWorker(3, 4)
    bonus, hidden = torch.tensor([5, 9]), torch.linspace(-1, 1, 64).view(2, 32)
    packed = worker.draft(bonus, hidden)
    assert packed.shape == (2, 4) and packed[:, 0].tolist() == [5, 9]
    assert ((packed >= 0) & (packed < 64)).all()
    # A request's chain depends on that request alone, and on the seed.
    assert torch.equal(worker.draft(bonus[1:], hidden[1:]), packed[1:])
    assert torch.equal(MultiLayerEagleDraftWorker(3, 4).draft(bonus, hidden), packed)
    assert not torch.equal(MultiLayerEagleDraftWorker(3, 4, seed=1).draft(bonus, hidden), packed)


@pytest.mark.parametrize("num_draft_tokens", [3, 5, 8])
def test_multi_layer_eagle_refuses_any_other_length_at_start(num_draft_tokens):
    with pytest.raises(AssertionError) as caught:
        MultiLayerEagleDraftWorker(3, num_draft_tokens)
    assert str(caught.value) == (
        f"speculative_num_draft_tokens={num_draft_tokens} must equal speculative_num_steps + 1 = 4"
    )


def test_multi_layer_eagle_without_the_check_fails_on_a_shape(monkeypatch):
    monkeypatch.setattr("eagle_kv.multi_layer_eagle.check_num_draft_tokens", lambda *_: None)
    worker = MultiLayerEagleDraftWorker(3, 8)
    with pytest.raises(RuntimeError, match="shape .* is invalid for input of size 8"):
        worker.draft(torch.tensor([5, 9]), torch.zeros(2, 32))


def test_wrappers_are_kept_for_a_batch_size_and_dropped_with_their_buffer():
    made = []
    wrappers = StepWrappers(2, lambda **buffers: made.append(buffers) or buffers, lambda step, n: {"at": (step, n)})
    first, second = torch.zeros(1), torch.zeros(1)
    eager, four = wrappers.eager(), wrappers.in_graph(4, first)
    assert [w["at"] for w in four] == [(0, 4), (1, 4)] and all(w["use_cuda_graph"] for w in four)
    wrappers.in_graph(6, first)
    assert wrappers.in_graph(4, first) is four and wrappers.eager() is eager and len(made) == 6
    assert wrappers.in_graph(4, second) is not four
    assert wrappers.eager() is eager
