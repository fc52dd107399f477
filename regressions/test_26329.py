"""#26329: after a chunk that ends inside its prompt, the draft model was fed the target's prediction as the next token.

                               fix in    fix out
whole prompt, or last chunk    clean     clean
chunk ends inside a prompt     clean     wrong: the predicted token where the prompt's next one belongs
"""

import pytest

from regressions.scenarios import chunked_prefill
from regressions.tables import shapes

FIX = chunked_prefill.FIX

CHUNKS = """
seq_lens  prefix_len chunk_end
6                  0         3
6                  0         5    # one token is left
6                  2         4    # a chunk in the middle
3,6                0         3    # behind a whole prompt
1,4,9              4         8
2                  0         1    # one token: nothing but a tail
6                  0         6    # whole prompt
6                  3         6    # the last chunk
3,6,2              0         2
"""


def chunks(device):
    return [chunked_prefill.case(FIX, **row) for row in shapes(CHUNKS)]


@pytest.mark.fix(FIX)
@pytest.mark.cases(of=chunks)
def test_a_chunk_is_continued_by_its_prompt(prove, case):
    prove(case)
