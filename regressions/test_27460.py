"""#27460: the same for FlashInfer MLA, whose upstream constructor refuses topk > 1; ours takes it, so it can be tried.

                     fix in     size out    size and guard out
fits without topk    clean      clean       clean
needs the factor     clean      guarded     overflow: used - max_bs * max_context_len elements
past the context     guarded    guarded     overflow
"""

import pytest

from regressions.draft_tables import size_cases, wall_cases

SIZE, GUARD = "27460:topk-factor", "27460:capacity-assert"


@pytest.mark.fix(SIZE)
@pytest.mark.cases(of=size_cases(SIZE))
def test_cuda_graph_row_has_room_for_every_branch(prove, case):
    prove(case)


@pytest.mark.fix(GUARD)
@pytest.mark.cases(of=wall_cases(GUARD))
def test_a_batch_past_its_row_is_refused(prove, case):
    prove(case)
