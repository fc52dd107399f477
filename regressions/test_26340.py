"""Issue #26340: a coredump in the embedding gather, far from the kernel that caused it.

                     fix in     size out    size and guard out
fits without topk    clean      clean       clean
needs the factor     clean      guarded     the gather meets an id outside of the vocabulary:
                                            device assert on a GPU, IndexError on a CPU
"""

import pytest

from regressions.scenarios import draft_loop
from regressions.tables import shapes

CPU = """
topk num_steps page_size max_bs max_context_len seq_lens
   1         3         1      2              64 50,40    # topk 1: harmless
   2         3         1      2              64 50,40
   4         3         1      4              64 40,33,61,50
   4         3         4      2              64 51,60
"""

CUDA = """
   8         5         1      8            4096 7x1500   # the shape of the report's buffer
   8         5        16     16            2048 16x900
   1         5         1      8            4096 7x1500
"""


def rounds(device):
    table = CPU if device == "cpu" else CPU + CUDA.lstrip("\n")
    return [draft_loop.case(device, **shape) for shape in shapes(table)]


@pytest.mark.fix(draft_loop.SIZE)
@pytest.mark.cases(of=rounds)
def test_draft_tokens_survive_the_kv_indices_fill(prove, case):
    prove(case)
