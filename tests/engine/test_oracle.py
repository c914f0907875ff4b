"""Greedy float32 tokens match transformers, whatever the blocks, budgets, caches and policies."""

from types import SimpleNamespace

import numpy as np
import pytest
from conftest import (
    DRAWN_BATCH,
    check_invariants,
    cover_pairs,
    generate_ids,
    greedy,
    list_ways,
    random_prompt,
)

from nanovllm import SamplingParams
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import POLICIES
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step
from nanovllm.utils.helpers import cdiv


@pytest.mark.parametrize(
    "way, block_size, policy, is_caching",
    cover_pairs(list_ways(), [4, 16], [*POLICIES], [True, False]),
    ids=str,
)
def test_grid(tiny, make_llm, way, block_size, policy, is_caching):
    """Small token budgets make chunks, and small pools make preemptions."""
    _, oracle = tiny
    lengths = [1, block_size - 1, block_size, block_size + 1, 2 * block_size, 2 * block_size + 1]
    prompts = [random_prompt(length, length) for length in lengths]
    longest = prompts[-1]
    other = random_prompt(0, block_size)
    prompts += [longest, longest[: block_size + 1] + other]
    prompts.append(other + longest[block_size:])  # the same second block behind another first one
    params = [greedy(5 + index) for index in range(len(prompts))]
    expected = [oracle(prompt, each.max_tokens) for prompt, each in zip(prompts, params)]
    max_model_len = len(longest) + params[-1].max_tokens
    num_tight = cdiv(max_model_len, block_size) + 1  # for hardly more than one sequence
    small = 3 if POLICIES[policy].splits_prompts else 3 * block_size
    for budget, num_blocks in [(small, 64), (small + block_size, num_tight), (8192, num_tight)]:
        llm = make_llm(
            kvcache_block_size=block_size,
            num_kvcache_blocks=num_blocks,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            policy=policy,
            enable_prefix_caching=is_caching,
            **way,
        )
        for _ in range(2):  # with a cold cache, then with a warm one
            assert generate_ids(llm, prompts, params) == expected, (budget, num_blocks)
            check_invariants(llm)
        assert num_blocks == 64 or llm.stats["num_preemptions"]
        assert bool(llm.stats["num_cached_tokens"]) == is_caching


def test_a_batch_looks_as_drawn_in_batch_py():
    """A prompt of 3 tokens, a decode at position 7, and the last chunk of a prompt of 6 tokens."""
    tables = np.zeros((4, 4), np.int32)
    tables[0, :2] = [2, 6]  # copied when an earlier step entered the block
    runner = SimpleNamespace(block_tables=tables, block_size=4)
    step = Step()
    plans = [(0, 3, [5]), (7, 1, [2, 6]), (4, 2, [1, 9])]
    for lane, (num_computed, num_tokens, block_table) in zip((1, 0, 3), plans):
        seq = Sequence(lane, list(range(10, 20)), SamplingParams())
        seq.lane = lane
        seq.block_table = block_table
        seq.num_computed_tokens = num_computed
        step.add(seq, num_tokens, num_logits=1)
    batch = ModelRunner.prepare_batch(runner, step, step.num_logits)
    expected = dict(
        DRAWN_BATCH,
        input_ids=[10, 11, 12, 17, 14, 15],
        block_tables=[[5, 0], [2, 6], [1, 9]],
        read_slots=[3, 2, 5],  # those of the lanes
        write_slots=[3, 2, 5],
    )
    for name, value in vars(batch).items():
        assert np.asarray(value).tolist() == expected[name], name


def prepare_one(seq, num_tokens, num_rows, num_logits=1):
    """Prepare a step of one sequence, whose blocks 3 and 7 have four tokens each."""
    seq.lane = 0
    seq.block_table = [3, 7]
    step = Step()
    step.add(seq, num_tokens, num_logits)
    runner = SimpleNamespace(block_tables=np.zeros((1, 4), np.int32), block_size=4)
    return ModelRunner.prepare_batch(runner, step, [num_rows])


@pytest.mark.parametrize("num_prompt_tokens", [2, 5])
def test_a_token_and_its_draft_can_enter_a_block(num_prompt_tokens):
    """The block table of a decode is copied when it grows."""
    seq = Sequence(0, list(range(num_prompt_tokens)), SamplingParams())
    seq.token_ids = list(range(5))
    seq.num_computed_tokens = 3
    batch = prepare_one(seq, 2, num_rows=2, num_logits=2)
    assert batch.slot_mapping.tolist() == [15, 28]


def test_more_rows_can_be_wanted_than_are_sampled():
    """Log probabilities of a prompt need a row for each of its tokens."""
    seq = Sequence(0, list(range(5)), SamplingParams())
    assert prepare_one(seq, 3, num_rows=3).logits_indices.tolist() == [0, 1, 2]


def test_a_pending_token_is_passed_on():
    """The worker replaces ~row by the token of that row."""
    seq = Sequence(0, [5, 6], SamplingParams())
    seq.token_ids.append(~3)
    seq.num_computed_tokens = 2
    assert prepare_one(seq, 1, num_rows=1).input_ids.tolist() == [~3]
