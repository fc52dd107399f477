"""Fixes of our own: what #27486's int32 guard does not bound, and the two backends that upstream left without a guard.

                               fix in     fix out
a row starts past 2**31        clean      crashed: the offset wraps, and the write lands gigabytes before the buffer
every row starts below         clean      clean
batch past its row             guarded    overflow (Triton and aiter)
"""

import pytest

from regressions.draft_tables import wall_cases
from regressions.scenarios import draft
from regressions.tables import shapes

ROWS, TRITON, AITER = "own:int32-rows", "own:triton-capacity-assert", "own:aiter-capacity-assert"

WIDE_ROWS = """
backend    path       topk num_steps max_bs max_context_len seq_lens
flashinfer eager         2         5      2       150000000 100,100    # rows of 600 million: step 4 wraps
aiter      cuda_graph    2         5      2       150000000 100,100
flashinfer eager         2         4      2       150000000 100,100    # one step less: the last row starts at 1.8e9
aiter      cuda_graph    1         3      1      1073741824 7          # row 2 starts at 2**31 exactly
"""


def wide_rows(device):
    return [draft.case(ROWS, **shape) for shape in shapes(WIDE_ROWS)]


@pytest.mark.fix(ROWS)
@pytest.mark.cases(of=wide_rows)
def test_rows_past_int32_are_written_in_place(prove, case):
    prove(case)


@pytest.mark.fix(TRITON)
@pytest.mark.cases(of=wall_cases(TRITON))
def test_triton_refuses_a_batch_past_its_row(prove, case):
    prove(case)


@pytest.mark.fix(AITER)
@pytest.mark.cases(of=wall_cases(AITER))
def test_aiter_refuses_a_batch_past_its_row(prove, case):
    prove(case)
