"""The leg's side of the draft positions on SGLang: its draft loop, and its CUDA-graph runner around that.

Real, unmodified: ``draft_forward`` of the draft worker (of both, where a release has two), ``ForwardBatch``,
``EagleDraftInput``, and the runner's capture of one batch size. Stand-ins: the worker's and the runner's ``self``,
namespaces of what these methods read; the draft model, which writes down the positions that it is called with and
answers random logits; and the graph: "capture" just calls what would be captured, ``runs`` times.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from eagle_kv.batch import DraftConfig

from regressions.scenarios import sglang_world as world
from regressions.scenarios.compare import same

WORKERS = (  # the earlier one is gone from 0.5.13 on
    ("sglang.srt.speculative.eagle_worker_v2", "EagleDraftWorker"),
    ("sglang.srt.speculative.eagle_worker", "EAGLEWorker"),
)
RUNNER = "sglang.srt.speculative.eagle_draft_cuda_graph_runner"
PRELOAD = (*(module for module, _ in WORKERS), RUNNER)
HIDDEN, VOCABULARY = 4, 32


def run(params: dict[str, Any], device: str) -> dict[str, Any]:
    topk, steps, lens = params["topk"], params["num_steps"], params["seq_lens"]
    config = DraftConfig(
        topk=topk, num_steps=steps, page_size=1, max_bs=len(lens), max_context_len=max(lens) + steps,
        num_qo_heads=4, num_kv_heads=2, device=device,
    )  # fmt: skip
    runs = params["runs"] if params["path"] == "capture" else 1
    seen: list[list[torch.Tensor]] = []
    with world.on(device):
        server_args = world.configure(config)
        for module_name, class_name in WORKERS:
            if world.has_module(module_name):
                forwards: list[torch.Tensor] = []
                module = importlib.import_module(module_name)
                worker = _worker(config, server_args, forwards)
                worker.draft_forward = getattr(module, class_name).draft_forward.__get__(worker)
                if params["path"] == "capture":
                    _capture(worker, server_args, lens, config, runs)
                else:
                    worker.draft_forward(_batch(lens, config))
                seen.append(forwards)
    start = torch.tensor(lens).repeat_interleave(topk)
    for forwards in seen:  # only now: every reverted worker has to be entered first
        want = [start + i for _ in range(runs) for i in range(steps - 1)]
        if len(forwards) != len(want):
            raise RuntimeError(f"{len(forwards)} forwards where {len(want)} were expected")
        for at, (got, positions) in enumerate(zip(forwards, want, strict=True)):
            same(f"positions of draft step {at % (steps - 1)} in run {at // (steps - 1)}", got, positions)
    return {"forwards": [len(forwards) for forwards in seen]}


def _worker(config: DraftConfig, server_args: Any, forwards: list[torch.Tensor]) -> SimpleNamespace:
    """What ``draft_forward`` reads of its worker. ``forwards``: what the draft model is called with, (rows,) a call."""
    generator = torch.Generator().manual_seed(5)

    def forward(batch: Any, *_: Any, **__: Any) -> SimpleNamespace:
        forwards.append(batch.positions.clone())
        rows = len(batch.positions)
        logits = torch.randn(rows, VOCABULARY, generator=generator).to(config.device)
        hidden = torch.zeros(rows, HIDDEN, device=config.device)
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits, hidden_states=hidden))

    model = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLMEagle"]), model_is_mrope=False, vocab_size=VOCABULARY
    )
    width = config.topk * config.num_steps + 1
    per_request = torch.zeros((config.max_bs, width), dtype=torch.long, device=config.device)
    return SimpleNamespace(
        topk=config.topk, speculative_num_steps=config.num_steps, speculative_num_draft_tokens=width,
        hot_token_id=None, server_args=server_args, index_share_for_mtp_iteration=False,
        seed_dsa_topk_from_draft_extend=False, _topk1_parents_prealloc=per_request,
        _topk1_score_indices_prealloc=per_request, draft_attn_backend=_Attention(config.num_steps),
        draft_runner=SimpleNamespace(forward=forward, canary_manager=None, model_config=model),
        draft_model_runner=SimpleNamespace(forward=forward, canary_manager=None, model_config=model),
        model_config=model,
    )  # fmt: skip


class _Attention:
    """A draft backend that plans nothing: positions are no matter of its."""

    def __init__(self, num_steps: int):
        self.attn_backends = [self] * num_steps

    def init_forward_metadata_in_graph(self, *_: Any, **__: Any) -> None: ...
    def init_forward_metadata_out_graph(self, *_: Any, **__: Any) -> None: ...
    def init_forward_metadata_capture_cuda_graph(self, *_: Any, **__: Any) -> None: ...


def _batch(lens: list[int], config: DraftConfig) -> Any:
    batch = world.forward_batch(lens, config)
    inputs = importlib.import_module("sglang.srt.speculative.eagle_info").EagleDraftInput
    tables = _tables(len(lens), config)
    batch.spec_info = inputs(**{name: tables[name] for name in ("topk_p", "topk_index", "hidden_states")})
    batch.out_cache_loc = tables["out_cache_loc"]
    batch.sampling_info = SimpleNamespace(is_all_greedy=True, temperatures=None, top_ks=None, sampling_seed=None)
    return batch


def _tables(num_seqs: int, config: DraftConfig) -> dict[str, torch.Tensor]:
    """What a round starts from: a first draft a branch, and slots for all, by name."""
    rows, device = num_seqs * config.topk, config.device
    return {
        "topk_p": torch.full((num_seqs, config.topk), 0.5, device=device),
        "topk_index": torch.arange(rows, device=device).view(num_seqs, config.topk),
        "hidden_states": torch.zeros((num_seqs, HIDDEN), device=device),
        "out_cache_loc": torch.arange(rows * config.num_steps, device=device),
    }


def _capture(worker: Any, server_args: Any, lens: list[int], config: DraftConfig, runs: int) -> None:
    """Capture one batch size, with the positions buffer as it is when a server captures on live requests."""
    module: Any = importlib.import_module(RUNNER)
    algorithm = importlib.import_module("sglang.srt.speculative.spec_info").SpeculativeAlgorithm.from_string("EAGLE")
    num_seqs, device = len(lens), config.device
    on_device = torch.tensor(lens, device=device)
    ones = torch.ones(num_seqs, dtype=torch.int32, device=device)
    rows = num_seqs * config.topk
    buffers = SimpleNamespace(
        **_tables(num_seqs, config), input_ids=torch.zeros(rows, dtype=torch.long, device=device),
        req_pool_indices=torch.arange(num_seqs, device=device), seq_lens=on_device, seq_lens_cpu=on_device.cpu(),
        extend_seq_lens=ones, positions=on_device.repeat_interleave(config.topk),
        mrope_positions=torch.zeros((3, rows), dtype=torch.long, device=device), rids_int=None,
        bootstrap_room_ids_int=None, draft_probs=None, dsa_seed_topk=None, sampling_seed=None,
    )  # fmt: skip

    def call(_: Any, run_once: Callable[[], Any], **__: Any) -> None:
        for _ in range(runs):
            run_once()

    graph = SimpleNamespace(pool=lambda: None)
    runner = SimpleNamespace(
        buffers=buffers, extend_seq_lens_cpu=[1] * num_seqs, num_tokens_per_bs=config.topk,
        captured_req_width=config.topk, speculative_num_steps=config.num_steps, topk=config.topk, stream=None,
        require_mlp_tp_gather=False, require_attn_tp_gather=False, dp_size=1, attn_dp_size=1, eagle_worker=worker,
        draft_attn_backend=worker.draft_attn_backend, server_args=server_args,
        deepep_adapter=SimpleNamespace(capture=lambda **_: None),
        model_runner=SimpleNamespace(
            spec_algorithm=algorithm, model_config=worker.model_config, req_to_token_pool=None, token_to_kv_pool=None,
            server_args=server_args, device=device,
            kv_index_translator=SimpleNamespace(bind_runner_slots=lambda *_: None),
        ),
        temperatures=torch.ones((num_seqs, 1), device=device), top_ks=ones,
        # the graph: made, warmed up and captured by these in earlier releases, by a backend in later ones
        _create_graph=lambda: graph, _capture_init=lambda run_once: call(None, run_once),
        _capture_graph=lambda *_: None, backend=SimpleNamespace(capture_one=call),
        _make_graph_key=lambda size, **_: size,
    )  # fmt: skip
    for name in (
        "get_global_graph_memory_pool",
        "set_global_graph_memory_pool",
        "maybe_flashinfer_autotune_speculative_draft",
    ):
        if hasattr(module, name):
            setattr(module, name, lambda *_, **__: None)
    kind = module.EAGLEDraftCudaGraphRunner
    capture = getattr(kind, "capture_one_shape", None) or kind.capture_one_batch_size
    capture(runner, num_seqs, None)
