"""TritonMultiStepDraftBackend.common_template fills its kv_indices row without asking whether the batch fits.

A row holds num_seqs * topk * max_context_len elements, which leaves no room for the draft tokens themselves: with
context 8, topk 2 and 3 steps, a request of 5 tokens uses the row to its end, and one of 6 needs 18 of its 16
elements. The FlashInfer and FlashInfer MLA backends refuse that (assert_buffer_fits, #27338 and #27460). Triton's
does not, nor aiter's: the kernel writes on, into whatever lies behind.

Needs: sglang, torch, triton. Without a GPU, TRITON_INTERPRET=1 runs it in Triton's interpreter.
Run:   python draft_capacity.py
Right: the batch is refused.  Seen: 2 elements written past the end of the buffer.
"""

import sys
from types import SimpleNamespace

import torch
from sglang.srt.layers.attention.triton_backend import TritonMultiStepDraftBackend
from sglang.srt.speculative.spec_utils import draft_kv_indices_buffer_width

device = "cuda" if torch.cuda.is_available() else "cpu"
num_seqs, topk, num_steps, max_context_len, page_size, seq_len = 1, 2, 3, 8, 1, 6
width = draft_kv_indices_buffer_width(num_seqs, topk, max_context_len)  # as init_cuda_graph_state sizes it
pool_len = 64
req_to_token = torch.arange(1, pool_len + 1, dtype=torch.int32, device=device).view(1, pool_len)
req_pool_indices = torch.zeros(num_seqs, dtype=torch.int64, device=device)

# the buffer, and a zone of known values behind it
memory = torch.full((num_steps * width + 64,), -7, dtype=torch.int64, device=device)
buffer, zone = memory[: num_steps * width].view(num_steps, width), memory[num_steps * width :]

source = SimpleNamespace(row_ids=req_pool_indices, ids=req_to_token, row_stride=pool_len, entry_page_size=1, v2p=None)
backend = SimpleNamespace(
    topk=topk, speculative_num_steps=num_steps, max_context_len=max_context_len, page_size=page_size,
    pool_len=pool_len, kv_indptr=torch.zeros((num_steps, topk + 1), dtype=torch.int32, device=device),
    req_to_token_pool=SimpleNamespace(req_to_token=req_to_token),
    kv_index_translator=SimpleNamespace(read_source=lambda *args, **kwargs: source),
    draft_window_size=0, draft_sink_size=0, window_rail=False, cuda_graph_window_kv_indices=None,
)  # fmt: skip
seq_lens = torch.full((num_seqs,), seq_len, dtype=torch.int64, device=device)
batch = SimpleNamespace(
    batch_size=num_seqs, seq_lens=seq_lens, seq_lens_sum=seq_len, req_pool_indices=req_pool_indices,
    positions=torch.repeat_interleave(seq_lens, topk), kv_loc_plan=None,
)  # fmt: skip

needed = seq_len * topk + num_seqs * topk * num_steps
print(f"row {width} elements, needed {needed}", flush=True)
try:
    TritonMultiStepDraftBackend.common_template(backend, batch, buffer, None)
except AssertionError as error:
    print(f"refused: {error}")
    sys.exit(0)
stray = int((zone != -7).sum())
print(f"{stray} elements written past the end: {zone[zone != -7].tolist()}")
sys.exit(1 if stray else 0)
