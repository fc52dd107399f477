"""The leg's side of the draft scenario on SGLang's own, unmodified classes. Imported in the leg's process only.

What is real and what stands in around the backends is in :mod:`regressions.scenarios.sglang_world`. Of the attention
children, one a step:

============== ========================== ================================================================
backend        on a CPU                   on a GPU
============== ========================== ================================================================
flashinfer     PlannedOnly                real: plan, CUDA-graph wrappers, captured and replayed attention
triton         real, in the interpreter   real, captured and replayed attention
flashinfer_mla PlannedOnly                topk 1: real, planned for real; more: PlannedOnly. No attention
aiter          PlannedOnly                PlannedOnly: its attention needs ROCm
============== ========================== ================================================================

FlashInfer MLA refuses topk > 1 in its constructor, and its children plan for one branch a request. So for more it is
made with topk 1 over a request pool that says it is topk times as large, which gives its kv_indptr the shape that the
constructor computes for topk, and is then told its topk. Every method that runs afterwards is unmodified.

The Triton children ask sgl_kernel, an import stub here, whether a launch may overlap the one before: they are told no.

An instance's ``common_template`` is called through a recorder. It keeps the buffer that it was given, since the eager
path makes one of its own and forgets it, and ``kv_indptr`` as the kernel left it: FlashInfer MLA's children, planned
eagerly, write prefixes without draft tokens over it (docs/findings.md).

SGLang cannot run num_steps 1 (a backend's constructor reads its first child) nor an empty batch (no server sends one).
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from eagle_kv import reference
from eagle_kv.batch import DraftConfig

from harness import memory
from regressions.scenarios import draft_memory
from regressions.scenarios import sglang_world as world
from regressions.scenarios.compare import close, same

_ATTENTION = "sglang.srt.layers.attention"
BACKENDS = {  # backend: module, class, its children's class
    "flashinfer": (f"{_ATTENTION}.flashinfer_backend", "FlashInferMultiStepDraftBackend", "FlashInferAttnBackend"),
    "flashinfer_mla": (
        f"{_ATTENTION}.flashinfer_mla_backend",
        "FlashInferMLAMultiStepDraftBackend",
        "FlashInferMLAAttnBackend",
    ),
    "triton": (f"{_ATTENTION}.triton_backend", "TritonMultiStepDraftBackend", "TritonAttnBackend"),
    "aiter": (f"{_ATTENTION}.aiter_backend", "AiterMultiStepDraftBackend", "AiterAttnBackend"),
}
# What the fork server of a selection imports, so that no leg does.
PRELOAD = (
    *(module for module, _, _ in BACKENDS.values()),
    "sglang.srt.mem_cache.memory_pool",
    "sglang.srt.server_args",
    "sglang.srt.layers.radix_attention",
)


def run(params: dict[str, Any], device: str) -> dict[str, Any]:
    name, seq_lens = params["backend"], params["seq_lens"]
    mla = name == "flashinfer_mla"
    config = DraftConfig(
        topk=params["topk"], num_steps=params["num_steps"], page_size=params["page_size"], max_bs=params["max_bs"],
        max_context_len=params["max_context_len"], num_qo_heads=16 if mla else 4, num_kv_heads=1 if mla else 2,
        dtype=torch.float16 if device == "cuda" else torch.float32, device=device,
    )  # fmt: skip
    if config.num_steps < 2 or not seq_lens:
        raise ValueError("SGLang's draft backends need num_steps >= 2 and at least one request")
    draft_memory.expect(params)
    with world.on(device):
        runner = world.model_runner(config, seq_lens, mla=mla)
        backend = _backend(name, runner, config)
        filled = _recorded(backend)
        batch = world.forward_batch(seq_lens, config)
        attention = _Attention(backend, runner, config, len(seq_lens))
        if params["path"] == "eager":
            backend.init_forward_metadata(batch)
            _check_indices(backend, filled[-1], batch, runner, config)
            outputs = attention.run(batch)
        else:
            outputs = _cuda_graph(backend, filled, batch, runner, config, attention)
        attention.check(outputs, _reference_indices(batch, runner, config), batch)
    facts = {"row": filled[-1].kv_indices.shape[1], "rows": config.num_steps, "attended_steps": len(outputs)}
    return facts | {"children": type(backend.attn_backends[0]).__name__}


def _backend(name: str, runner: Any, config: DraftConfig) -> Any:
    module_name, class_name, child_name = BACKENDS[name]
    module: Any = importlib.import_module(module_name)
    make = getattr(module, class_name)
    if not _has_real_children(name, config):
        setattr(module, child_name, world.PlannedOnly)
    if type(getattr(module, "is_arch_support_pdl", None)).__module__ == "sgl_kernel":  # asked of an import stub
        module.is_arch_support_pdl = lambda: False
    if name != "flashinfer_mla" or config.topk == 1:
        return make(runner, config.topk, config.num_steps)
    pool = runner.req_to_token_pool
    pool.size *= config.topk
    backend = make(runner, 1, config.num_steps)
    pool.size //= config.topk
    backend.topk = config.topk
    return backend


def _has_real_children(name: str, config: DraftConfig) -> bool:
    if name == "aiter":
        return False
    return name == "triton" or (config.device == "cuda" and (name == "flashinfer" or config.topk == 1))


class _Filled(NamedTuple):
    """What one call of ``common_template`` filled: all rows."""

    kv_indices: torch.Tensor  # (num_steps, row), the buffer itself
    kv_indptr: torch.Tensor  # (num_steps, capacity), a copy from before the first child was planned


def _recorded(backend: Any) -> list[_Filled]:
    filled: list[_Filled] = []
    template = backend.common_template

    def common_template(forward_batch: Any, kv_indices_buffer: Any, call_fn: Any, *args: Any, **kwargs: Any) -> Any:
        buffer = backend.cuda_graph_kv_indices if kv_indices_buffer is None else kv_indices_buffer

        def copied_first(step: int, *rest: Any, **more: Any) -> Any:
            if step == 0:
                filled.append(_Filled(buffer, backend.kv_indptr.clone()))
            return call_fn(step, *rest, **more)

        result = template(forward_batch, kv_indices_buffer, call_fn and copied_first, *args, **kwargs)
        if call_fn is None:  # Triton, under a graph: its children plan nothing
            filled.append(_Filled(buffer, backend.kv_indptr.clone()))
        return result

    backend.common_template = common_template
    return filled


def _cuda_graph(
    backend: Any, filled: list[_Filled], batch: Any, runner: Any, config: DraftConfig, attention: _Attention
) -> list[torch.Tensor]:
    """Size, capture, replay: in this order as SGLang's graph runner does it."""
    backend.init_cuda_graph_state(config.max_bs, config.max_bs * config.topk)
    # captured with short prefixes: a graph whose lengths were baked in would show as wrong values
    short = world.forward_batch([min(1, length) for length in batch.seq_lens_cpu.tolist()], config)
    _out_graph(backend, short, in_capture=True)
    replay = _captured(attention, short) if config.device == "cuda" and attention.steps else None
    _out_graph(backend, batch, in_capture=False)
    _check_indices(backend, filled[-1], batch, runner, config)
    return replay() if replay else attention.run(batch)


def _out_graph(backend: Any, batch: Any, in_capture: bool) -> None:
    if hasattr(backend, "init_forward_metadata_out_graph"):
        backend.init_forward_metadata_out_graph(batch, in_capture=in_capture)
    elif in_capture:
        backend.init_forward_metadata_capture_cuda_graph(batch)
    else:
        backend.init_forward_metadata_replay_cuda_graph(batch, batch.batch_size)


def _captured(attention: _Attention, batch: Any) -> Any:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        attention.run(batch)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = attention.run(batch)

    def replay() -> list[torch.Tensor]:
        graph.replay()
        return outputs

    return replay


def _reference_indices(batch: Any, runner: Any, config: DraftConfig) -> list[torch.Tensor]:
    return reference.kv_indices(
        batch.req_pool_indices, runner.req_to_token_pool.req_to_token, batch.seq_lens,
        topk=config.topk, num_steps=config.num_steps, page_size=config.page_size,
    )  # fmt: skip


@memory.unwatched()
def _check_indices(backend: Any, filled: _Filled, batch: Any, runner: Any, config: DraftConfig) -> None:
    """All rows of both outputs, the last step's too, which no attention reads; and what each stand-in was handed."""
    indptr = reference.kv_indptr(batch.seq_lens, topk=config.topk, num_steps=config.num_steps)
    indices = _reference_indices(batch, runner, config)
    for i in range(config.num_steps):
        same(f"kv_indptr[{i}]", filled.kv_indptr[i, : indptr.shape[1]], indptr[i])
        same(f"kv_indices[{i}]", filled.kv_indices[i, : len(indices[i])], indices[i])
    for i, child in enumerate(backend.attn_backends):
        if handed := getattr(child, "planned", None):
            same(f"kv_indptr handed to step {i}", handed[0], indptr[i])
            same(f"kv_indices handed to step {i}", handed[1], indices[i])


class _Attention:
    """Random queries and a random KV cache, attended to by every real child of a backend that is not MLA."""

    def __init__(self, backend: Any, runner: Any, config: DraftConfig, num_seqs: int):
        self.children = backend.attn_backends
        attends = config.num_kv_heads > 1 and not isinstance(self.children[0], world.PlannedOnly)
        self.steps = config.num_steps - 1 if attends else 0
        self.config = config
        if not self.steps:
            return
        generator = torch.Generator(config.device).manual_seed(11)
        self.kv = runner.token_to_kv_pool.get_kv_buffer(0)
        for buffer in self.kv:
            buffer.normal_(generator=generator)
        shape = (self.steps, num_seqs * config.topk, config.num_qo_heads, config.head_dim)
        self.q = torch.randn(shape, generator=generator, dtype=config.dtype, device=config.device)
        layer = importlib.import_module("sglang.srt.layers.radix_attention").RadixAttention
        self.scale = config.head_dim**-0.5
        self.layer = layer(config.num_qo_heads, config.head_dim, self.scale, config.num_kv_heads, layer_id=0)

    def run(self, batch: Any) -> list[torch.Tensor]:
        outputs = []
        for step in range(self.steps):
            q = self.q[step].flatten(1)
            out = self.children[step].forward_decode(q, None, None, self.layer, batch, save_kv_cache=False)
            outputs.append(out.view(self.q[step].shape))
        return outputs

    @memory.unwatched()
    def check(self, outputs: list[torch.Tensor], indices: list[torch.Tensor], batch: Any) -> None:
        indptr = reference.kv_indptr(batch.seq_lens, topk=self.config.topk, num_steps=self.config.num_steps)
        for step, got in enumerate(outputs):
            listed = indices[step].to(self.config.device)
            k, v = self.kv
            want = reference.paged_decode_attention(self.q[step], k, v, indptr[step], listed, self.scale)
            close(f"attention of step {step}", got, want, self.config.dtype)
