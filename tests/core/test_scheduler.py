"""The scheduler under random loads: its limits, its order, and that every sequence finishes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import PrefillFirstScheduler, Scheduler
from nanovllm.engine.sequence import Sequence

BLOCK_SIZE = 4
NUM_BLOCKS = 8


def make_scheduler(num_blocks=NUM_BLOCKS, policy=Scheduler, **options):
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 16, **options}
    return policy(BlockManager(num_blocks, BLOCK_SIZE), **settings)


def make_sequence(seq_id, prompt_len, max_tokens, first_token=None):
    prompt = [seq_id if first_token is None else first_token, *range(1, prompt_len)]
    return Sequence(seq_id, prompt, SamplingParams(max_tokens=max_tokens))


def run_step(scheduler):
    seqs = scheduler.schedule()
    for seq in seqs:
        is_complete = seq.num_computed_tokens + seq.num_scheduled_tokens == len(seq.token_ids)
        assert seq.num_logits == int(is_complete)
    scheduler.postprocess(seqs, [[7] * seq.num_logits for seq in seqs])
    return seqs


@given(
    loads=st.lists(
        st.tuples(st.integers(1, 16), st.integers(1, 16), st.integers(0, 3)),
        min_size=1,
        max_size=12,
    ),
    num_blocks=st.integers(NUM_BLOCKS, 20),
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(1, 40),
    chunked=st.booleans(),
    aborted=st.sets(st.integers(0, 11), max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_random_loads(loads, num_blocks, max_num_seqs, budget, chunked, aborted):
    budget = budget if chunked else max(budget, 16)
    scheduler = make_scheduler(
        num_blocks,
        policy=Scheduler if chunked else PrefillFirstScheduler,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
    )
    seqs = [
        make_sequence(i, prompt, tokens, shared) for i, (prompt, tokens, shared) in enumerate(loads)
    ]
    pending = list(seqs)
    for step in range(2000):
        if pending and step % 2 == 0:
            scheduler.add(pending.pop(0))
        if step in aborted and (victims := [*scheduler.waiting, *scheduler.running]):
            scheduler.finish(victims[step % len(victims)], "abort")
        unfinished = [*scheduler.running, *scheduler.waiting]
        if not unfinished and not pending:
            break
        behind = {seq: len(seq.token_ids) - seq.num_computed_tokens for seq in scheduler.running}
        progress = [(len(seq.token_ids), seq.num_computed_tokens) for seq in unfinished[:1]]
        scheduled = run_step(scheduler)
        assert sum(seq.num_scheduled_tokens for seq in scheduled) <= budget
        assert all(seq.num_scheduled_tokens >= 1 for seq in scheduled) and len(
            set(scheduled)
        ) == len(scheduled)
        assert len(scheduler.running) <= max_num_seqs
        order = [seq.seq_id for seq in [*scheduler.running, *scheduler.waiting]]
        assert order == sorted(order), "first come, first served; the newest is preempted"
        assert sorted([seq.lane for seq in scheduler.running] + scheduler.free_lanes) == list(
            range(max_num_seqs)
        )
        assert chunked or len({behind.get(seq) == 1 for seq in scheduled}) <= 1, (
            "all prefill or all decode"
        )
        if chunked and unfinished:
            oldest = unfinished[0]
            assert oldest.finish_reason or progress != [
                (len(oldest.token_ids), oldest.num_computed_tokens)
            ], "it stands still"
    else:
        raise AssertionError("not every sequence finished")
    assert len(scheduler.block_manager.free_block_ids) == num_blocks
    for seq in seqs:
        assert seq.finish_reason == "abort" or len(seq.token_ids) == seq.max_num_tokens


def test_the_two_policies():
    """A long prompt arrives during a decode. Mixed steps serve both, prefill first delays the
    decode.
    """
    kinds = {}
    for policy in (Scheduler, PrefillFirstScheduler):
        scheduler = make_scheduler(max_num_batched_tokens=8, policy=policy)
        scheduler.add(make_sequence(0, 3, 10))
        run_step(scheduler)
        scheduler.add(make_sequence(1, 8, 2))
        kinds[policy] = [
            [(seq.seq_id, seq.num_scheduled_tokens) for seq in run_step(scheduler)]
            for _ in range(3)
        ]
    assert kinds[Scheduler] == [[(0, 1), (1, 7)], [(0, 1), (1, 1)], [(0, 1), (1, 1)]]
    assert kinds[PrefillFirstScheduler] == [[(1, 8)], [(0, 1), (1, 1)], [(0, 1)]]


def test_max_num_seqs_bounds_residents():
    scheduler = make_scheduler(num_blocks=100, max_num_seqs=2, max_num_batched_tokens=1)
    for i in range(4):
        scheduler.add(make_sequence(i, 5, 3))
    for _ in range(12):
        run_step(scheduler)
        assert sum(bool(seq.block_table) for seq in [*scheduler.running, *scheduler.waiting]) <= 2


def test_the_newest_is_preempted_and_keeps_its_tokens():
    scheduler = make_scheduler(num_blocks=4)
    old, new = make_sequence(0, 4, 9), make_sequence(1, 4, 9)
    scheduler.add(old)
    scheduler.add(new)
    while not scheduler.num_preemptions:
        run_step(scheduler)
    assert list(scheduler.waiting) == [new] and scheduler.running == [old]
    assert (
        new.block_table == []
        and new.num_computed_tokens == 0
        and len(new.token_ids) > new.num_prompt_tokens
    )
    while scheduler.running or scheduler.waiting:
        run_step(scheduler)
    assert len(new.token_ids) == 13


def test_hits_of_a_preempted_sequence_are_not_counted_again():
    scheduler = make_scheduler()
    scheduler.add(seq := make_sequence(0, 9, 3))
    run_step(scheduler)
    scheduler.preempt(seq)
    run_step(scheduler)
    assert seq.num_computed_tokens == 10 and scheduler.num_prefill_tokens == 9 + 2
    assert seq.num_cached_tokens == 0 == scheduler.num_cached_tokens


def test_stats_add_up():
    scheduler = make_scheduler(num_blocks=100)
    scheduler.add(make_sequence(0, 9, 4, first_token=0))
    scheduler.add(make_sequence(1, 9, 4, first_token=0))
    while scheduler.running or scheduler.waiting:
        run_step(scheduler)
    assert (
        scheduler.num_prefill_tokens,
        scheduler.num_cached_tokens,
        scheduler.num_decode_tokens,
    ) == (10, 8, 6)
