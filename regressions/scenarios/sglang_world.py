"""The least of a server that SGLang's draft backends need around them. Imported in the leg's process only.

Real, unmodified, from the release under test: the backends, their kernel and sizing helpers, ``ServerArgs``,
``ReqToTokenPool``, the KV pools, ``ForwardBatch``, ``RadixAttention`` and, where a release has them, its published
configuration and ``KVIndexTranslator``.

Stand-ins:

- ``ModelRunner`` and its ``model_config``: namespaces of the attributes that constructors read. No weights, no model.
- The attention tensor-parallel group: one rank, written where SGLang keeps it. No process group is made.
- The tables: slots are handed out by ``eagle_kv.batch.make_req_to_token``, in shuffled pages, and not by an allocator.
  A context so long that the table would be gigabytes gets a table as wide as the batch reaches.
- ``EagleDraftInput``: SGLang's own ``SpecInput`` of its kind, with the two fields that backends fill. The real class
  pulls in every mixture-of-experts kernel.
- Attention children that cannot be made: see :class:`PlannedOnly`.
- On a CPU, ``device="cuda"`` means the CPU (``harness.memory.cuda_is_cpu``), and Triton's interpreter runs the kernels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import torch
from eagle_kv.batch import DraftConfig, make_req_to_token

from harness.memory.cuda_is_cpu import CudaIsCpu

TABLE_LIMIT = 1 << 24  # entries


def on(device: str) -> contextlib.AbstractContextManager[Any]:
    """The mode that SGLang's code runs in on this device."""
    return contextlib.nullcontext() if device == "cuda" else CudaIsCpu()


class PlannedOnly:
    """Stands in for one step's attention: keeps what it is handed, plans nothing, attends to nothing."""

    use_sliding_window_kv_pool = False
    max_kv_splits = 1

    def __init__(self, model_runner: Any, *args: Any, **kwargs: Any):
        self.max_context_len = model_runner.model_config.context_len
        self.planned: tuple[torch.Tensor, torch.Tensor] | None = None

    def init_cuda_graph_state(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_graph_kv_indices = kwargs.get("kv_indices_buf")

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.planned = (forward_batch.spec_info.kv_indptr, forward_batch.spec_info.kv_indices)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self.init_forward_metadata(forward_batch)


def has_module(name: str) -> bool:
    """Whether the release has this module. Imports its parents, not the module."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def configure(config: DraftConfig) -> Any:
    """Publish the configuration of one process, as this release does it. Returns its ``ServerArgs``."""
    fields = {
        "device": config.device,
        "page_size": config.page_size,
        "speculative_algorithm": "EAGLE",
        "speculative_num_steps": config.num_steps,
        "speculative_eagle_topk": config.topk,
        "speculative_num_draft_tokens": config.topk * config.num_steps + 1,
    }
    return publish(fields)


def publish(fields: dict[str, Any]) -> Any:
    """Make ``ServerArgs`` for a dummy model and install it where this release's code looks it up."""
    if has_module("sglang.srt.runtime_context"):
        runtime = importlib.import_module("sglang.srt.runtime_context")
        if hasattr(runtime.get_context(), "override_server_args"):
            server_args = runtime.get_context().override_server_args(**fields).install()
            if hasattr(runtime.get_parallel(), "override_permanently"):
                runtime.get_parallel().override_permanently(attn_dcp_rank=0)
            return server_args
    module = importlib.import_module("sglang.srt.server_args")
    server_args = module.ServerArgs(model_path="dummy", **fields)
    module.set_global_server_args_for_scheduler(server_args)
    groups: Any = importlib.import_module("sglang.srt.distributed.parallel_state")
    groups._ATTN_TP = SimpleNamespace(world_size=1, rank_in_group=0, ranks=[0])
    return server_args


def model_runner(config: DraftConfig, seq_lens: list[int], *, mla: bool) -> SimpleNamespace:
    """A ModelRunner as far as draft backends and their children read it, with real pools."""
    server_args = configure(config)
    pools = importlib.import_module("sglang.srt.mem_cache.memory_pool")
    table = config
    if config.max_bs * config.pool_len > TABLE_LIMIT:
        table = dataclasses.replace(config, max_context_len=max([1, *seq_lens]))
    req_to_token_pool = pools.ReqToTokenPool(
        size=table.max_bs, max_context_len=table.pool_len, device=table.device, enable_memory_saver=False
    )
    shuffled = table.max_bs * table.pool_len <= TABLE_LIMIT
    req_to_token_pool.req_to_token[1:].copy_(make_req_to_token(table, seed=7 if shuffled else None))
    memory: dict[str, Any] = {
        "size": table.num_slots - table.page_size,  # the pool adds the padding page itself
        "page_size": config.page_size, "dtype": config.dtype, "layer_num": 1, "device": config.device,
        "enable_memory_saver": False,
    }  # fmt: skip
    if mla:
        kv_pool = pools.MLATokenToKVPool(
            **memory, kv_lora_rank=config.head_dim_ckv, qk_rope_head_dim=config.head_dim_kpe
        )
    else:
        kv_pool = pools.MHATokenToKVPool(**memory, head_num=config.num_kv_heads, head_dim=config.head_dim)
    runner = SimpleNamespace(
        device=config.device, gpu_id=0, page_size=config.page_size, dtype=config.dtype, kv_cache_dtype=config.dtype,
        is_draft_worker=True, sliding_window_size=None, server_args=server_args, req_to_token_pool=req_to_token_pool,
        token_to_kv_pool=kv_pool, token_to_kv_pool_allocator=None, prefill_attention_backend_str="",
        decode_attention_backend_str="", hybrid_gdn_config=None, kimi_linear_config=None, linear_attn_model_spec=None,
        decode_num_tokens_per_req=lambda: config.topk * config.num_steps + 1,
    )  # fmt: skip
    if has_module("sglang.srt.mem_cache.kv_index_translator"):
        translator = importlib.import_module("sglang.srt.mem_cache.kv_index_translator").KVIndexTranslator
        runner.kv_index_translator = translator(
            req_to_token=req_to_token_pool.req_to_token, token_to_kv_pool_allocator=None, token_to_kv_pool=kv_pool,
            page_size=config.page_size, device=config.device, is_draft_worker=True,
        )  # fmt: skip
    runner.model_config = _model_config(config, mla)
    runner.spec_algorithm = importlib.import_module("sglang.srt.speculative.spec_info").SpeculativeAlgorithm.EAGLE
    return runner


def _model_config(config: DraftConfig, mla: bool) -> SimpleNamespace:
    kinds = importlib.import_module("sglang.srt.configs.model_config").AttentionArch
    hf_config = importlib.import_module("transformers").PretrainedConfig(architectures=["LlamaForCausalLMEagle"])
    return SimpleNamespace(
        hf_config=hf_config, hf_text_config=hf_config, linear_attn_registry_result=None, dtype=config.dtype,
        context_len=config.max_context_len, num_attention_heads=config.num_qo_heads,
        get_max_num_attention_heads=lambda: config.num_qo_heads, num_key_value_heads=config.num_kv_heads,
        get_num_kv_heads=lambda *tp: config.num_kv_heads, get_max_num_kv_heads=lambda *tp: config.num_kv_heads,
        is_multimodal=False, is_encoder_decoder=False, attention_arch=kinds.MLA if mla else kinds.MHA,
        head_dim=config.head_dim, v_head_dim=config.head_dim, swa_v_head_dim=config.head_dim,
        kv_lora_rank=config.head_dim_ckv, qk_nope_head_dim=config.head_dim, qk_rope_head_dim=config.head_dim_kpe,
        scaling=(config.head_dim + config.head_dim_kpe) ** -0.5,
    )  # fmt: skip


def forward_batch(seq_lens: list[int], config: DraftConfig) -> Any:
    """A real ``ForwardBatch`` of one draft decode round.

    Requests sit in pool rows from the last one down, so that an index by batch position would show.
    """
    info = importlib.import_module("sglang.srt.model_executor.forward_batch_info")
    lens = torch.tensor(seq_lens, dtype=torch.int64)
    rows = torch.arange(config.max_bs, config.max_bs - len(seq_lens), -1, dtype=torch.int64)
    on_device = lens.to(config.device)
    return info.ForwardBatch(
        forward_mode=info.ForwardMode.DECODE, batch_size=len(seq_lens), input_ids=None,
        req_pool_indices=rows.to(config.device), seq_lens=on_device, out_cache_loc=None, seq_lens_sum=int(lens.sum()),
        seq_lens_cpu=lens, positions=on_device.repeat_interleave(config.topk), spec_info=_draft_input(),
    )  # fmt: skip


def _draft_input() -> Any:
    kinds = importlib.import_module("sglang.srt.speculative.spec_info")

    class DraftInput(kinds.SpecInput):  # type: ignore[name-defined,misc]
        kv_indptr: torch.Tensor | None = None
        kv_indices: torch.Tensor | None = None

        def get_spec_adjust_token_coefficient(self) -> tuple[int, int]:
            return 1, 1

    return DraftInput(kinds.SpecInputType.EAGLE_DRAFT)
