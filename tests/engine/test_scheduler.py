"""Every sequence finishes, in order of arrival, within the limits on tokens, sequences and blocks.

The examples show a step as {sequence: number of tokens that the step computes}. A block holds four
tokens, and every sampled token is 7.
"""

import random

import pytest
from conftest import finish_step
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import PrefillFirstScheduler, Scheduler
from nanovllm.engine.sequence import Sequence

BLOCK_SIZE = 4


def make_scheduler(policy=Scheduler, num_blocks=8, max_num_seqs=4, budget=16):
    return policy(BlockManager(num_blocks, BLOCK_SIZE), max_num_seqs, budget)


def make_sequence(seq_id, prompt_len, max_tokens, first_token=None):
    """Prompts that have the same first token share a prefix."""
    first_token = seq_id if first_token is None else first_token
    prompt = [first_token, *range(1, prompt_len)]
    return Sequence(seq_id, prompt, SamplingParams(max_tokens=max_tokens))


def run_step(scheduler):
    step = scheduler.schedule()
    plan = {seq.seq_id: num_tokens for seq, num_tokens, _ in step}
    assert len(plan) == len(step.seqs)
    finish_step(scheduler, step, [[7] * num_logits for num_logits in step.num_logits])
    return plan


def run_steps(scheduler, num_steps):
    return [run_step(scheduler) for _ in range(num_steps)]


@pytest.mark.parametrize(
    "policy, expected",
    [
        (Scheduler, [{0: 1, 1: 6, 2: 1}, {0: 1, 1: 1, 2: 3}, {0: 1, 2: 1}]),
        (PrefillFirstScheduler, [{1: 6}, {2: 4}, {0: 1, 1: 1, 2: 1}]),
    ],
)
def test_prompts_arrive_during_a_decode(policy, expected):
    """Mixed steps delay no decode and split a long prompt. Prefill first delays the decode."""
    scheduler = make_scheduler(policy, budget=8)
    scheduler.add(make_sequence(0, prompt_len=3, max_tokens=10))
    assert run_step(scheduler) == {0: 3}
    scheduler.add(make_sequence(1, prompt_len=6, max_tokens=2))
    scheduler.add(make_sequence(2, prompt_len=4, max_tokens=2))
    assert run_steps(scheduler, 3) == expected


def test_a_prefix_can_be_shared_within_a_step():
    scheduler = make_scheduler()
    for seq_id in range(2):
        scheduler.add(make_sequence(seq_id, prompt_len=9, max_tokens=4, first_token=0))
    assert run_steps(scheduler, 4) == [{0: 9, 1: 1}, *[{0: 1, 1: 1}] * 3]
    assert scheduler.num_prefill_tokens == 10
    assert scheduler.num_cached_tokens == 8
    assert scheduler.num_decode_tokens == 6


def test_hits_of_generated_tokens_are_not_counted():
    """After a reset, a sequence can hit blocks with tokens that it has generated."""
    scheduler = make_scheduler()
    scheduler.add(make_sequence(0, prompt_len=12, max_tokens=2))
    run_steps(scheduler, 2)
    seq = make_sequence(1, prompt_len=5, max_tokens=9, first_token=0)
    seq.token_ids += range(5, 12)
    scheduler.add(seq)
    assert run_step(scheduler) == {1: 4}
    assert seq.num_cached_tokens == scheduler.num_cached_tokens == 5


def test_a_pending_token_names_its_row():
    """A sequence that computes a chunk has no row of logits."""
    scheduler = make_scheduler()
    seqs = [make_sequence(seq_id, prompt_len=4, max_tokens=9) for seq_id in range(3)]
    for seq in seqs:
        scheduler.add(seq)
    step = scheduler.schedule()
    step.num_tokens[0], step.num_logits[0] = 3, 0
    scheduler.advance(step)
    assert [seq.token_ids[-1] for seq in seqs] == [3, ~0, ~1]


def test_nan_logits_leave_no_token():
    scheduler = make_scheduler()
    seq = make_sequence(0, prompt_len=4, max_tokens=9)
    scheduler.add(seq)
    finish_step(scheduler, scheduler.schedule(), [[-1]])
    assert (seq.token_ids, seq.finish_reason) == ([0, 1, 2, 3], "error")


def test_the_newest_sequence_is_preempted_when_blocks_run_out():
    scheduler = make_scheduler(num_blocks=4, max_num_seqs=2)
    seqs = [make_sequence(seq_id, prompt_len=4, max_tokens=9) for seq_id in range(3)]
    for seq in seqs:
        scheduler.add(seq)
    # At most two sequences run. After five steps each of them fills two blocks.
    assert run_steps(scheduler, 5) == [{0: 4, 1: 4}, *[{0: 1, 1: 1}] * 4]

    # Sequence 0 needs a third block. Sequence 1 keeps its tokens and its place before sequence 2.
    assert run_step(scheduler) == {0: 1}
    assert list(scheduler.waiting) == seqs[1:]
    assert len(seqs[1].token_ids) == 9
    assert seqs[1].block_table == []
    assert scheduler.running == seqs[:1]

    # Sequence 0 finishes. One block of sequence 1 is still cached, so 5 tokens are recomputed.
    assert run_steps(scheduler, 4) == [{0: 1}, {0: 1}, {0: 1}, {1: 5, 2: 4}]
    assert seqs[0].finish_reason == "length"
    assert scheduler.running == seqs[1:]
    assert scheduler.num_preemptions == 1
    assert scheduler.num_prefill_tokens == 4 + 4 + 5 + 4
    assert scheduler.num_cached_tokens == 0, "counts first admissions only"


def test_a_blocked_head_is_not_searched_again(monkeypatch):
    """Its cost in later steps does not depend on its length."""
    scheduler = make_scheduler(num_blocks=1000, max_num_seqs=3, budget=4096)
    for seq_id in range(2):  # the second one leaves cached blocks
        scheduler.add(make_sequence(seq_id, 2000, max_tokens=[100, 1][seq_id], first_token=seq_id))
    run_step(scheduler)
    head = make_sequence(2, 3000, max_tokens=2, first_token=1)
    scheduler.add(head)
    assert run_step(scheduler) == {0: 1}
    looked_up = []
    find_block = BlockManager.find_block

    def count(manager, seq, index):
        looked_up.append(index)
        return find_block(manager, seq, index)

    monkeypatch.setattr(BlockManager, "find_block", count)
    assert run_steps(scheduler, 10) == [{0: 1}] * 10
    assert len(looked_up) < 30
    scheduler.finish(scheduler.running[0], "abort")
    assert list(run_step(scheduler)) == [2]


def plan_random_steps(seed, policy):
    """The plans with a memo and without, for sequences that repeat what others generate."""
    rng = random.Random(seed)
    num_blocks = rng.randint(12, 17)
    max_num_seqs = rng.randint(2, 5)
    budget = rng.randint(30, 50)
    loads = []
    for _ in range(rng.randint(3, 9)):
        prompt = [rng.randint(0, 1), *[7] * rng.randint(0, 29)]
        loads.append((prompt, rng.randint(1, 16)))
    plans = []
    for has_memo in (True, False):
        scheduler = make_scheduler(policy, num_blocks, max_num_seqs, budget)
        if not has_memo:
            scheduler.block_manager.is_still_blocked = lambda seq: False
        for seq_id, (prompt, max_tokens) in enumerate(loads):
            scheduler.add(Sequence(seq_id, prompt, SamplingParams(max_tokens=max_tokens)))
        plans.append(run_steps(scheduler, 150))
        assert not scheduler.running
        assert not scheduler.waiting
    return plans


@pytest.mark.parametrize("policy", [Scheduler, PrefillFirstScheduler])
def test_remembering_a_blocked_head_changes_no_plan(policy):
    for seed in [*range(100), 2134, 6247]:  # in the last two a block is cached again
        plan, expected = plan_random_steps(seed, policy)
        assert plan == expected, seed


def test_prefill_first_splits_a_recomputation_that_is_longer_than_a_step():
    scheduler = make_scheduler(PrefillFirstScheduler, num_blocks=6, budget=7)
    for seq_id, max_tokens in enumerate([20, 6, 20]):
        scheduler.add(make_sequence(seq_id, 4, max_tokens))
    assert run_steps(scheduler, 7) == [{0: 4}, {1: 4}, {2: 4}, *[{0: 1, 1: 1, 2: 1}] * 4]
    # Sequence 2 is preempted with 9 tokens and no cached block. Then sequence 1 finishes.
    assert run_steps(scheduler, 4) == [{0: 1, 1: 1}, {2: 7}, {2: 2}, {0: 1, 2: 1}]


LOADS = st.tuples(st.integers(1, 16), st.integers(1, 16), st.integers(0, 3))


@given(
    loads=st.lists(LOADS, min_size=1, max_size=12),
    policy=st.sampled_from([Scheduler, PrefillFirstScheduler]),
    num_blocks=st.integers(8, 20),
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(1, 30),
    aborted=st.sets(st.integers(0, 11), max_size=3),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_random_loads(loads, policy, num_blocks, max_num_seqs, budget, aborted):
    if policy is PrefillFirstScheduler:
        budget = max(budget, 16)  # the longest prompt must fit
    scheduler = make_scheduler(policy, num_blocks, max_num_seqs, budget)
    seqs = [make_sequence(seq_id, *load) for seq_id, load in enumerate(loads)]
    for step in range(2000):
        if step % 2 == 0 and step // 2 < len(seqs):
            scheduler.add(seqs[step // 2])
        unfinished = [*scheduler.running, *scheduler.waiting]
        if step in aborted and unfinished:
            scheduler.finish(unfinished.pop(step % len(unfinished)), "abort")
        plan = run_step(scheduler)
        assert sum(plan.values()) <= budget
        assert len(scheduler.running) <= max_num_seqs
        assert not any(seq.block_table for seq in scheduler.waiting)
        order = [seq.seq_id for seq in [*scheduler.running, *scheduler.waiting]]
        assert order == sorted(order)
        if policy is Scheduler and unfinished:
            assert unfinished[0].seq_id in plan, "the oldest sequence progresses"
        if all(seq.finish_reason for seq in seqs):
            break
    assert len(scheduler.block_manager.free_block_ids) == num_blocks
    for seq in seqs:
        assert seq.finish_reason == "abort" or len(seq.token_ids) == seq.max_num_tokens


def test_a_prompt_whose_missing_tokens_fit_is_not_delayed():
    scheduler = make_scheduler(PrefillFirstScheduler, budget=9)
    scheduler.add(make_sequence(0, prompt_len=9, max_tokens=4, first_token=0))
    run_step(scheduler)
    scheduler.add(make_sequence(1, prompt_len=8, max_tokens=4))
    scheduler.add(make_sequence(2, prompt_len=9, max_tokens=4, first_token=0))
    assert run_step(scheduler) == {1: 8, 2: 1}
