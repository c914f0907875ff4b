"""Drafts change no token, whatever is proposed and however often it is accepted."""

import timeit
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    attach,
    check_invariants,
    find_feature,
    find_obstacle,
    finish_step,
    make_checkpoint,
    make_drafts_free,
    random_prompt,
)
from random_calls import Foresight
from random_engines import find_difference
from transformers import Qwen3Config, Qwen3MoeConfig

from nanovllm import SamplingParams, trace
from nanovllm.config import MAX_DRAFT_STEP
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step
from nanovllm.features.speculation.costs import StepCosts, measure_costs
from nanovllm.features.speculation.drafts import Drafts, Proposal
from nanovllm.features.speculation.proposers import PromptLookup
from nanovllm.layers import attention as torch_backend
from nanovllm.worker.cache_plan import CachePlan

FREE = StepCosts(per_token=0.0)  # drafts cost nothing


def draft_sevens():
    drafts = Drafts()
    drafts.max_draft_len = 7
    drafts.costs = FREE
    sevens = SimpleNamespace(propose=lambda num_tokens: [7] * num_tokens)
    drafts.proposer.make_lookup = lambda token_ids: sevens
    return drafts


def make_scheduler(drafts, num_blocks, max_num_seqs, budget):
    scheduler = Scheduler(BlockManager(num_blocks, 4), max_num_seqs, budget)
    attach(scheduler, drafts)
    return scheduler


# --- the scheduler


def run_step(scheduler, samples=None):
    """Run a step. Return its plan. Unless given, each sample is 1."""
    step = scheduler.schedule()
    plan = {seq.seq_id: num_tokens for seq, num_tokens, _ in step}
    finish_step(scheduler, step, samples or [[1] * num_logits for num_logits in step.num_logits])
    return plan


def test_drafts_take_what_a_step_leaves_unused():
    """A draft ends where the token budget or the free blocks end. Nothing is preempted for it."""
    drafts = draft_sevens()
    scheduler = make_scheduler(drafts, num_blocks=3, max_num_seqs=2, budget=6)
    scheduler.add(Sequence(0, [1, 2, 3], SamplingParams()))
    scheduler.add(Sequence(1, [1, 2], SamplingParams()))
    assert run_step(scheduler) == {0: 3, 1: 2}
    # The budget has 4 tokens left, 2 for each draft. Sequence 0 gets the last free block, and the
    # block of sequence 1 has room for one draft token.
    assert run_step(scheduler) == {0: 3, 1: 2}
    assert len(scheduler.block_manager.free_block_ids) == 1, "released with the rejected draft"
    assert drafts.num_draft_tokens == 3
    assert scheduler.num_preemptions == 0


def test_only_blocks_of_drafts_are_released():
    scheduler = make_scheduler(draft_sevens(), num_blocks=3, max_num_seqs=1, budget=5)
    seq = Sequence(0, list(range(12)), SamplingParams())
    scheduler.add(seq)
    assert run_step(scheduler) == {0: 5}
    assert len(seq.block_table) == 3


def test_nan_logits_end_a_sequence_after_its_valid_tokens():
    scheduler = make_scheduler(draft_sevens(), num_blocks=9, max_num_seqs=1, budget=16)
    seq = Sequence(0, [1, 2], SamplingParams())
    scheduler.add(seq)
    assert run_step(scheduler, [[7]]) == {0: 2}
    assert run_step(scheduler, [[7, 7] + [-1] * 6]) == {0: 8}
    assert (seq.token_ids, seq.finish_reason) == ([1, 2, 7, 7, 7], "error")
    assert not scheduler.block_manager.hash_to_block_id
    assert len(scheduler.block_manager.free_block_ids) == 9


# --- the engine


QWEN3 = dict(family=Qwen3Config)
MOE = dict(family=Qwen3MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
needs_cpp = pytest.mark.skipif(
    find_obstacle("cpp", torch.device("cpu"), torch.bfloat16) is not None,
    reason="needs a C++ compiler",
)


@pytest.mark.parametrize(
    "checkpoint, options",
    [
        (QWEN3, {"num_kvcache_blocks": 16, "max_num_batched_tokens": 24}),
        (QWEN3, {"enable_chunked_prefill": False, "kvcache_block_size": 5}),
        (QWEN3, {"tensor_parallel_size": 2}),
        pytest.param(MOE, {"dtype": "bfloat16", "quantization": "int4"}, marks=needs_cpp),
    ],
    ids=str,
)
def test_drafts_change_no_token(tmp_path, make_llm, checkpoint, options):
    """With kernels for a CPU this includes 16-bit dtypes. The trace counts all draft tokens."""
    make_checkpoint(tmp_path, **checkpoint)
    path = tmp_path / "trace.json"
    make = partial(make_llm, str(tmp_path), max_num_seqs=6, **options)
    prompts = [random_prompt(seed, 5 + seed) for seed in range(6)]
    settings = [
        {"temperature": 0.0},
        {"logprobs": 1},
        {"top_p": 0.9, "n": 2},
        {"stop_token_ids": list(range(30))},
        {"presence_penalty": 1.0},
        {"temperature": 0.3, "min_tokens": 20},
    ]
    params = [SamplingParams(max_tokens=30, seed=3, **each) for each in settings]
    with make(tensor_parallel_size=1) as llm:
        expected = llm.generate(prompts, params)
    with make(num_speculative_tokens=7, trace=path) as llm:
        answers = [output["prompt_token_ids"] + output["token_ids"] for output in expected]
        drafts = make_drafts_free(llm)
        drafts.proposer.make_lookup = lambda token_ids: Foresight(token_ids, answers)
        for _ in range(2):  # with a cold cache, then with a warm one
            for output, other in zip(llm.generate(prompts, params), expected, strict=True):
                assert find_difference(output, other) is None
            check_invariants(llm)
        stats = llm.stats
    assert 50 < stats["num_accepted_tokens"] < stats["num_draft_tokens"]
    steps = trace.read(path).steps
    works = [work for step in steps for work in step.work]
    num_draft = stats["num_draft_tokens"]
    num_accepted = stats["num_accepted_tokens"]
    assert sum(len(work.features.get("draft_token_ids", [])) for work in works) == num_draft
    assert sum(work.num_accepted_tokens for work in works) == num_accepted
    num_committed = stats["num_prefill_tokens"] + stats["num_decode_tokens"]
    num_computed = sum(step.num_tokens for step in steps)
    assert num_computed == num_committed + num_draft - num_accepted


# --- proposals


def test_prompt_lookup():
    token_ids = [1, 2, 3, 4, 1, 2, 3, 5, 2, 3]
    proposer = PromptLookup(token_ids)
    assert proposer.propose(3) == [5, 2, 3], "what followed the latest 2 3"
    token_ids += [9, 1, 2, 3]
    assert proposer.propose(3) == [5, 2, 3], "1 2 3 rather than 2 3, which 9 followed the last time"
    token_ids += [7, 7, 7]
    assert proposer.propose(4) == [7, 7, 7, 7], "an occurrence that overlaps the end"
    assert PromptLookup([1, 2, 9, 1, 2]).propose(1) == [9], "also at the start"


def test_token_0_is_accepted():
    seq = Sequence(0, [1, 0, 7], SamplingParams())
    assert draft_sevens()._verify(seq, [0, 7], [0, 0, 5]) == [0, 0]
    assert seq.token_ids == [1, 0]


def make_decode(acceptance_rate, max_tokens=8, **params):
    """A decode that PromptLookup continues with 2, 3, 1, 2."""
    seq = Sequence(0, [1, 2, 3] * 3, SamplingParams(max_tokens=max_tokens, **params))
    seq.token_ids.append(1)
    seq.num_computed_tokens = 9
    return seq, Proposal(acceptance_rate)


def choose(decodes, costs=FREE, budget=100):
    step = Step()
    for seq, _ in decodes:
        step.add(seq, num_tokens=1, num_logits=1)
    drafts = Drafts()
    drafts.max_draft_len = 4
    drafts.costs = costs
    drafts.proposals = dict(decodes)
    chosen = drafts.choose(step, len(step.seqs) + budget)
    return [chosen.get(seq, []) for seq in step.seqs]


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, [[2, 3, 1, 2], [2, 3, 1, 2]]),  # free, so all of them
        ({"costs": StepCosts(per_token=0.2)}, [[2, 3, 1, 2], []]),
        ({"costs": StepCosts(per_token=0.62)}, [[2, 3], []]),  # one draft token does not pay
        ({"costs": StepCosts(per_token=0.65)}, [[], []]),  # a gain of 4% is too little
        ({"costs": StepCosts(per_token=9.0)}, [[], []]),
        ({"budget": 3}, [[2, 3, 1], []]),
    ],
    ids=str,
)
def test_drafts_that_pay(options, expected):
    """The most probable draft tokens are computed while they raise tokens per second."""
    decodes = [make_decode(0.9), make_decode(0.1)]
    assert choose(decodes, **options) == expected
    for _, proposal in decodes:
        assert proposal.token_ids == [2, 3, 1, 2], "also without a draft, to learn from it"


def test_a_step_with_drafts_has_a_limited_size():
    """Its logits are part of the profile run."""
    chosen = choose([make_decode(1.0) for _ in range(100)], budget=1000)
    assert len(chosen) + sum(map(len, chosen)) == MAX_DRAFT_STEP


@pytest.mark.parametrize(
    "params, expected",
    [
        ({"max_tokens": 3}, [2]),  # the step samples one token at the end of its draft
        ({"presence_penalty": 1.0}, []),
        ({"min_tokens": 3}, []),
    ],
    ids=str,
)
def test_some_requests_get_short_drafts_or_none(params, expected):
    assert choose([make_decode(0.9, **params)]) == [expected]


def test_acceptance_rates_are_learned():
    proposal = Proposal(0.5, token_ids=[1, 2, 3, 4], position=2)
    proposal.learn([9, 9, 1, 2])
    assert proposal.acceptance_rate == pytest.approx(1 - 0.5 * 0.9**2)
    proposal.learn([9, 9, 7, 2, 3, 4])
    assert proposal.acceptance_rate == pytest.approx(0.9 - 0.5 * 0.9**3), "judges one token"


@pytest.mark.parametrize(
    "max_num_batched_tokens, launch, per_token",
    [(1, 0.0, 0.0), (12, 0.0, 0.1), (100, 0.0, 0.1), (100, 20.0, 0.6)],
)
def test_costs_of_steps_are_measured(monkeypatch, max_num_batched_tokens, launch, per_token):
    """On a worker whose steps take 9 seconds, and one more for each token.

    With `launch`, a step of one token has a CUDA graph, and larger ones have none.
    """
    clock = [0.0]
    monkeypatch.setattr(timeit, "repeat", partial(timeit.repeat, timer=lambda: clock[0]))

    def execute(batch, hand_out):
        num_tokens = len(batch.input_ids)
        assert num_tokens <= max_num_batched_tokens
        assert batch.window_tables.shape == batch.block_tables.shape
        clock[0] += 9.0 + num_tokens + (launch if num_tokens > 1 else 0.0)
        return torch.zeros(len(batch.logits_indices), 1)

    worker = SimpleNamespace(
        plan=CachePlan(num_lanes=3, num_window_blocks=9),
        block_size=4,
        block_table_width=16,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=64,
        has_mtp_head=False,
    )
    executor = SimpleNamespace(worker=worker, execute=execute)
    assert measure_costs(executor, 4) == StepCosts(pytest.approx(per_token))


def test_the_backend_limits_drafts(make_llm, monkeypatch):
    monkeypatch.setattr(torch_backend, "MAX_DRAFT_LEN", 3)
    llm = make_llm(device="cpu", attention_backend="torch", num_speculative_tokens=100)
    assert find_feature(llm, Drafts).max_draft_len == 3


def test_prompt_lookup_learns_from_tokens_that_come_one_by_one():
    token_ids = [1, 2, 3, 4]
    lookup = PromptLookup(token_ids)
    proposed = []
    for token_id in (9, 3, 4, 9, 3):
        token_ids.append(token_id)
        proposed.append(lookup.propose(2))
    assert proposed == [[], [], [9, 3], [3, 4], [4, 9]]


def test_drafts_beside_a_prefill():
    scheduler = make_scheduler(draft_sevens(), num_blocks=20, max_num_seqs=2, budget=10)
    scheduler.add(Sequence(0, [1, 2, 3], SamplingParams()))
    run_step(scheduler)
    scheduler.add(Sequence(1, [1, 2], SamplingParams()))
    assert run_step(scheduler) == {0: 8, 1: 2}


def test_blocks_of_all_rejected_drafts_are_released():
    scheduler = make_scheduler(draft_sevens(), num_blocks=20, max_num_seqs=2, budget=32)
    for seq_id in range(2):
        scheduler.add(Sequence(seq_id, [1, 2, 3], SamplingParams()))
    run_step(scheduler)
    assert run_step(scheduler) == {0: 8, 1: 8}
    assert len(scheduler.block_manager.free_block_ids) == 18


def test_tokens_of_a_decode_with_nan_are_those_of_a_decode():
    scheduler = make_scheduler(draft_sevens(), num_blocks=20, max_num_seqs=2, budget=32)
    scheduler.add(Sequence(0, [1, 2, 3], SamplingParams()))
    run_step(scheduler)
    run_step(scheduler, [[7, 7, -1, *[1] * 5]])
    assert (scheduler.num_prefill_tokens, scheduler.num_decode_tokens) == (3, 3)


@pytest.mark.parametrize("gain, count", [(0.12, 0), (0.13, 1), (0.2, 1)])
def test_a_chunk_takes_time_and_samples_nothing(gain, count):
    """One token in 1.4 units of time. With 0.1 more, 1.05 / 1.4 * 1.5 = 1.125 tokens must come."""
    step = Step()
    step.add(make_decode(0.9)[0], num_tokens=1, num_logits=1)
    step.add(Sequence(1, [1] * 9, SamplingParams()), num_tokens=4, num_logits=0)
    assert StepCosts(per_token=0.1).choose_count(step, [(0.1, gain)]) == count


def test_drafts_can_evict_cached_blocks():
    """In a server, all free blocks are soon cached ones."""
    scheduler = make_scheduler(draft_sevens(), num_blocks=3, max_num_seqs=1, budget=16)
    scheduler.add(Sequence(0, list(range(8)), SamplingParams(max_tokens=1)))
    run_step(scheduler)
    scheduler.add(Sequence(1, [20, 21, 22], SamplingParams()))
    run_step(scheduler)
    assert scheduler.block_manager.count_states() == {"used": 1, "reusable": 2, "empty": 0}
    assert run_step(scheduler) == {1: 8}
