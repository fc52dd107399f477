"""#27486: three guards of the draft KV indexing.

                                      guard in    guard out
row of 2**31 elements                 guarded     clean: accepted; used to its end, kv_indptr wraps (wrong)
slot outside 0 <= slot < size_limit   guarded     overflow where memory is near, crashed where it is far
num_draft_tokens != num_steps + 1     guarded     error: a shape mismatch, later
anything within the bounds            clean       clean
"""

import dataclasses
from typing import Any

import pytest

from regressions.scenarios import draft, multi_layer, store
from regressions.tables import shapes

INT32, SLOT, TOKENS = "27486:int32-guard", "27486:slot-assert", "27486:draft-tokens-assert"

WIDTHS = """
backend    path       topk num_steps max_bs max_context_len seq_lens
aiter      cuda_graph    8         2      4        67108864 5,3        # 2**31 exactly
flashinfer eager         8         2      4        67108864 1,9,2,7
aiter      cuda_graph    1         2      1      2147483648 5          # 2**31 without topk or requests to multiply
flashinfer eager         8         2      1       268435456 5          # one request
aiter      cuda_graph    1         2      1      2147483647 5          # 2**31 - 1 is within int32
flashinfer eager         1         2      1      2147483647 5
"""

SLOTS = """
slots              row_bytes index_bytes strided path
0,7                      256           8       0 store_cache   # padding slot and the last one
3,3,5                    256           8       0 store_cache   # a slot twice
-                        256           8       0 store_cache   # zero rows
0,7,2                      4           8       0 store_cache   # every kind of row
1,4                        8           4       0 store_cache
6,0                       12           8       1 store_cache
7,1                      256           4       1 store_cache
2,6                      512           8       0 pool
5,0                     1024           4       0 pool
7,3                     2048           8       1 pool
1,7                     4096           8       0 pool
1                          6           8       0 store_cache   # not a multiple of 4, refused
-1                       256           8       0 store_cache   # the row before the cache
8                        256           8       0 store_cache   # size_limit
9                        256           8       0 store_cache   # size_limit + 1
2,8,5                   2048           4       1 pool
8                         12           4       0 store_cache
1,2,3,4,5,6,7,0,-1       256           8       0 store_cache   # past the first block of 8 rows
1,2,3,4,5,6,7,0,0,1,8    256           4       0 pool
-1                      4096           8       0 pool
2^31                     256           8       0 store_cache   # far
2^40                     256           8       0 store_cache
"""

CONFIGS = """
num_steps num_draft_tokens num_seqs
        3                4        2
        3                8        2
        3                2        2    # num_steps - 1
        3                5        2    # num_steps + 2
        1                2        1
        5                5        3
"""


def widths(device):
    cases = [draft.case(INT32, **shape) for shape in shapes(WIDTHS)]
    # used to its very end: 2**31 elements a row, which takes a GPU; many branches, so that the request table is small
    many: dict[str, Any] = {"topk": 512, "num_steps": 1, "max_bs": 32, "max_context_len": 2**17}
    wraps = draft.case(INT32, backend="aiter", path="eager", seq_lens=[2**17 - 1] * 32, **many)
    return [*cases, dataclasses.replace(wraps, needs_cuda=True)]


def slots(device):
    return [store.case(SLOT, **{**row, "strided": bool(row["strided"])}) for row in shapes(SLOTS)]


def configs(device):
    return [multi_layer.case(TOKENS, **row) for row in shapes(CONFIGS)]


@pytest.mark.fix(INT32)
@pytest.mark.cases(of=widths)
def test_a_row_past_int32_is_refused(prove, case):
    prove(case)


@pytest.mark.fix(SLOT)
@pytest.mark.cases(of=slots)
def test_a_stray_slot_fails_at_the_write(prove, case):
    prove(case)


@pytest.mark.fix(TOKENS)
@pytest.mark.cases(of=configs)
def test_a_mismatched_config_fails_at_start(prove, case):
    prove(case)
