"""#27338: under CUDA graphs, FlashInfer's kv_indices row had no room for topk branches.

                     fix in     size out    size and guard out
fits without topk    clean      clean       clean
needs the factor     clean      guarded     overflow: used - max_bs * max_context_len elements
past the context     guarded    guarded     overflow
"""

import pytest

from regressions.draft_tables import size_cases, wall_cases
from regressions.scenarios import draft
from regressions.tables import shapes

SIZE, GUARD = "27338:topk-factor", "27338:capacity-assert"


def guard_page(device):
    wanted = ("8 5 1 8 4096 7x1500",) if device == "cuda" else ("2 2 1 1 8 3", "4 3 4 2 16 5,9")
    table = "\n".join(["topk num_steps page_size max_bs max_context_len seq_lens", *wanted])
    return [draft.case(SIZE, detector="guard-page", **shape) for shape in shapes(table)]


@pytest.mark.fix(SIZE)
@pytest.mark.cases(of=size_cases(SIZE))
def test_cuda_graph_row_has_room_for_every_branch(prove, case):
    prove(case)


@pytest.mark.fix(SIZE)
@pytest.mark.cases(of=guard_page)
def test_the_first_stray_element_faults_on_a_guard_page(prove, case):
    prove(case)


@pytest.mark.fix(GUARD)
@pytest.mark.cases(of=wall_cases(GUARD))
def test_a_batch_past_its_row_is_refused(prove, case):
    prove(case)
