"""When features learn of what the scheduler does, and that it follows what they decide."""

import random

import pytest
from conftest import attach, greedy
from test_scheduler import make_scheduler, make_sequence, run_step, run_steps

from nanovllm import SamplingParams
from nanovllm.engine.feature import Constraint, Feature
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


def listen(scheduler, point, note):
    """Attach a feature that overrides one point, and calls `note` with its arguments."""
    feature = type("Listener", (Feature,), {point: lambda _, *arguments: note(*arguments)})()
    attach(scheduler, *scheduler.features, feature)


def test_points_are_also_called_when_little_happens():
    """A step of chunks samples nothing, and a waiting sequence can be aborted."""
    scheduler = make_scheduler()
    calls = []
    listen(scheduler, "recorded", lambda step: calls.append(step.num_tokens))
    listen(scheduler, "finished", lambda seq, reason: calls.append((seq.seq_id, reason)))
    scheduler.add(make_sequence(0, prompt_len=20, max_tokens=9))
    scheduler.add(make_sequence(1, prompt_len=20, max_tokens=9))
    run_step(scheduler)
    scheduler.finish(next(iter(scheduler.waiting)), "abort")
    assert calls == [[16], (1, "abort")]


def test_a_feature_learns_of_each_token_that_enters_a_block():
    """Also of one that is pending, because its K/V are written before it is known."""
    scheduler = make_scheduler()
    ends = []
    listen(scheduler, "scheduled", lambda seq, end: ends.append(end))
    scheduler.add(make_sequence(0, prompt_len=15, max_tokens=9))
    in_flight = scheduler.schedule()
    scheduler.advance(in_flight)
    for _ in range(2):  # the next token is within a block
        step = scheduler.schedule()
        scheduler.postprocess(in_flight, [[7]])
        scheduler.advance(step)
        in_flight = step
    assert ends == [15, 16, 17]


def test_what_a_feature_sees_of_a_sequence_that_is_released():
    scheduler = make_scheduler()
    seen = []
    listen(
        scheduler,
        "releasing",
        lambda seq: seen.append((seq.finish_reason, seq.num_computed_tokens, seq.token_ids[-1])),
    )
    for max_tokens in (1, 9):
        scheduler.add(make_sequence(max_tokens, prompt_len=4, max_tokens=max_tokens))
    step = scheduler.schedule()
    scheduler.advance(step)
    scheduler.finish(step.seqs[1], "abort")
    scheduler.postprocess(step, [[7], []])
    assert seen == [("abort", 4, 3), ("length", 4, 7)]


def test_a_refused_sequence_evicts_nothing():
    scheduler = make_scheduler()
    scheduler.add(make_sequence(0, prompt_len=16, max_tokens=1))
    run_step(scheduler)
    asked = []
    listen(scheduler, "may_start", lambda seq: asked.append(seq) or False)
    listen(scheduler, "may_start", lambda seq: asked.append(seq) or True)
    scheduler.add(make_sequence(1, prompt_len=32, max_tokens=1))
    assert scheduler.schedule().seqs == []
    assert len(asked) == 2, "each feature is asked, because it may prepare something"
    assert scheduler.block_manager.count_states()["reusable"] == 4


def test_a_feature_can_extend_a_prefix():
    """A store of K/V restores blocks."""
    scheduler = make_scheduler()
    manager = scheduler.block_manager

    class Store(Feature):
        def limit_prefix(self, seq, prefix):
            block_id = manager.take()
            manager.cache_block(seq, len(prefix), block_id)
            manager.release_block(seq, len(prefix), block_id)
            return [*prefix, manager.blocks[block_id]]

    attach(scheduler, Store())
    seq = make_sequence(0, prompt_len=9, max_tokens=2)
    scheduler.add(seq)
    assert run_step(scheduler) == {0: 5}
    assert seq.num_cached_tokens == scheduler.num_cached_tokens == 4
    assert manager.blocks[seq.block_table[0]].is_cached


def test_a_prompt_that_has_to_wait_for_the_next_step_evicts_nothing():
    scheduler = make_scheduler(PrefillFirstScheduler)
    scheduler.add(make_sequence(0, prompt_len=16, max_tokens=1))
    run_step(scheduler)
    for seq_id, prompt_len in ((1, 4), (2, 16)):
        scheduler.add(make_sequence(seq_id, prompt_len, max_tokens=1))
    assert len(scheduler.schedule().seqs) == 1
    assert scheduler.block_manager.count_states()["reusable"] == 4


def test_a_sequence_that_gets_no_tokens_takes_no_block():
    """A chunk that a feature has cut can take the whole budget of the next step."""
    scheduler = make_scheduler(num_blocks=4, budget=8)

    class CutsFirstChunks(Feature):
        def limit_tokens(self, seq, num_tokens):
            return min(num_tokens, 4) if seq.num_computed_tokens == 0 else num_tokens

    attach(scheduler, CutsFirstChunks())
    for seq_id, prompt_len, max_tokens in ((0, 12, 1), (1, 4, 9)):
        scheduler.add(make_sequence(seq_id, prompt_len, max_tokens))
    assert run_steps(scheduler, 3) == [{0: 4, 1: 4}, {0: 8}, {1: 1}]
    assert scheduler.num_preemptions == 0


# --- What a feature decides is followed


class Meddler(Feature):
    """Shortens prefixes and chunks at random, drafts tokens that are right, and checks the rest.

    A token is its position, as in the prompts of make_sequence. `kv` stands for the K/V: for each
    slot, the first token of the sequence and the position that were written last.
    """

    def __init__(self, rng, drafts, has_nan):
        self.rng = rng
        self.drafts = drafts
        self.has_nan = has_nan
        self.kv = {}
        self.num_cached = {}  # by sequence, at its first admission
        self.num_tokens_of_steps = 0
        self.num_decode_tokens = 0
        self.num_preemptions = 0
        self.finished_seqs = []

    def begin_step(self):
        self.is_refused = False
        self.offered = {}  # tokens that could be scheduled, and those that are, by sequence
        self.admitted_seqs = []
        self.preempted = []

    def limit_prefix(self, seq, prefix):
        self.prefix = prefix[: self.rng.randint(0, 2 * len(prefix))]
        return self.prefix

    def may_start(self, seq):
        self.is_refused = self.rng.random() < 0.2
        return not self.is_refused

    def admitted(self, seq):
        scheduler = self.scheduler
        assert not self.is_refused
        assert seq.num_computed_tokens == len(self.prefix) * scheduler.block_size
        assert seq.num_admitted_tokens == len(seq.token_ids)
        assert seq.lane >= 0
        assert seq.lane not in [each.lane for each in scheduler.running[:-1]]
        assert seq is scheduler.running[-1]
        assert seq not in scheduler.waiting
        self.admitted_seqs.append(seq)
        self.num_cached.setdefault(seq, min(seq.num_computed_tokens, seq.num_prompt_tokens))
        assert seq.num_cached_tokens == self.num_cached[seq]
        assert scheduler.num_cached_tokens == sum(self.num_cached.values())

    def limit_tokens(self, seq, num_tokens):
        assert seq in self.scheduler.running
        self.num_tokens = self.rng.randint(1, num_tokens)
        self.offered[seq] = num_tokens, self.num_tokens
        return self.num_tokens

    def scheduled(self, seq, end):
        assert end == seq.num_computed_tokens + self.num_tokens
        if not self.has_nan:
            check_cached(self.scheduler, seq, min(end, seq.num_known_tokens))

    def planned(self, step):
        budget = self.check_tokens(step)
        running = self.scheduler.running
        assert step.seqs == [seq for seq in running if seq in step.seqs]
        self.num_preemptions += len(self.preempted)
        assert self.scheduler.num_preemptions == self.num_preemptions
        if budget > 0:
            self.check_that_no_more_fits(step, budget)
        if self.drafts:
            self.append_drafts(step, budget)
        self.decoding_seqs = [seq for index, seq in enumerate(step.seqs) if step.is_decode(index)]
        self.write_kv(step)

    def check_tokens(self, step):
        """Check that only features and the budget cut chunks. Return the rest of the budget."""
        budget = self.scheduler.max_num_batched_tokens
        for seq, num_tokens, num_logits in step:
            num_missing = len(seq.token_ids) - seq.num_computed_tokens
            # Of a decode within a block, features do not learn.
            offered, scheduled = self.offered.get(seq, (1, 1))
            assert offered == min(num_missing, budget)
            is_cut = offered < num_missing and seq in self.admitted_seqs
            assert not is_cut or self.scheduler.splits_prompts or seq is step.seqs[0]
            assert scheduled == num_tokens
            assert num_logits == (1 if num_tokens == num_missing else 0)
            budget -= num_tokens
        assert budget >= 0
        return budget

    def append_drafts(self, step, budget):
        for index, seq in enumerate(step.seqs):
            length = len(seq.token_ids)
            if step.is_decode(index):
                seq.token_ids += range(length, length + min(budget, self.rng.randint(0, 5)))
                while not self.scheduler.block_manager.grow(seq):
                    seq.token_ids.pop()
            num_draft_tokens = len(seq.token_ids) - length
            step.num_tokens[index] += num_draft_tokens
            step.num_logits[index] += num_draft_tokens
            budget -= num_draft_tokens

    def write_kv(self, step):
        """Write the K/V of a step, and check those before it."""
        block_size = self.scheduler.block_size
        for seq, num_tokens, _ in step:
            start = seq.num_computed_tokens
            for position in range(start + num_tokens):
                slot = seq.block_table[position // block_size], position % block_size
                if position >= start:
                    self.kv[slot] = seq.token_ids[0], position
                assert self.kv[slot] == (seq.token_ids[0], position)

    def check_that_no_more_fits(self, step, budget):
        """Check that a step with a rest of its budget has all that it could have."""
        scheduler = self.scheduler
        is_mixed = scheduler.splits_prompts
        decodes = [len(seq.token_ids) > seq.num_admitted_tokens for seq in step.seqs]
        assert is_mixed or all(decodes) or not any(decodes)
        for seq in scheduler.running:
            has_sampled = len(seq.token_ids) > seq.num_admitted_tokens
            waits_for_its_end = has_sampled and len(seq.token_ids) >= seq.max_num_tokens
            waits_for_prefills = has_sampled and not is_mixed and not all(decodes)
            assert seq in step.seqs or waits_for_its_end or waits_for_prefills
        head = next(iter(scheduler.waiting), None)
        was_tried = not self.preempted and (is_mixed or not any(decodes))
        if head and scheduler.free_lanes and was_tried and not self.is_refused:
            is_blocked = head.has_pending_token or scheduler.block_manager.is_still_blocked(head)
            num_missing = len(head.token_ids) - len(self.prefix) * scheduler.block_size
            assert is_blocked or (not is_mixed and num_missing > budget)

    def advanced(self, step):
        for seq, num_tokens, _ in step:
            self.num_tokens_of_steps += num_tokens
            if seq in self.decoding_seqs:
                self.num_decode_tokens += num_tokens
        scheduler = self.scheduler
        assert scheduler.num_decode_tokens == self.num_decode_tokens
        counted = scheduler.num_prefill_tokens + scheduler.num_decode_tokens
        assert counted == self.num_tokens_of_steps

    def releasing(self, seq):
        assert seq.block_table
        assert seq.lane >= 0
        assert seq in self.scheduler.running
        if seq.finish_reason is None:
            assert seq is self.scheduler.running[-1]
            assert not self.scheduler.block_manager.free_block_ids
            self.preempted.append(seq)
        elif seq.finish_reason != "abort":
            num_tokens = len(seq.token_ids)
            num_with_kv = num_tokens if seq.ends_with_prompt else num_tokens - 1
            assert seq.num_computed_tokens >= num_with_kv

    def finished(self, seq, reason):
        assert seq.finish_reason == reason
        assert not seq.block_table
        self.finished_seqs.append(seq)


class Follower(Feature):
    """Comes after a Meddler, and receives what it has left."""

    def __init__(self, meddler):
        self.meddler = meddler

    def limit_prefix(self, seq, prefix):
        assert prefix == self.meddler.prefix
        return prefix

    def limit_tokens(self, seq, num_tokens):
        assert num_tokens == self.meddler.num_tokens
        return num_tokens


def check_cached(scheduler, seq, num_tokens):
    """Check that the full blocks of some tokens are cached, or duplicates of cached ones."""
    for block_id in seq.block_table[: num_tokens // scheduler.block_size]:
        block = scheduler.block_manager.blocks[block_id]
        assert block.is_cached or block.is_duplicate


def check_queues(scheduler, has_nan=False):
    """Check a scheduler between two steps. Running sequences have cached all full blocks.

    After NaN, blocks that several sequences share are not cached any more.
    """
    assert all(seq.lane >= 0 and seq.finish_reason is None for seq in scheduler.running)
    assert all(seq.lane == -1 and seq.finish_reason is None for seq in scheduler.waiting)
    lanes = [seq.lane for seq in scheduler.running]
    assert sorted([*lanes, *scheduler.free_lanes]) == list(range(scheduler.max_num_seqs))
    for seq in scheduler.running:
        assert seq.num_computed_tokens < len(seq.token_ids)
        if not has_nan:
            check_cached(scheduler, seq, seq.num_computed_tokens)
    for seq in scheduler.waiting:
        assert seq.num_computed_tokens == 0
        assert seq.lane == -1
        assert not seq.block_table


def make_random_sequence(rng, seq_id, block_size):
    """A sequence of at most nine blocks."""
    prompt = [seq_id % 2, *range(1, rng.randint(1, 4 * block_size))]
    params = SamplingParams(
        min_tokens=rng.choice([0, 0, 1]), max_tokens=rng.randint(1, 5 * block_size)
    )
    return Sequence(
        seq_id,
        prompt,
        params,
        stop_token_ids=frozenset(rng.sample(range(5, 40), 3)),
        max_model_len=rng.choice([2**31, len(prompt) + 2]),
        ends_with_prompt=rng.random() < 0.2,
    )


def check_end(seq):
    """Check that a sequence has ended where it must."""
    length = len(seq.token_ids)
    assert seq.lane == -1
    assert seq.token_ids == [seq.seq_id % 2, *range(1, length)]
    assert not seq.stop_token_ids.intersection(range(seq.min_num_tokens, length - 1))
    if seq.finish_reason == "length":
        assert length == seq.max_num_tokens
    elif seq.finish_reason == "stop":
        assert length - 1 in seq.stop_token_ids
    else:
        assert seq.finish_reason in ("error", "abort")


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("policy", [Scheduler, PrefillFirstScheduler])
def test_the_decisions_of_features_are_followed(policy, overlaps):
    """Whatever they are, sequences keep their order, tokens and K/V, and end where they must.

    With overlap, a step is planned before the tokens of the last one are known.
    """
    reasons = set()
    for seed in range(100):
        rng = random.Random(seed)
        has_nan = seed % 2 == 0
        budget = rng.randint(4, 12)
        block_size = rng.randint(1, 4)
        scheduler = make_scheduler(policy, num_blocks=9, max_num_seqs=3, budget=budget)
        scheduler.block_size = block_size
        scheduler.block_manager.block_size = block_size
        meddler = Meddler(rng, not overlaps, has_nan)
        attach(scheduler, meddler, Follower(meddler))
        seqs = [make_random_sequence(rng, seq_id, block_size) for seq_id in range(5)]
        for seq in seqs:
            scheduler.add(seq)
        in_flight = Step(), []
        for _ in range(120):
            step = scheduler.schedule()
            if overlaps:
                scheduler.postprocess(*in_flight)
                step.drop_ended()
            _, positions = step.list_rows()
            sampled = step.split(positions)
            scheduler.advance(step)
            nan = rng.choice(range(20))
            if has_nan and nan < len(step.seqs) and sampled[nan]:
                sampled[nan] = [*sampled[nan][:-1], -1]
            unfinished = [seq for seq in seqs if seq.finish_reason is None]
            if unfinished and rng.random() < 0.02:
                scheduler.finish(rng.choice(unfinished), "abort")
            in_flight = step, sampled
            if not overlaps:
                scheduler.postprocess(*in_flight)
                check_queues(scheduler, has_nan)
            unfinished = [seq for seq in seqs if seq.finish_reason is None]
            assert [*scheduler.running, *scheduler.waiting] == unfinished
        for seq in seqs:
            check_end(seq)
            reasons.add(seq.finish_reason)
        assert sorted(each.seq_id for each in meddler.finished_seqs) == [0, 1, 2, 3, 4]
    assert reasons == {"length", "stop", "error", "abort"}


def test_a_reset_keeps_the_order_and_resets_features():
    scheduler = make_scheduler(max_num_seqs=2)
    seqs = [make_sequence(seq_id, prompt_len=5, max_tokens=3) for seq_id in range(3)]
    for seq in seqs:
        scheduler.add(seq)
    run_step(scheduler)
    scheduler.preempt(seqs[1])
    seen = []
    listen(scheduler, "reset", lambda: seen.append([seq.lane for seq in scheduler.waiting]))
    listen(scheduler, "releasing", seen.append)  # a store would keep K/V of old weights
    seen.clear()
    scheduler.reset(seqs)
    assert seen == [[-1] * 3], "when the sequences wait"
    assert scheduler.running == []
    check_queues(scheduler)
    assert {seq.num_cached_tokens for seq in seqs} == {None}
    assert scheduler.num_prefill_tokens == 10, "counters go on"
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
