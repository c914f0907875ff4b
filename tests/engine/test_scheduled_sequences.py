"""What a step does to a sequence besides its number of tokens, also while it is in flight."""

import random

import pytest
from conftest import finish_step
from test_scheduler import make_scheduler, make_sequence, run_step, run_steps

from nanovllm import SamplingParams
from nanovllm.engine.scheduler import PrefillFirstScheduler, Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step


def start(scheduler, *seqs):
    """Add sequences, and put a step with them in flight."""
    for seq in seqs:
        scheduler.add(seq)
    step = scheduler.schedule()
    scheduler.advance(step)
    return step


def sample(scheduler, *token_ids):
    """Finish a step in which each sequence samples one of `token_ids`."""
    finish_step(scheduler, scheduler.schedule(), [[token_id] for token_id in token_ids])


def test_nan_ends_a_sequence_and_its_blocks_are_not_reused():
    scheduler = make_scheduler()
    seq = make_sequence(0, prompt_len=5, max_tokens=4)
    scheduler.add(seq)
    finish_step(scheduler, scheduler.schedule(), [[-1, 7]])
    assert seq.finish_reason == "error"
    assert 7 not in seq.token_ids
    assert scheduler.block_manager.hash_to_block_id == {}


def test_nan_of_a_sequence_that_is_preempted_before_it_is_known_is_not_reused():
    """Its step is in flight, and its blocks are free and cached."""
    scheduler = make_scheduler()
    seq = make_sequence(0, prompt_len=5, max_tokens=4)
    step = start(scheduler, seq)
    scheduler.preempt(seq)
    assert scheduler.block_manager.hash_to_block_id
    scheduler.postprocess(step, [[-1]])
    assert seq.finish_reason == "error"
    assert scheduler.block_manager.hash_to_block_id == {}


def test_a_stop_token_ends_a_sequence_after_min_tokens():
    scheduler = make_scheduler()
    params = SamplingParams(min_tokens=2, max_tokens=3)
    seq = Sequence(0, [1], params, stop_token_ids=frozenset([7]))
    scheduler.add(seq)
    for _ in range(3):
        assert seq.finish_reason is None
        run_step(scheduler)
    assert seq.finish_reason == "stop"


def test_only_the_newest_token_is_a_stop_token():
    """The first token may be one, because min_tokens allows no end there."""
    scheduler = make_scheduler()
    params = SamplingParams(min_tokens=1, max_tokens=9)
    seq = Sequence(0, [1, 5], params, stop_token_ids=frozenset([5]))
    scheduler.add(seq)
    sample(scheduler, 5)
    sample(scheduler, 8)
    assert seq.finish_reason is None
    sample(scheduler, 5)
    assert seq.finish_reason == "stop"


@pytest.mark.parametrize(
    "limits, num_tokens",
    [
        (dict(params=SamplingParams(max_tokens=9), max_model_len=6), 1),
        (dict(params=SamplingParams(max_tokens=2), max_model_len=60), 2),
        (dict(params=SamplingParams(max_tokens=2, min_tokens=2)), 2),
        (dict(params=SamplingParams(max_tokens=9, min_tokens=5), max_model_len=7), 2),
    ],
    ids=["max_model_len", "max_tokens", "min_tokens", "min_tokens beyond max_model_len"],
)
def test_each_limit_ends_a_sequence(limits, num_tokens):
    """Also while its last token is pending, so that nothing is computed beyond the limit."""
    scheduler = make_scheduler()
    seq = Sequence(0, [0] * 5, **limits)
    scheduler.add(seq)
    for _ in range(num_tokens - 1):
        sample(scheduler, 7)
    step = scheduler.schedule()
    scheduler.advance(step)
    assert scheduler.schedule().seqs == []
    scheduler.postprocess(step, [[7]])
    assert (seq.finish_reason, len(seq.token_ids)) == ("length", 5 + num_tokens)


class CheckedSequence(Sequence):
    """A sequence whose end is that of a grammar, which consumes each token that is checked."""

    def check_end(self):
        self.checked.append(self.token_ids[-1])
        return "error" if self.checked.count(9) > 1 else "stop" if 9 in self.checked else None


@pytest.mark.parametrize("overlaps", [False, True])
def test_each_token_is_checked_once_and_when_it_is_known(overlaps):
    scheduler = make_scheduler()
    seq = CheckedSequence(0, [1, 2, 3], SamplingParams(max_tokens=5))
    seq.checked = []
    scheduler.add(seq)
    in_flight = Step(), []
    for token_id in (7, 8, 9):
        step = scheduler.schedule()
        if overlaps:
            scheduler.postprocess(*in_flight)
        scheduler.advance(step)
        in_flight = step, [[token_id]]
        if not overlaps:
            scheduler.postprocess(*in_flight)
    if overlaps:
        scheduler.schedule()
        scheduler.postprocess(*in_flight)
    assert (seq.checked, seq.finish_reason) == ([7, 8, 9], "stop")


def test_a_sequence_that_ends_with_its_prompt_keeps_no_token():
    """It wants hidden states, or the K/V. A token is sampled and dropped."""
    scheduler = make_scheduler()
    seq = Sequence(0, range(20), SamplingParams(), frozenset([7]), ends_with_prompt=True)
    scheduler.add(seq)
    assert run_step(scheduler) == {0: 16}
    assert seq.finish_reason is None
    assert run_step(scheduler) == {0: 4}
    assert (seq.finish_reason, seq.token_ids) == ("length", list(range(20)))
    assert len(scheduler.block_manager.hash_to_block_id) == 5


def test_nan_of_a_sequence_that_ends_with_its_prompt_is_an_error():
    scheduler = make_scheduler()
    seq = Sequence(0, range(5), SamplingParams(), ends_with_prompt=True)
    step = start(scheduler, seq)
    scheduler.postprocess(step, [[-1]])
    assert seq.finish_reason == "error"
    assert scheduler.block_manager.hash_to_block_id == {}


def test_tokens_before_nan_stay():
    scheduler = make_scheduler()
    seq = make_sequence(0, prompt_len=4, max_tokens=9)
    scheduler.add(seq)
    sample(scheduler, 7)
    step = scheduler.schedule()
    seq.token_ids.append(8)  # an accepted draft token
    step.num_tokens[0] = step.num_logits[0] = 2
    finish_step(scheduler, step, [[8, -1]])
    assert (seq.token_ids, seq.finish_reason) == ([0, 1, 2, 3, 7, 8], "error")


def test_blocks_that_an_error_has_uncached_are_not_cached_by_others():
    """The K/V of sequence 1, which shares them, may be NaN, too."""
    scheduler = make_scheduler(num_blocks=9)
    seqs = [make_sequence(seq_id, 11, max_tokens=9, first_token=0) for seq_id in range(3)]
    step = start(scheduler, *seqs[:2])
    scheduler.postprocess(step, [[-1], [7]])
    assert scheduler.block_manager.hash_to_block_id == {}
    scheduler.add(seqs[2])
    assert run_step(scheduler) == {1: 1, 2: 11}


def test_an_error_in_one_sequence_ends_no_other_and_evicts_no_good_block():
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_sequence(0, prompt_len=8, max_tokens=1))
    run_step(scheduler)
    seqs = [make_sequence(seq_id, prompt_len=4, max_tokens=9) for seq_id in (1, 2)]
    step = start(scheduler, *seqs)
    scheduler.postprocess(step, [[-1], [7]])
    assert [seq.finish_reason for seq in seqs] == ["error", None]
    scheduler.finish(seqs[1], "abort")
    # The blocks with NaN are taken first.
    scheduler.add(make_sequence(3, prompt_len=4, max_tokens=1))
    run_step(scheduler)
    scheduler.add(make_sequence(4, prompt_len=9, max_tokens=1, first_token=0))
    assert run_step(scheduler) == {4: 1}


def test_prefill_first_splits_a_recomputation_only_if_it_is_first_in_a_step():
    scheduler = make_scheduler(PrefillFirstScheduler, budget=8)
    seqs = [make_sequence(seq_id, prompt_len=2, max_tokens=9) for seq_id in range(2)]
    for seq in seqs:
        scheduler.add(seq)
    assert run_steps(scheduler, 4) == [{0: 2, 1: 2}, *[{0: 1, 1: 1}] * 3]
    scheduler.block_manager.enable_prefix_caching = False
    for seq in reversed(seqs):
        for block_id in seq.block_table:
            scheduler.block_manager.uncache(block_id)
        scheduler.preempt(seq)
    assert run_steps(scheduler, 2) == [{0: 6}, {1: 6}]


def overlap_step(scheduler, in_flight):
    """Plan a step before the tokens of the last one are known. Return it with its own tokens.

    A token is its position, as in the prompts of make_sequence.
    """
    step = scheduler.schedule()
    for seq in step.seqs:
        is_admitted_now = seq.num_admitted_tokens == len(seq.token_ids)
        assert not (seq.has_pending_token and is_admitted_now)
    scheduler.postprocess(*in_flight)
    rows, positions = step.list_rows()
    scheduler.advance(step)
    assert [seq.token_ids[-1] for seq in rows] == [~row for row in range(len(rows))]
    return step, step.split(positions)


@pytest.mark.parametrize("policy", [Scheduler, PrefillFirstScheduler])
def test_steps_overlap(policy):
    """Pending tokens are neither cached nor kept, and no step has a sequence that has its tokens.

    An abort can come while a step is in flight. The pool is small, so sequences are preempted.
    """
    num_preemptions = 0
    for seed in range(60):
        rng = random.Random(seed)
        scheduler = make_scheduler(policy, num_blocks=8, budget=rng.randint(16, 20))
        seqs = []
        for seq_id in range(6):
            lengths = rng.randint(1, 12), rng.randint(1, 14)
            seqs.append(make_sequence(seq_id, *lengths, first_token=seq_id % 2))
            scheduler.add(seqs[-1])
        in_flight = Step(), []
        for index in range(100):
            in_flight = overlap_step(scheduler, in_flight)
            assert not any(seq.finish_reason for seq in in_flight[0].seqs)
            if index == 5 and scheduler.running:
                unfinished = [*scheduler.running, *scheduler.waiting]
                scheduler.finish(rng.choice(unfinished), "abort")
            cached = [each.token_ids for each in scheduler.block_manager.blocks]
            assert not any(token_id < 0 for token_ids in cached for token_id in token_ids)
        for seq in seqs:
            assert seq.token_ids == [seq.seq_id % 2, *range(1, len(seq.token_ids))]
            assert seq.finish_reason == "abort" or len(seq.token_ids) == seq.max_num_tokens
        assert len(scheduler.block_manager.free_block_ids) == 8
        num_preemptions += scheduler.num_preemptions
    assert num_preemptions > 10


def test_a_block_that_a_pending_token_fills_is_cached_when_the_token_is_known():
    scheduler = make_scheduler()
    seq = make_sequence(0, prompt_len=3, max_tokens=20)
    scheduler.add(seq)
    in_flight = Step(), []
    for num_computed in range(3, 22):
        in_flight = overlap_step(scheduler, in_flight)
        assert seq.num_computed_tokens == num_computed
        assert len(scheduler.block_manager.hash_to_block_id) == num_computed // 4


def test_a_preempted_sequence_waits_until_its_pending_token_is_known():
    scheduler = make_scheduler()
    seq = make_sequence(0, prompt_len=5, max_tokens=4)
    step = start(scheduler, seq)
    scheduler.preempt(seq)
    assert scheduler.schedule().seqs == []
    scheduler.postprocess(step, [[0]])
    assert scheduler.schedule().seqs == [seq]
    assert seq.token_ids[-1] == 0


def test_a_pending_token_that_is_the_last_one_is_not_computed():
    scheduler = make_scheduler()
    seq = make_sequence(0, prompt_len=5, max_tokens=1)
    step = start(scheduler, seq)
    assert scheduler.schedule().seqs == []
    scheduler.postprocess(step, [[7]])
    assert seq.finish_reason == "length"


def test_a_sequence_that_waits_for_its_last_token_delays_no_other():
    """Neither is anything preempted for a block that it does not need."""
    for num_blocks in (8, 3):
        scheduler = make_scheduler(num_blocks=num_blocks)
        seqs = [make_sequence(0, prompt_len=4, max_tokens=1), make_sequence(1, 5, max_tokens=9)]
        start(scheduler, *seqs)
        assert scheduler.schedule().seqs == seqs[1:]


def test_a_sequence_with_a_pending_token_can_be_preempted():
    scheduler = make_scheduler(num_blocks=3)
    seqs = [make_sequence(0, prompt_len=4, max_tokens=9), make_sequence(1, 5, max_tokens=9)]
    start(scheduler, *seqs)
    assert scheduler.schedule().seqs == seqs[:1]
    assert list(scheduler.waiting) == seqs[1:]


def test_no_sequence_overtakes_one_whose_token_is_pending():
    scheduler = make_scheduler()
    first = make_sequence(0, prompt_len=5, max_tokens=4)
    start(scheduler, first)
    scheduler.preempt(first)
    scheduler.add(make_sequence(1, prompt_len=4, max_tokens=4))
    assert scheduler.schedule().seqs == []


@pytest.mark.parametrize("is_running", [False, True])
def test_an_abort_drops_the_pending_token(is_running):
    scheduler = make_scheduler()
    seqs = [make_sequence(seq_id, prompt_len=4, max_tokens=9) for seq_id in range(2)]
    step = start(scheduler, *seqs)
    if not is_running:
        scheduler.preempt(seqs[0])
    scheduler.finish(seqs[0], "abort")
    assert seqs[0].token_ids == [0, 1, 2, 3]
    scheduler.postprocess(step, [[7], [8]])
    assert [seq.token_ids for seq in seqs] == [[0, 1, 2, 3], [1, 1, 2, 3, 8]]


def test_rows_of_pending_tokens_count_those_of_drafts():
    scheduler = make_scheduler()
    seqs = [make_sequence(seq_id, prompt_len=4, max_tokens=9) for seq_id in range(2)]
    for seq in seqs:
        scheduler.add(seq)
    run_step(scheduler)
    step = scheduler.schedule()
    seqs[0].token_ids.append(8)
    step.num_tokens[0] = step.num_logits[0] = 2
    scheduler.advance(step)
    assert seqs[1].token_ids[-1] == ~2
