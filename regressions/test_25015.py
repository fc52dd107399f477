"""#25015: draft steps ran one position too far, and a CUDA graph's warm-up runs moved the positions on.

                           fix in    draft-positions out       capture-positions out
one draft, no forward      clean     clean                     clean
draft step i of a round    clean     wrong: seq_len + i + 1    clean
captured in three runs     clean     wrong                     wrong: from run 1 on
"""

import pytest

from regressions.scenarios import draft_positions
from regressions.tables import shapes

DRAFT, CAPTURE = draft_positions.DRAFT, draft_positions.CAPTURE

ROUNDS = """
topk num_steps seq_lens
   1         3 7           # [7, 8], and [8, 9] without the fix
   1         2 1
   2         3 7
   4         5 3,12,1      # three requests of four branches
   8         4 64,2
   1         1 7           # the one draft comes with the round
   4         1 7,9
"""


def rounds(device):
    return [draft_positions.case(DRAFT, path=path, **row) for path in draft_positions.PATHS for row in shapes(ROUNDS)]


def captures(device):
    return [draft_positions.case(CAPTURE, **row) for row in shapes(ROUNDS)]


@pytest.mark.fix(DRAFT)
@pytest.mark.cases(of=rounds)
def test_a_draft_step_runs_at_its_own_position(prove, case):
    prove(case)


@pytest.mark.fix(CAPTURE)
@pytest.mark.cases(of=captures)
def test_capturing_leaves_the_positions_as_they_were(prove, case):
    prove(case)
