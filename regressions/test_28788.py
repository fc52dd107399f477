"""#28788: Triton decode attention computed request * stride, the offset into its intermediate outputs, in 32 bits.

                            fix in    fix out
an offset of 2**31 or more  clean     crashed: the access is 2**31 elements and less before the buffer
offsets below               clean     clean

Three kernels, a fix each: stage one for a head a KV head, stage one for heads in groups, and stage two.
"""

import pytest

from regressions.scenarios import decode_attention
from regressions.tables import shapes

STAGE1, GROUPED, STAGE2 = decode_attention.FIXES

BATCHES = """
num_seqs     stride head_dim seq_len
       3 1073741824       16      40   # the third request starts at 2**31 exactly
       5  600000000       16       7   # the fifth alone
       2 2147483408       16      40   # the second request's last head of eight; with two, all fit
       2 2147483392       16      40   # eight heads to the last element below it
       3       4096       16      65
"""


def batches(fix):
    return lambda device: [decode_attention.case(fix, **row) for row in shapes(BATCHES)]


@pytest.mark.fix(STAGE1)
@pytest.mark.cases(of=batches(STAGE1))
def test_partial_outputs_are_written_in_place(prove, case):
    prove(case)


@pytest.mark.fix(GROUPED)
@pytest.mark.cases(of=batches(GROUPED))
def test_partial_outputs_of_grouped_heads_are_written_in_place(prove, case):
    prove(case)


@pytest.mark.fix(STAGE2)
@pytest.mark.cases(of=batches(STAGE2))
def test_partial_outputs_are_read_where_they_are(prove, case):
    prove(case)
