"""The shapes that every draft backend is tried on: small ones for the interpreter on a CPU, real ones for a GPU."""

from __future__ import annotations

from collections.abc import Callable

from harness.case import Case
from regressions.scenarios import draft
from regressions.tables import shapes

SIZE_CPU = """
topk num_steps page_size max_bs max_context_len seq_lens
   2         2         1      1               8 3            # needs 10, has 8 without topk
   1         2         1      1               8 3            # fits both ways
   1         3         4      2              16 9,4
   2         1         1      1               8 5            # one step, no attention: 12 of 8
   2         2         1      2               8 -            # empty batch
   2         3         1      2              16 0,13         # a request without a prefix
   2         2         1      2               8 3,3          # 20 of 16
   2         2         1      4               8 2,6,4        # three requests: not a power of two
   2         3         4      1              16 6            # pages a branch
   2         3         4      2              16 10,7
   4         3         4      2              16 5,9
   4         2         1      3              16 12,1,14
   4         4        16      1              48 33
   8         3         1      2              24 11,20
   8         1         1      1               8 7            # to the last element: 64 of 64
   8         5        16      2              64 40,3
  16         2         1      1              16 9
  16         8         4      1              32 21
   2         2         1      1               8 2            # 8 of 8: the last that fits without topk
   4         2         1     16              16 14,0,3,9,11,2,7,5,14,1,8,12
"""

GUARD_CPU = """
topk num_steps page_size max_bs max_context_len seq_lens
   2         3         1      1               8 5            # 16 of 16
   2         3         1      1               8 6            # 18 of 16
   1         2         1      1               8 6            # 8 of 8
   1         2         1      1               8 7            # 9 of 8: topk 1 meets the context wall, too
   4         3         4      2              16 16,16        # 152 of 128
   4         3         1      3              16 13,13,13     # 192 of 192
   2         8         1      2              16 16,16
   8         2        16      1              32 31           # 264 of 256
   2         3         1      4               8 6            # one request of four: eager rows are the live batch's
"""

BIG = [(8, 8, 4096), (64, 8, 8192), (16, 16, 4096)]  # max_bs, topk, max_context_len


def size_cuda() -> str:
    """Real sizes: topk x requests x steps x page size, ragged, full and on the boundary."""
    rows = ["topk num_steps page_size max_bs max_context_len seq_lens", "8 5 1 8 4096 7x1500"]
    for topk, steps, page in (
        (1, 5, 1),
        (2, 1, 1),
        (2, 3, 4),
        (4, 2, 16),
        (4, 5, 1),
        (8, 3, 4),
        (8, 8, 1),
        (16, 4, 16),
    ):
        for max_bs, context in ((1, 2048), (3, 512), (8, 4096), (32, 1024)):
            ragged = ",".join(str((context * (7 * i + 3)) // (8 * max_bs) % (context - steps)) for i in range(max_bs))
            rows.append(f"{topk} {steps} {page} {max_bs} {context} {ragged}")
    for max_bs, topk, context in BIG:
        rows.append(f"{topk} 5 1 {max_bs} {context} {max_bs}x{context - 5}")  # to the last element of a right row
        rows.append(f"{topk} 5 16 {max_bs} {context} {max_bs}x{context // 2}")
    rows.append("8 5 1 64 8192 64x1018")  # 64 * 8 * (1018 + 5) < 64 * 8192: the last whole batch that fits without topk
    rows.append("8 5 1 64 8192 64x1019")  # and to its last element
    rows.append("8 5 1 64 8192 64x1020")  # and one token past it
    return "\n".join(rows)


def guard_cuda() -> str:
    """The context wall at real sizes: to the last element, and one token a request past it."""
    rows = ["topk num_steps page_size max_bs max_context_len seq_lens"]
    for topk, steps, page in ((1, 5, 1), (2, 3, 4), (4, 5, 16), (8, 5, 1), (16, 8, 1)):
        for max_bs, context in ((1, 2048), (7, 1024), (8, 4096)):
            rows.append(f"{topk} {steps} {page} {max_bs} {context} {max_bs}x{context - steps}")
            rows.append(f"{topk} {steps} {page} {max_bs} {context} {max_bs}x{context - steps + 1}")
    return "\n".join(rows)


def size_cases(fix: str) -> Callable[[str], list[Case]]:
    """Every shape under CUDA graphs, the path that a topk-factor sizes."""
    return lambda device: [draft.case(fix, **shape) for shape in shapes(_joined(SIZE_CPU, size_cuda(), device))]


def wall_cases(fix: str) -> Callable[[str], list[Case]]:
    """Shapes at their row's last element and past it, on both paths."""
    return lambda device: [
        draft.case(fix, path=path, **shape)
        for path in draft.PATHS
        for shape in shapes(_joined(GUARD_CPU, guard_cuda(), device))
    ]


def _joined(small: str, large: str, device: str) -> str:
    return small if device == "cpu" else small + large.split("\n", 1)[1]
