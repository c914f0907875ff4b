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
    tables = np.zeros((3, 4), np.int32)
    tables[1, :2] = [2, 6]  # copied when an earlier step entered the block
    runner = SimpleNamespace(block_tables=tables, block_size=4)
    step = Step()
    plans = [(0, 3, [5]), (7, 1, [2, 6]), (4, 2, [1, 9])]
    for lane, (num_computed, num_tokens, block_table) in enumerate(plans):
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
        read_slots=[2, 3, 4],
        write_slots=[2, 3, 4],
    )
    for name, value in vars(batch).items():
        assert np.asarray(value).tolist() == expected[name], name


def test_a_token_and_its_draft_can_enter_a_block():
    """The block table of a decode is copied when it grows."""
    runner = SimpleNamespace(block_tables=np.zeros((1, 4), np.int32), block_size=4)
    seq = Sequence(0, list(range(5)), SamplingParams())
    seq.lane = 0
    seq.block_table = [3, 7]
    seq.num_computed_tokens = 3
    step = Step()
    step.add(seq, 2, num_logits=2)
    assert ModelRunner.prepare_batch(runner, step, step.num_logits).slot_mapping.tolist() == [
        15,
        28,
    ]
