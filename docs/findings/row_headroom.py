"""With page_size 1 a decode step of EAGLE reserves more than a request's row of req_to_token has behind the context.

get_req_to_token_extra_context_len gives a row 4 + num_draft_tokens tokens behind the context, and, for page_size > 1,
at least what a step reserves (#26972). With page_size 1 a step reserves 2 * max(topk * num_steps, num_draft_tokens):
with topk 4, 5 steps and 8 draft tokens 40 of 12. A request near the end of its context then has its reserve written
over the head of the next request's row, or past the end of the table. No assert covers it: #26972's looks at
page_size > 1 and topk > 1.

Needs: sglang, torch, triton. Without a GPU, TRITON_INTERPRET=1 runs it in Triton's interpreter.
Run:   python row_headroom.py
Right: every write is inside of its row.  Seen: 28 elements written past the row's end.
"""

import sys
from types import SimpleNamespace

import torch
from sglang.srt.mem_cache import allocator, memory_pool
from sglang.srt.speculative import eagle_utils

try:
    from sglang.srt.mem_cache import allocation_sizing as sizing
except ImportError:
    from sglang.srt.mem_cache import common as sizing

device = "cuda" if torch.cuda.is_available() else "cpu"
topk, num_steps, num_draft_tokens, page_size, context_len = 4, 5, 8, 1, 64
options = dict(
    device=device, page_size=page_size, speculative_algorithm="EAGLE", speculative_eagle_topk=topk,
    speculative_num_steps=num_steps, speculative_num_draft_tokens=num_draft_tokens,
)  # fmt: skip
try:
    from sglang.srt.runtime_context import get_context, get_parallel

    server_args = get_context().override_server_args(**options).install()
    if hasattr(get_parallel(), "override_permanently"):
        get_parallel().override_permanently(attn_dcp_rank=0)
    extra = sizing.get_req_to_token_extra_context_len()
except (ImportError, AttributeError):
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    server_args = ServerArgs(model_path="dummy", **options)
    set_global_server_args_for_scheduler(server_args)
    extra = sizing.get_req_to_token_extra_context_len(server_args)

width = context_len + extra
pool = memory_pool.ReqToTokenPool(size=2, max_context_len=width, device=device, enable_memory_saver=False)
pool.req_to_token.fill_(-7)
slots = allocator.TokenToKVPoolAllocator(256, dtype=torch.float16, device=device, kvcache=None, need_sort=False)
row = pool.req_to_token.shape[0] - 2  # the row behind it is another request's
pool.req_to_token[row, :context_len] = slots.alloc(context_len).to(torch.int32)
req = SimpleNamespace(kv_allocated_len=context_len, kv_committed_len=context_len, decode_batch_idx=0)
req.kv = req
lens = torch.tensor([context_len])
batch = SimpleNamespace(
    reqs=[req], batch_size=lambda: 1, device=device, seq_lens=lens.to(device), seq_lens_cpu=lens,
    req_pool_indices=torch.tensor([row], device=device), req_to_token_pool=pool, token_to_kv_pool_allocator=slots,
    tree_cache=SimpleNamespace(
        token_to_kv_pool_allocator=slots, is_chunk_cache=lambda: True, supports_prefix_sharing=lambda: False
    ),
    sampling_info=SimpleNamespace(penalizer_orchestrator=SimpleNamespace(is_required=False)),
    maybe_evict_swa=lambda: None, hisparse_coordinator=None,
)  # fmt: skip
if hasattr(eagle_utils, "eagle_prepare_for_decode"):
    eagle_utils.eagle_prepare_for_decode(batch)
else:
    from sglang.srt.speculative.eagle_info import EagleDraftInput

    EagleDraftInput.prepare_for_decode(SimpleNamespace(), batch)
stray = int((pool.req_to_token[row + 1] != -7).sum())
print(f"row {width} = {context_len} + {extra} tokens; {stray} elements written past its end, into the next row")
sys.exit(1 if stray else 0)
