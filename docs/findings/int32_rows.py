"""generate_draft_decode_kv_indices: the offset of a step's row wraps int32, although the width guard accepts the row.

The kernel moves to row `step` with `kv_indices += kv_indices_stride * iters`, a 32-bit product.
draft_kv_indices_buffer_width refuses a row of 2**31 elements or more, but nothing bounds num_steps rows of it: rows
of 600 million elements pass the guard, and the fifth starts at element 2.4e9, which wraps to a negative offset.

Needs: sglang, torch, 12 GB of device memory. Without a GPU, TRITON_INTERPRET=1 runs it in Triton's interpreter.
Run:   python int32_rows.py
Right: every row equals the reference.  Seen: an illegal memory access (in the interpreter, a segmentation fault).
"""

import sys

import torch

try:
    from sglang.kernels.ops.speculative.cache_locs import generate_draft_decode_kv_indices
except ModuleNotFoundError:
    from sglang.srt.speculative.triton_ops.cache_locs import generate_draft_decode_kv_indices
from sglang.srt.speculative.spec_utils import draft_kv_indices_buffer_width

device = "cuda" if torch.cuda.is_available() else "cpu"
num_seqs, topk, num_steps, page_size, seq_len = 2, 2, 5, 1, 100
width = draft_kv_indices_buffer_width(num_seqs, topk, 150_000_000)  # the guard accepts this
pool_len = seq_len + topk * num_steps
req_to_token = torch.arange(num_seqs * pool_len, dtype=torch.int32, device=device).view(num_seqs, pool_len)
kv_indices = torch.zeros((num_steps, width), dtype=torch.int32, device=device)
kv_indptr = torch.zeros((num_steps, num_seqs * topk + 1), dtype=torch.int32, device=device)
seq_lens = torch.full((num_seqs,), seq_len, dtype=torch.int64, device=device)
positions = torch.repeat_interleave(seq_lens, topk)

print(f"row {width} elements, the last one starts at {(num_steps - 1) * width} (2**31 is {2**31})", flush=True)
generate_draft_decode_kv_indices[(num_steps, num_seqs, topk)](
    torch.arange(num_seqs, device=device), req_to_token, seq_lens, kv_indices, kv_indptr, positions,
    pool_len, width, kv_indptr.shape[1], 2, 8, 4, page_size,
)  # fmt: skip
if device == "cuda":
    torch.cuda.synchronize()
wrong = 0
for step in range(num_steps):
    rows = [
        torch.cat([req_to_token[b, :seq_len], req_to_token[b, seq_len + t * num_steps :][: step + 1]])
        for b in range(num_seqs)
        for t in range(topk)
    ]
    want = torch.cat(rows)
    equal = torch.equal(kv_indices[step, : len(want)], want)
    wrong += not equal
    print(f"step {step}: {'as it must be' if equal else 'WRONG'}")
sys.exit(1 if wrong else 0)
