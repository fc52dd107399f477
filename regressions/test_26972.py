"""#26972: what a decode step reserves for its drafts did not fit behind the context in a request's row of req_to_token.

                                        headroom in   headroom out   headroom and assert out
fits in 4 + num_draft_tokens            clean         clean          clean
page_size > 1, topk > 1, needs more     clean         guarded        overflow: reserve - 4 - num_draft_tokens elements

                                        assert in     assert out
fits                                    clean         clean
row made too narrow                     guarded       overflow
"""

import pytest

from regressions.scenarios import context_reserve
from regressions.tables import shapes

HEADROOM, ASSERT = context_reserve.HEADROOM, context_reserve.ASSERT

SHAPES = """
topk num_steps num_draft_tokens page_size max_context_len num_seqs
   2         2                4         2              16        1    # 16 of 8
   4         3                8        16              32        1    # 256 of 12
   2         2                4         2              16        3    # requests whose excess is in another's row, too
   2         5               10         4              32        2
   3         1                4         8              24        2
   8         5               64        64              64        1    # 2048 of 68
   2         2               16         2              16        2    # 32 of 20: the verify needs more than the drafts
   1         3                4         4              16        2    # topk 1: 8 of 8
   1         3                4         1              16        3
   1         1                2         2              16        1    # 4 of 6
   2         1                2         1               8        1    # 4 of 6: page_size 1
"""


def reserves(fix):
    return lambda device: [context_reserve.case(fix, **shape) for shape in shapes(SHAPES)]


@pytest.mark.fix(HEADROOM)
@pytest.mark.cases(of=reserves(HEADROOM))
def test_a_row_has_room_for_what_a_step_reserves(prove, case):
    prove(case)


@pytest.mark.fix(ASSERT)
@pytest.mark.cases(of=reserves(ASSERT))
def test_a_reserve_past_its_row_is_refused(prove, case):
    prove(case)
