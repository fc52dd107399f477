"""The draft loop end to end: what it drafts follows from the model, and a stray token id stops it at the gather."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from eagle_kv import draft_loop, reference
from eagle_kv.backends import BACKENDS
from eagle_kv.backends import flashinfer as flashinfer_backend
from eagle_kv.batch import DraftBatch, DraftConfig, make_req_to_token
from eagle_kv.draft_loop import DraftGraphRunner, draft_slots
from eagle_kv.draft_model import DraftModel, check_drafted, make_kv_buffers, prefill, reference_logits

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float32 if INTERPRETED else torch.float16
TOLERANCE = 1e-3 if INTERPRETED else 0.05


class Round:
    """A model, a pool with the prompts' keys and values in it, and a runner."""

    def __init__(self, backend, topk, num_steps, page_size, seq_lens, max_bs=4, max_context_len=64):
        if DEVICE == "cuda" and backend == "flashinfer":
            pytest.importorskip("flashinfer")
        self.config = DraftConfig(
            topk=topk,
            num_steps=num_steps,
            page_size=page_size,
            max_bs=max_bs,
            max_context_len=max_context_len,
            dtype=DTYPE,
            device=DEVICE,
        )
        self.table = make_req_to_token(self.config, seed=1)
        self.model = DraftModel(self.config)
        self.kv = make_kv_buffers(self.config)
        self.backend = BACKENDS[backend](self.config, self.table)
        self.runner = DraftGraphRunner(self.model, self.backend, self.kv, max_bs)
        self.start(seq_lens)

    def start(self, seq_lens, seed=0):
        generator = torch.Generator().manual_seed(seed)
        rows = [3, 0, 2, 1][: len(seq_lens)]
        self.prompts = [torch.randint(128, (n,), generator=generator).to(DEVICE) for n in seq_lens]
        self.draft_tokens = torch.randint(128, (len(seq_lens) * self.config.topk,), generator=generator).to(DEVICE)
        self.batch = DraftBatch.of(seq_lens, self.config.topk, req_pool_indices=rows, device=DEVICE)
        prefill(self.model, self.kv, self.table, rows, self.prompts)

    def replay(self):
        return self.runner.replay(self.batch, self.draft_tokens)

    def check(self, drafted):
        check_drafted(self.model, self.prompts, self.draft_tokens, drafted, TOLERANCE)


@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
@pytest.mark.parametrize(
    ("topk", "num_steps", "page_size", "seq_lens"),
    [(3, 4, 1, [17, 6, 30]), (2, 3, 4, [6, 33]), (1, 4, 4, [5]), (2, 3, 1, [0, 3])],
)
def test_drafted_tokens_follow_from_the_model(backend, topk, num_steps, page_size, seq_lens):
    case = Round(backend, topk, num_steps, page_size, seq_lens)
    drafted = case.replay()
    assert drafted.shape == (len(seq_lens), topk, num_steps) and drafted.dtype == torch.int64
    case.check(drafted)


def test_replays_with_other_batches_do_not_leak_into_each_other():
    case = Round("triton", 2, 3, 1, [17, 6])
    first = case.replay()
    case.start([40], seed=1)
    case.check(case.replay())
    case.start([17, 6])
    assert torch.equal(case.replay(), first)


def test_one_step_drafts_what_it_is_given():
    case = Round("flashinfer", 3, 1, 1, [4, 9])
    assert torch.equal(case.replay().flatten(), case.draft_tokens)


def test_empty_batch_drafts_nothing():
    case = Round("flashinfer", 3, 4, 1, [])
    assert case.replay().shape == (0, 3, 4)


def test_wrong_slots_change_what_is_drafted(monkeypatch):
    """Without this, a check of the tokens could not see an overflow that stays among the rows."""
    case = Round("flashinfer", 3, 4, 1, [17, 6, 30])
    right = case.replay()
    fill = case.backend.fill

    def fill_and_stomp(batch, kv_indices):
        fill(batch, kv_indices)
        kv_indices[:, : 3 * 17] = kv_indices[:, -1:] + 1

    monkeypatch.setattr(case.backend, "fill", fill_and_stomp)
    wrong = case.replay()
    assert not torch.equal(wrong[0], right[0])
    assert torch.equal(wrong[2], right[2])
    with pytest.raises(
        AssertionError, match=r"drafted token \d+ at \(seq, branch, step\) \(0, .* below the best logit"
    ):
        case.check(wrong)


def test_check_sees_a_stray_id_a_changed_start_and_a_wrong_choice():
    case = Round("flashinfer", 2, 3, 1, [9])
    drafted = case.replay()
    for value, match in [(128, "not in the vocabulary"), (-1, "not in the vocabulary")]:
        bad = drafted.clone()
        bad[0, 1, 1] = value
        with pytest.raises(AssertionError, match=match):
            case.check(bad)
    bad = drafted.clone()
    bad[0, 1, 0] = (bad[0, 1, 0] + 1) % 128
    with pytest.raises(AssertionError, match="draft token of branch 1 changed"):
        case.check(bad)
    bad = drafted.clone()
    bad[0, 0, 2] = reference_logits(case.model, case.prompts, drafted)[0, 0, 1].argmin()
    with pytest.raises(AssertionError, match=r"\(0, 0, 2\) lies .* below the best logit"):
        case.check(bad)


@pytest.mark.skipif(not INTERPRETED, reason="a device assert ends the process's CUDA context")
@pytest.mark.parametrize("stray", [128, -1, (7 << 32) + 9])
def test_tokens_stomped_by_the_fill_reach_the_gather(monkeypatch, stray):
    """Inputs are copied first and indices filled next: what an overflow writes over the tokens is what is read."""
    case = Round("flashinfer", 2, 3, 1, [9, 4])
    fill = case.backend.fill

    def fill_and_stomp(batch, kv_indices):
        fill(batch, kv_indices)
        case.runner.draft_tokens[1] = stray

    monkeypatch.setattr(case.backend, "fill", fill_and_stomp)
    with pytest.raises(IndexError, match="index out of range"):
        case.replay()


class Arena:
    """A bump allocator behind torch's factories: each tensor starts where the one before ends, and 99s follow all."""

    def __init__(self, monkeypatch, num_elements):
        self.memory = torch.full((num_elements,), 99, dtype=torch.int64, device=DEVICE)
        self.made = []
        self.end = 0
        for name in ("zeros", "ones"):
            monkeypatch.setattr(draft_loop.torch, name, self.factory(getattr(torch, name)))
        for name in ("empty", "full"):
            monkeypatch.setattr(draft_loop.torch, name, self.refuse)

    def factory(self, original):
        def make(*args, **kwargs):
            like = original(*args, **kwargs)
            numbers = self.memory[self.end :].view(like.dtype)[: like.numel()].view(like.shape).copy_(like)
            self.end += -(-like.numel() * like.element_size() // 8)
            self.made.append(numbers)
            return numbers

        return make

    def refuse(self, *args, **kwargs):
        raise NotImplementedError("the arena serves zeros and ones only")


def test_draft_tokens_are_the_next_allocation_after_kv_indices_and_the_last(monkeypatch):
    case = Round("flashinfer", 2, 3, 1, [9])
    with monkeypatch.context() as patch:
        arena = Arena(patch, 4096)
        runner = DraftGraphRunner(case.model, case.backend, case.kv, 4)
    assert arena.made[-2] is case.backend.cuda_graph_kv_indices
    assert arena.made[-1] is runner.draft_tokens
    assert runner.draft_tokens.shape == (8,) and runner.draft_tokens.dtype == torch.int64
    assert arena.made[-2].data_ptr() + 4 * arena.made[-2].numel() == arena.made[-1].data_ptr()


@pytest.mark.skipif(not INTERPRETED, reason="a device assert ends the process's CUDA context")
def test_issue_26340_end_to_end_when_the_row_lacks_topk_and_its_guard(monkeypatch):
    """Rows of 32 for a round that uses 42: ten slot numbers land on the token list right behind the buffer."""
    case = Round("flashinfer", 2, 3, 1, [18], max_context_len=32)
    narrow = case.config.max_context_len
    monkeypatch.setattr(flashinfer_backend, "draft_kv_indices_buffer_width", lambda *_: narrow)
    with monkeypatch.context() as patch:
        arena = Arena(patch, 1024)
        runner = DraftGraphRunner(case.model, case.backend, case.kv, 1)
    with pytest.raises(AssertionError, match="need 42, row has 32"):
        runner.replay(case.batch, case.draft_tokens)
    monkeypatch.setattr(case.backend, "check_row_fits", lambda *_: None)
    with pytest.raises(IndexError, match="index out of range"):
        runner.replay(case.batch, case.draft_tokens)
    row = [3]  # the request's row in the pool
    used = reference.kv_indices(row, case.table, [18], topk=2, num_steps=3, page_size=1)[-1]
    behind = arena.memory[arena.end - runner.draft_tokens.numel() :].view(torch.int32)
    assert behind[:10].tolist() == used[32:].tolist()
    assert behind[10:14].tolist() == [99, 0, 99, 0]
    assert (runner.draft_tokens >= 2**32).all()


def test_draft_slots_are_those_of_the_reference_positions():
    for topk, num_steps, page_size in [(2, 3, 4), (3, 2, 1), (1, 5, 4)]:
        config = DraftConfig(topk=topk, num_steps=num_steps, page_size=page_size, max_bs=3, max_context_len=16)
        table = make_req_to_token(config, seed=2)
        batch = DraftBatch.of([6, 0, 11], topk, req_pool_indices=[2, 0, 1])
        slots = draft_slots(table, batch, topk=topk, num_steps=num_steps, page_size=page_size)
        for b, (row, seq_len) in enumerate([(2, 6), (0, 0), (1, 11)]):
            want = table[row, reference.draft_positions(seq_len, topk, num_steps, page_size)]
            assert torch.equal(slots[:, b * topk : (b + 1) * topk].t(), want.long())


def test_runner_refuses_a_batch_that_is_too_large():
    case = Round("flashinfer", 2, 3, 1, [9, 4], max_bs=4)
    runner = DraftGraphRunner(case.model, case.backend, case.kv, 1)
    with pytest.raises(ValueError, match="batch of 2 requests: the graph runner is for at most 1"):
        runner.replay(case.batch, case.draft_tokens)
