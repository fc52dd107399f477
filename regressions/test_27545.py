"""#27545: the Triton backend's draft-extend graph took num_steps + 1 queries a request for num_draft_tokens.

                            fix in    fix out
a tree (topk above 1)       clean     wrong: qo_indptr[1] is num_steps + 1
num_steps + 1 draft tokens  clean     clean
"""

import pytest

from regressions.scenarios import draft_extend
from regressions.tables import shapes

FIX = "27545:draft-extend-stride"

BATCHES = """
topk num_steps num_draft_tokens page_size seq_lens
   4         3                8         1 5,9       # [0, 8, 16], was [0, 4, 8]
   4         3                8        16 5,33,64
   2         3                5         1 7         # one request: its end is wrong
   8         5               32         4 12,3,40,1
   4         3                3         1 5,9       # fewer than the steps: a stride too long
   1         3                4         1 5,9       # topk 1
   4         3                4         1 5,9       # a tree pruned to a chain's size
"""


def batches(device):
    return [draft_extend.case(FIX, **row) for row in shapes(BATCHES)]


@pytest.mark.fix(FIX)
@pytest.mark.cases(of=batches)
def test_every_query_of_a_tree_is_counted(prove, case):
    prove(case)
