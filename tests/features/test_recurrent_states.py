"""A state is read where it was written, and snapshots are kept where they are useful.

There is no model. A state is the list of the tokens that it has seen. tests/models/test_qwen3_5.py
has the model.
"""

import random
from types import SimpleNamespace

import pytest
from conftest import attach, finish_step

from nanovllm import SamplingParams
from nanovllm.config import Config
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import PrefillFirstScheduler, Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.features.recurrent_states import RecurrentStates, Slots
from nanovllm.features.speculation.costs import StepCosts
from nanovllm.features.speculation.drafts import Drafts
from nanovllm.worker.state_slots import ZEROS, StateSlots

BLOCK_SIZE = 4
X, Y = [50] * 16, [60] * 8  # prefixes of whole blocks


def next_token(token_ids):
    """Stands for a model."""
    return (sum(token_ids) + len(token_ids) // 3) % 3


class Engine:
    """A scheduler with states and drafts, and the content of each state slot."""

    def __init__(self, policy=Scheduler, num_blocks=100, num_lanes=3, budget=64, propose=None):
        self.scheduler = policy(BlockManager(num_blocks, BLOCK_SIZE), num_lanes, budget)
        self.states = RecurrentStates()
        config = Config("", num_speculative_tokens=3 if propose else 0)
        self.states.state_slots = StateSlots(config, num_lanes)
        self.states.snapshot_slots = self.states.state_slots.snapshots
        features = [self.states]
        if propose:
            drafts = Drafts()
            drafts.max_draft_len = 3
            drafts.costs = StepCosts(per_token=0.0)
            drafts.proposer.make_lookup = lambda token_ids: SimpleNamespace(
                propose=lambda num_tokens: propose(token_ids, num_tokens)
            )
            features.insert(0, drafts)
        attach(self.scheduler, *features)
        self.content = {ZEROS: []}
        self.num_seqs = 0

    def add(self, prompt, max_tokens=1):
        seq = Sequence(self.num_seqs, prompt, SamplingParams(max_tokens=max_tokens))
        self.num_seqs += 1
        self.scheduler.add(seq)
        return seq

    def step(self, is_nan=lambda seq: False):
        """Run a step. Return its plan."""
        step = self.scheduler.schedule()
        slots = self.states.slots
        writes = [slots[seq].write for seq in step.seqs]
        assert len(set(writes)) == len(writes)
        assert ZEROS not in writes
        for seq in self.scheduler.running:
            assert self.content[slots[seq].read] == seq.token_ids[: seq.num_computed_tokens]
            own = writes[step.seqs.index(seq)] if seq in step.seqs else None
            assert slots[seq].read not in set(writes) - {own}
        sampled = []
        for seq, num_tokens, num_logits in step:
            self.content[slots[seq].write] = seq.token_ids[: seq.num_computed_tokens + num_tokens]
            length = len(seq.token_ids)
            ends = range(length - num_logits + 1, length + 1)
            sampled.append([-1 if is_nan(seq) else next_token(seq.token_ids[:end]) for end in ends])
        plan = {seq.seq_id: num_tokens for seq, num_tokens, _ in step}
        finish_step(self.scheduler, step, sampled)
        assert not self.states.new_snapshots
        for slot in self.states.snapshots.values():
            assert len(self.content[slot]) % BLOCK_SIZE == 0
        kept = [*self.states.empty_slots, *self.states.snapshots.values()]
        assert sorted(kept) == list(self.states.snapshot_slots)
        return plan

    def serve(self, prompt):
        """Compute a prompt alone. Return how many of its tokens were reused."""
        seq = self.add(prompt)
        while not seq.finish_reason:
            self.step()
        return seq.num_cached_tokens


@pytest.mark.parametrize("policy", [Scheduler, PrefillFirstScheduler])
@pytest.mark.parametrize("has_drafts", [False, True])
def test_a_state_is_read_where_it_was_written(policy, has_drafts):
    """Whatever is shared, preempted, drafted, rejected, aborted or NaN."""
    rng = random.Random(0)

    def propose(token_ids, num_tokens):
        draft = []
        for _ in range(num_tokens):
            is_right = rng.random() < 0.8
            draft.append(next_token(token_ids + draft) if is_right else 3)
        return draft

    num_reused = 0
    for _ in range(25):
        engine = Engine(
            policy,
            num_blocks=rng.randint(14, 30),
            num_lanes=rng.randint(1, 4),
            budget=rng.randint(30, 40) if policy is PrefillFirstScheduler else rng.randint(3, 40),
            propose=propose if has_drafts else None,
        )
        engine.states.keeps_prompts = rng.random() < 0.3
        seqs = []
        for _ in range(14):
            prefix = [rng.randint(0, 1)] * rng.choice([3, 8, 17])
            prompt = [*prefix, *rng.choices(range(9), k=rng.randint(1, 9))]
            seqs.append(engine.add(prompt, max_tokens=rng.randint(1, 20)))
            for _ in range(rng.randint(0, 3)):
                engine.step(is_nan=lambda seq: rng.random() < 0.02)
            if rng.random() < 0.1 and engine.scheduler.running:
                engine.scheduler.finish(rng.choice(engine.scheduler.running), "abort")
        for _ in range(400):
            engine.step()
        for seq in seqs:
            num_reused += seq.num_cached_tokens or 0
            assert seq.finish_reason
            for position in range(seq.num_prompt_tokens, len(seq.token_ids)):
                assert seq.token_ids[position] == next_token(seq.token_ids[:position])
        assert not engine.states.slots
    assert num_reused > 200


@pytest.mark.parametrize("budget", [64, 16, 15, 7])
def test_the_second_sequence_leaves_the_snapshot(budget):
    engine = Engine(budget=budget)
    assert [engine.serve([*X, index]) for index in range(4)] == [0, 0, 16, 16]


@pytest.mark.parametrize("budget", [64, 7])
def test_each_prompt_can_leave_a_snapshot_at_its_last_full_block(budget):
    engine = Engine(budget=budget)
    engine.states.keeps_prompts = True
    prompts = [[*X, 1, 2], [*X, 3], [*X, 4, *X, 5], [*X, 4, *X, 6], [*X, 1, 2]]
    assert [engine.serve(prompt) for prompt in prompts] == [0, 16, 16, 32, 16]


@pytest.mark.parametrize("num_blocks", [8, 9, 10, 11])
def test_a_snapshot_can_be_used_if_its_k_v_were_evicted_while_they_were_computed_again(num_blocks):
    """The second sequence holds duplicates of the prefix, and evicts the first one's blocks."""
    engine = Engine(num_blocks=num_blocks)
    for index, expected in enumerate([0, 0, 16, 16]):
        seq = engine.add([*X, index], max_tokens=14)
        while not seq.finish_reason:
            engine.step()
        assert seq.num_cached_tokens == expected


def test_the_least_recently_used_snapshot_is_evicted():
    engine = Engine(num_lanes=2)
    a, b, c = ([first] * 8 for first in (10, 20, 30))
    assert [engine.serve([*prefix, index]) for prefix in (a, b) for index in range(3)] == [
        0,
        0,
        8,
        0,
        0,
        8,
    ]
    assert engine.serve([*a, 3]) == 8
    assert [engine.serve([*c, index]) for index in range(3)] == [0, 0, 8], "in the slot of b"
    assert engine.serve([*a, 4]) == 8
    assert engine.serve([*b, 4]) == 0


def test_a_snapshot_that_is_read_is_not_evicted():
    """Three sequences of one step: the first two read snapshots, the last two leave new ones."""
    engine = Engine(num_lanes=3)
    a, b, c, d = ([first] * 8 for first in (10, 20, 30, 40))
    for prefix in (c, a, b):
        engine.serve([*prefix, 0])
        engine.serve([*prefix, 1])
    engine.serve([*b, *Y, 0])
    engine.serve([*d, 0])
    for prompt in ([*a, 2], [*b, *Y, 2], [*d, 2]):
        engine.add(prompt)
    assert engine.step() == {8: 1, 9: 8, 10: 9}
    assert len(engine.states.snapshots) == 3


def test_an_empty_slot_that_is_read_is_not_written():
    """NaN has emptied all slots. The sequence that left a snapshot just before still reads it."""
    engine = Engine(num_lanes=3)
    for prefix in (X, Y):
        engine.serve([*prefix, 0])
    engine.add([*X, 1])
    engine.add([7])
    assert engine.step(is_nan=lambda seq: seq.seq_id == 3) == {2: 16, 3: 1}
    assert not engine.states.snapshots
    engine.add([*Y, 1])
    assert engine.step() == {2: 1, 4: 8}


def test_a_preempted_sequence_leaves_no_snapshot():
    """The prefix that it finds again is its own."""
    engine = Engine()
    seq = engine.add([*X, 1], max_tokens=9)
    engine.step()
    engine.scheduler.preempt(seq)
    while not seq.finish_reason:
        engine.step()
    assert not engine.states.snapshots
    assert seq.num_cached_tokens == 0


def test_a_blocked_head_fits_when_a_snapshot_of_its_prefix_is_left():
    """Sequence 2 matches more of sequence 0 than sequence 1 does, and does not wait for it."""
    engine = Engine(num_blocks=17, budget=100)
    for prompt in ([*X, *Y, 0, 0, 0, 0], [*X, 1, 1, 1, 1], [*X, *Y, 2, 2, 2, 2]):
        engine.add(prompt, max_tokens=4)
    assert engine.step() == {0: 28, 1: 16}
    # Sequence 2 needs 7 blocks, or 3 with the snapshot. 4 are free.
    assert engine.step() == {0: 1, 1: 4, 2: 8}
    assert engine.step() == {0: 1, 1: 1, 2: 4}


@pytest.mark.parametrize("policy", [Scheduler, PrefillFirstScheduler])
def test_a_rejected_draft_stalls_no_other_decode(policy):
    """The next step of its sequence recomputes a token and has no draft."""

    def propose(token_ids, num_tokens):
        return [7] * num_tokens if token_ids[0] == 1 else []

    engine = Engine(policy, budget=6, propose=propose)
    for first in (1, 2):
        engine.add([first, 2, 3], max_tokens=20)
    assert engine.step() == {0: 3, 1: 3}
    for _ in range(3):
        assert engine.step() == {0: 4, 1: 1}
        assert engine.step() == {0: 2, 1: 1}


def test_a_head_that_has_waited_leaves_its_snapshot_where_it_matches_now():
    engine = Engine()
    engine.serve([*X, 0])
    seqs = [engine.add([*X, *Y, last]) for last in (1, 2)]
    while not all(seq.finish_reason for seq in seqs):
        engine.step()
    assert engine.serve([*X, *Y, 3]) == len(X) + len(Y)


def test_a_kept_prompt_leaves_a_snapshot_that_it_can_reuse_itself():
    """The last token is computed again, so the last block before it counts."""
    engine = Engine()
    engine.states.keeps_prompts = True
    assert [engine.serve(X) for _ in range(2)] == [0, 12]


def test_a_kept_prompt_also_leaves_a_snapshot_where_it_matches():
    engine = Engine()
    engine.states.keeps_prompts = True
    assert [engine.serve([*X, *[last] * 5]) for last in (1, 2, 3)] == [0, 0, 16]


def test_a_snapshot_that_exists_does_not_prevent_the_next_one():
    engine = Engine()
    for last in (0, 1):
        engine.serve([*X, last])
    seq = engine.add([*X, 1, 2, 3, 4, 5])
    engine.states.slots[seq] = Slots(snapshot_positions=[16, 20])
    assert engine.states.limit_tokens(seq, 21) == 20


@pytest.mark.parametrize("is_running", [True, False])
def test_the_oldest_snapshot_that_is_not_read_is_evicted(is_running):
    """Only running sequences read."""
    engine = Engine()
    states = engine.states
    seq = engine.add([1, 2], max_tokens=9)
    engine.step()
    states.empty_slots.clear()
    states.snapshots.update(enumerate(states.snapshot_slots))
    states.slots[seq].read = states.snapshots[0]
    if not is_running:
        engine.scheduler.preempt(seq)
    evicted = 1 if is_running else 0
    expected = states.snapshots[evicted]
    assert states.take_slot() == expected
    assert evicted not in states.snapshots
    assert len(states.snapshots) == len(states.snapshot_slots) - 1


def test_a_new_snapshot_is_the_last_to_be_evicted():
    engine = Engine(num_lanes=2)
    prefixes = [[first] * 16 for first in (10, 20, 30, 40)]
    for prefix in prefixes:
        for last in (0, 1):
            engine.serve([*prefix, last])
    assert [engine.serve([*prefix, 2]) for prefix in prefixes[2:]] == [16, 16]


@pytest.mark.parametrize("keeps_prompts", [False, True])
def test_a_sequence_that_is_preempted_before_its_snapshot_leaves_it_later(keeps_prompts):
    engine = Engine(budget=10)
    engine.states.keeps_prompts = keeps_prompts
    if not keeps_prompts:
        engine.serve([*X, 0])
    seq = engine.add([*X, 1])
    assert engine.step() == {seq.seq_id: 10}
    engine.scheduler.preempt(seq)
    while not seq.finish_reason:
        engine.step()
    assert engine.serve([*X, 2]) == 16


def test_two_sequences_of_a_step_leave_one_snapshot():
    engine = Engine()
    seqs = [engine.add([*X, 1, 2, 3]) for _ in range(2)]
    for seq in seqs:
        engine.states.slots[seq] = Slots(snapshot_positions=[16])
    num_empty = len(engine.states.empty_slots)
    assert [engine.states.limit_tokens(seq, 19) for seq in seqs] == [16, 19]
    assert len(engine.states.empty_slots) == num_empty - 1
