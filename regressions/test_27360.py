"""#27360: FlashAttention-3's draft decode scattered the pages of all steps into a row for the steps so far.

                                      fix in    slice out   slice and assert out
more pages than columns               clean     guarded     the scatter itself is refused: an error of torch's
                                                            on a CPU, a device assert on a GPU
more slots than columns, pages fit    clean     guarded     clean: the surplus is written where no step reads
slots fit, or pages of one slot       clean     clean       clean

No input makes the assert fire while the slice is in: it is at work where only the slice is out.
"""

import pytest

from regressions.scenarios import expand
from regressions.tables import shapes

BATCHES = """
topk num_steps page_size step seq_lens
   2         4         2    0 3          # slots 3 to 6: 3 pages of 2 columns
   2         4         2    0 3,4,9      # one request of three
   4         5         2    1 7,7        # 3 pages of 3 columns
   4         6         2    1 7,8        # 4 of 3 columns, by the odd one alone
   8         8         4    0 3,17,22
   2         8         4    2 15
   2         4        16    0 5,30       # 4 slots, one page
   2         4        16    0 14         # and two pages of two columns
   2         5        16    0 63,64,65
   2         2         2    0 3          # two steps fit two columns
   2         4         2    2 3          # the last step that attends
   4         3        64    1 130
   2         4         1    0 3,9        # pages of one slot
"""


def batches(fix):
    return lambda device: [expand.case(fix, **row) for row in shapes(BATCHES)]


@pytest.mark.fix(expand.SLICE)
@pytest.mark.cases(of=batches(expand.SLICE))
def test_a_step_has_room_for_its_own_pages(prove, case):
    prove(case)


@pytest.mark.fix(expand.GUARD)
@pytest.mark.cases(of=batches(expand.GUARD))
def test_slots_that_were_not_sliced_are_refused(prove, case):
    prove(case)
