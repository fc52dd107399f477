"""FlashInferMLAAttnBackend.init_forward_metadata drops the draft's kv_indptr and kv_indices on the eager path.

FlashInferMLAMultiStepDraftBackend hands each step's kv_indptr and kv_indices over in forward_batch.spec_info. Under
CUDA graphs they are used. On the eager path the child calls indices_updater_decode.update without spec_info, so it
plans for the prefixes alone, and writes their lengths over the kv_indptr that it shares with the multi-step backend:
the draft tokens of the steps before are not attended to. The FlashInfer backend that is not MLA passes spec_info
there.

Needs: sglang, torch, triton, a GPU. Nothing is planned for real: the wrapper keeps what it is handed.
Run:   python mla_eager_metadata.py
Right: step 0 plans [0, 7]: six tokens of prefix and the draft token.  Seen: [0, 6].
"""

import sys
from types import SimpleNamespace

import torch
from sglang.srt.layers.attention import flashinfer_mla_backend as mla
from sglang.srt.model_executor.forward_batch_info import ForwardMode

device, seq_len, pool_len = "cuda", 6, 64
planned = []
wrapper = SimpleNamespace(plan=lambda q_indptr, kv_indptr, *args: planned.append(kv_indptr.tolist()))
kv_indptr = torch.tensor([0, seq_len + 1], dtype=torch.int32, device=device)  # what the kernel wrote for step 0
handed = SimpleNamespace(kv_indptr=kv_indptr.clone(), kv_indices=torch.arange(seq_len + 1, device=device))

updater = SimpleNamespace(
    kv_indptr=kv_indptr, q_indptr=torch.arange(2, dtype=torch.int32, device=device), decode_wrapper=wrapper,
    req_to_token=torch.arange(pool_len, dtype=torch.int32, device=device).view(1, pool_len), scaling=1.0,
    num_local_heads=16, kv_lora_rank=512, qk_rope_head_dim=64, data_type=torch.bfloat16,
    attn_backend=SimpleNamespace(  # later releases fill kv_indices through it
        kv_index_translator=SimpleNamespace(pack_read_stream=lambda *args, **kwargs: True, needs_read_translate=False)
    ),
)  # fmt: skip
for name in ("update", "call_begin_forward"):
    setattr(updater, name, getattr(mla.FlashInferMLAIndicesUpdaterDecode, name).__get__(updater))
if hasattr(mla, "get_parallel"):
    mla.get_parallel = lambda: SimpleNamespace(dcp_enabled=False)
child = SimpleNamespace(indices_updater_decode=updater, decode_wrapper=wrapper)
batch = SimpleNamespace(
    forward_mode=ForwardMode.DECODE, req_pool_indices=torch.zeros(1, dtype=torch.int64, device=device),
    seq_lens=torch.tensor([seq_len], device=device), seq_lens_sum=seq_len, spec_info=handed, kv_loc_plan=None,
)  # fmt: skip
mla.FlashInferMLAAttnBackend.init_forward_metadata(child, batch)
print(f"handed over: kv_indptr {handed.kv_indptr.tolist()}")
print(f"planned: {planned[0]}; the shared buffer now: {kv_indptr.tolist()}")
sys.exit(0 if planned[0] == handed.kv_indptr.tolist() else 1)
