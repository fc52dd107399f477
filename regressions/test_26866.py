"""#26866: after a verify of a tree, accept_index was walked by num_draft_tokens a request; it has num_steps + 1.

                                       fix in    fix out
grid of the gather, guard page behind  clean     crashed: a read past accept_index
grid of the gather, poison behind      clean     wrong: what was read there moves rows to the padding slot
stride of the bonus token              clean     wrong: another request's token, or a rejected one
topk 1; for the stride, one request    clean     clean
"""

import pytest

from regressions.scenarios import accept
from regressions.tables import shapes

GRID = """
num_steps num_draft_tokens accepted
        1                3 1         # reads element 2 of 2
        1                3 2
        3                8 4,1,2
        3               16 1,1
        5               32 6,3,1,5
        3                5 2,4       # one element a request too many
        3                4 2,1       # topk 1: a chain
        1                2 1
"""

STRIDE = """
num_steps num_draft_tokens accepted
        1                3 1,1       # element 3 of 4: behind the accepted ones
        3                5 4,2,1
        3                7 1,1,3
        5                8 2,2,6,1
        3                8 1         # one request
        3                4 4,2,1     # topk 1: a chain
"""


def rows(table):
    for row in shapes(table):
        yield {**row, "accepted": [int(count) for count in str(row["accepted"]).split(",")]}


def reads(device):
    return [accept.case(accept.GRID, detector=name, **row) for name in accept.DETECTORS for row in rows(GRID)]


def strides(device):
    return [accept.case(accept.STRIDE, **row) for row in rows(STRIDE)]


@pytest.mark.fix(accept.GRID)
@pytest.mark.cases(of=reads)
def test_nothing_is_read_past_the_accepted_paths(prove, case):
    prove(case)


@pytest.mark.fix(accept.STRIDE)
@pytest.mark.cases(of=strides)
def test_each_request_gets_its_own_bonus_token(prove, case):
    prove(case)
