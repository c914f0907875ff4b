"""What a step does to a sequence besides its number of tokens, and when features learn of it."""

import random

import pytest
from conftest import attach, finish_step, greedy
from test_scheduler import make_scheduler, make_sequence, run_step, run_steps

from nanovllm import SamplingParams
from nanovllm.engine.feature import Constraint, Feature, Features
from nanovllm.engine.scheduler import PrefillFirstScheduler, Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step

POINTS = (
    "begin_step limit_prefix may_start admitted limit_tokens scheduled planned sampled advanced"
    " releasing finished recorded"
).split()


class Recorder(Feature):
    """Remembers the calls of all points of the scheduler."""

    def __init__(self):
        self.calls = []


def override(point):
    default = getattr(Feature, point)

    def remember(recorder, *args):
        recorder.calls.append(point)
        return default(recorder, *args)

    setattr(Recorder, point, remember)


for point in POINTS:
    override(point)


def test_the_points_of_a_step_are_called_in_their_order():
    recorder = Recorder()
    scheduler = make_scheduler()
    attach(scheduler, recorder)
    scheduler.add(make_sequence(0, prompt_len=3, max_tokens=1))
    run_step(scheduler)
    assert recorder.calls == POINTS


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
    scheduler.add(seq)
    step = scheduler.schedule()
    scheduler.advance(step)
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


def test_prefill_first_splits_a_recomputation_only_if_it_is_first_in_a_step():
    scheduler = make_scheduler(PrefillFirstScheduler, budget=8)
    seqs = [make_sequence(seq_id, prompt_len=5, max_tokens=9) for seq_id in range(2)]
    for seq in seqs:
        scheduler.add(seq)
    assert run_steps(scheduler, 2) == [{0: 5}, {1: 5}]
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
                scheduler.finish(rng.choice(scheduler.running), "abort")
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
    scheduler.add(seq)
    step = scheduler.schedule()
    scheduler.advance(step)
    scheduler.preempt(seq)
    assert scheduler.schedule().seqs == []
    scheduler.postprocess(step, [[0]])
    assert scheduler.schedule().seqs == [seq]
    assert seq.token_ids[-1] == 0


def test_a_pending_token_that_is_the_last_one_is_not_computed():
    scheduler = make_scheduler()
    seq = make_sequence(0, prompt_len=5, max_tokens=1)
    scheduler.add(seq)
    step = scheduler.schedule()
    scheduler.advance(step)
    assert scheduler.schedule().seqs == []
    scheduler.postprocess(step, [[7]])
    assert seq.finish_reason == "length"


# --- What a feature decides is followed


class Meddler(Feature):
    """Shortens prefixes and chunks at random, drafts tokens that are right, and checks the rest.

    A token is its position, as in the prompts of make_sequence. `kv` stands for the K/V: for each
    slot, the sequence and the position that were written last.
    """

    def __init__(self, rng):
        self.rng = rng
        self.kv = {}

    def limit_prefix(self, seq, prefix):
        self.num_reused = self.rng.randint(0, len(prefix))
        for block in prefix[self.num_reused :]:  # otherwise there would be duplicates of these
            self.scheduler.block_manager.uncache(block.block_id)
        return prefix[: self.num_reused]

    def may_start(self, seq):
        self.may_start_now = self.rng.random() < 0.8
        return self.may_start_now

    def admitted(self, seq):
        assert self.may_start_now
        assert seq.num_computed_tokens == self.num_reused * self.scheduler.block_size
        assert seq.num_admitted_tokens == len(seq.token_ids)

    def limit_tokens(self, seq, num_tokens):
        assert seq in self.scheduler.running
        assert 1 <= num_tokens <= len(seq.token_ids) - seq.num_computed_tokens
        self.num_tokens = self.rng.randint(1, num_tokens)
        return self.num_tokens

    def scheduled(self, seq, end):
        assert end == seq.num_computed_tokens + self.num_tokens

    def planned(self, step):
        budget = self.scheduler.max_num_batched_tokens - sum(step.num_tokens)
        assert budget >= 0
        for index, (seq, num_tokens, num_logits) in enumerate(step):
            start = seq.num_computed_tokens
            length = len(seq.token_ids)
            assert num_logits == (start + num_tokens == length)
            if step.is_decode(index):
                seq.token_ids += range(length, length + min(budget, self.rng.randint(0, 5)))
                while not self.scheduler.block_manager.grow(seq):
                    seq.token_ids.pop()
            num_draft_tokens = len(seq.token_ids) - length
            step.num_tokens[index] += num_draft_tokens
            step.num_logits[index] += num_draft_tokens
            budget -= num_draft_tokens
            block_size = self.scheduler.block_size
            for position in range(start + step.num_tokens[index]):
                slot = seq.block_table[position // block_size], position % block_size
                if position >= start:
                    self.kv[slot] = seq, position
                assert self.kv[slot] == (seq, position)

    def releasing(self, seq):
        assert seq.block_table
        assert seq.lane >= 0
        assert seq in self.scheduler.running

    def finished(self, seq, reason):
        assert seq.finish_reason == reason
        assert not seq.block_table


def check_queues(scheduler):
    """Check a scheduler between two steps. Running sequences have cached all full blocks."""
    assert all(seq.lane >= 0 and seq.finish_reason is None for seq in scheduler.running)
    assert all(seq.lane == -1 and seq.finish_reason is None for seq in scheduler.waiting)
    lanes = [seq.lane for seq in scheduler.running]
    assert sorted([*lanes, *scheduler.free_lanes]) == list(range(scheduler.max_num_seqs))
    manager = scheduler.block_manager
    for seq in scheduler.running:
        num_full = seq.num_computed_tokens // scheduler.block_size
        assert seq.num_computed_tokens < len(seq.token_ids)
        assert all(manager.blocks[block_id].is_cached for block_id in seq.block_table[:num_full])
    for seq in scheduler.waiting:
        assert seq.num_computed_tokens == 0
        assert seq.lane == -1
        assert not seq.block_table


@pytest.mark.parametrize("policy", [Scheduler, PrefillFirstScheduler])
def test_the_decisions_of_features_are_followed(policy):
    """Whatever they are, sequences keep their order, tokens and K/V, and end where they must."""
    reasons = set()
    for seed in range(80):
        rng = random.Random(seed)
        scheduler = make_scheduler(policy, num_blocks=9, max_num_seqs=3, budget=rng.randint(4, 12))
        scheduler.block_size = rng.randint(1, 4)
        scheduler.block_manager.block_size = scheduler.block_size
        attach(scheduler, Meddler(rng))
        seqs = []
        for seq_id in range(5):
            # At most 9 blocks of tokens, which fill the pool.
            prompt = [seq_id, *range(1, rng.randint(1, 4 * scheduler.block_size))]
            stop_token_ids = frozenset(rng.sample(range(5, 40), 3))
            params = SamplingParams(max_tokens=rng.randint(1, 5 * scheduler.block_size))
            seqs.append(Sequence(seq_id, prompt, params, stop_token_ids=stop_token_ids))
            scheduler.add(seqs[-1])
        num_computed = 0
        for _ in range(200):
            step = scheduler.schedule()
            _, positions = step.list_rows()
            sampled = step.split(positions)
            nan = rng.choice(range(20))
            if nan < len(step.seqs) and sampled[nan]:
                sampled[nan] = [*sampled[nan][:-1], -1]
            num_computed += sum(step.num_tokens)
            finish_step(scheduler, step, sampled)
            check_queues(scheduler)
            assert [*scheduler.running, *scheduler.waiting] == [
                seq for seq in seqs if seq.finish_reason is None
            ]
        counted = scheduler.num_prefill_tokens + scheduler.num_decode_tokens
        assert counted == num_computed
        for seq in seqs:
            reasons.add(seq.finish_reason)
            length = len(seq.token_ids)
            assert seq.finish_reason is not None and seq.lane == -1
            assert seq.token_ids == [seq.seq_id, *range(1, length)]
            assert not seq.stop_token_ids.intersection(range(seq.num_prompt_tokens, length - 1))
            if seq.finish_reason == "length":
                assert length == seq.max_num_tokens
            if seq.finish_reason == "stop":
                assert length - 1 in seq.stop_token_ids
    assert reasons == {"length", "stop", "error"}


def test_a_reset_keeps_the_order_and_resets_features():
    scheduler = make_scheduler(max_num_seqs=2)
    seqs = [make_sequence(seq_id, prompt_len=5, max_tokens=3) for seq_id in range(3)]
    for seq in seqs:
        scheduler.add(seq)
    resets = []

    class Resets(Feature):
        def reset(self):
            resets.append(list(scheduler.waiting))

    scheduler.features = Features([Resets()])
    run_step(scheduler)
    scheduler.reset(seqs)
    assert resets == [seqs], "when the sequences wait"
    assert scheduler.running == []
    check_queues(scheduler)
    assert {seq.num_cached_tokens for seq in seqs} == {None}
    assert run_steps(scheduler, 3) == [{0: 6, 1: 6}, {0: 1, 1: 1}, {2: 5}]


def test_two_features_cannot_give_a_request_one_field(make_llm):
    """A request has one constraint, and the second one would replace the first."""

    class Ends(Feature):
        def prepare(self, params, num_samples):
            return {"constraint": Constraint()}

    llm = make_llm()
    llm.add_feature(Ends())
    assert llm.generate([1, 2], greedy(2))
    llm.add_feature(Ends())
    with pytest.raises(ValueError, match="two features give a request its constraint"):
        llm.generate([1, 2], greedy(2))
