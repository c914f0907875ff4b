"""Qwen3.5 gives the tokens of transformers, whatever the chunks, preemptions and snapshots."""

import pytest
from conftest import (
    Oracle,
    check_invariants,
    cover_pairs,
    generate_ids,
    greedy,
    make_checkpoint,
    random_prompt,
)
from transformers import Qwen3_5TextConfig

from nanovllm import LLM
from nanovllm.batch import FIRST_LANE, ZEROS

SETTINGS = dict(
    family=Qwen3_5TextConfig,
    num_hidden_layers=4,
    layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_conv_kernel_dim=4,
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],  # has no effect on text
        "mrope_interleaved": True,
    },
)
POOL = {"num_kvcache_blocks": 200, "kvcache_block_size": 4}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """The path of a checkpoint, and its oracle."""
    directory = tmp_path_factory.mktemp("qwen3_5")
    return str(directory), Oracle(make_checkpoint(directory, **SETTINGS))


def make_llm(path, **options) -> LLM:
    """Make an engine that checks the slots of each step."""
    llm = LLM(path, **{**POOL, **options})
    forward = llm.model_runner.forward

    def check_and_forward(seqs):
        check_slots(llm, seqs)
        return forward(seqs)

    llm.model_runner.forward = check_and_forward
    return llm


def check_slots(llm, seqs):
    """Check what a step reads and writes, before it runs."""
    scheduler = llm.scheduler
    num_lanes = scheduler.max_num_seqs
    kept = set(scheduler.snapshots.values())
    new = set(scheduler.new_snapshots.values())
    written = [seq.write_slot for seq in seqs]
    assert len(set(written)) == len(written)
    for seq in seqs:
        own = {FIRST_LANE + seq.lane}
        if llm.config.num_speculative_tokens:
            own.add(FIRST_LANE + num_lanes + seq.lane)
        assert seq.write_slot in own | new
        assert (seq.read_slot == ZEROS) == (seq.num_computed_tokens == 0)
        assert seq.read_slot in own | {ZEROS, *scheduler.snapshot_slots}
        others = [other.read_slot for other in seqs if other is not seq]
        assert seq.write_slot not in others
    assert kept.isdisjoint(written)
    assert new <= set(written)


def check_engine(llm):
    """Check an engine between two steps."""
    check_invariants(llm)
    scheduler = llm.scheduler
    assert not scheduler.new_snapshots
    slots = list(scheduler.snapshots.values())
    assert len(set(slots)) == len(slots)
    assert set(slots) <= set(scheduler.snapshot_slots)
    worker = llm.executor.worker
    num_slots = {len(cache) for cache in worker.kv_caches if cache.dim() == 2}
    last = worker.list_snapshot_slots().stop
    assert num_slots == {last}
    for cache in worker.kv_caches:
        assert cache.dim() > 2 or not cache[ZEROS].any()


# A chunk of 1, 2 or 3 tokens is shorter than the window of the convolution.
@pytest.mark.parametrize(
    "budget, num_blocks, is_chunked, is_caching, with_kernels, size",
    cover_pairs(
        [2, 3, 5, 24, 200],
        [33, 200],
        [True, False],
        [True, False],
        [True, False],
        [1, 2],
        allowed=lambda budget, _, is_chunked, *__: is_chunked or budget == 200,
    ),
)
def test_grid(hybrid, budget, num_blocks, is_chunked, is_caching, with_kernels, size):
    path, oracle = hybrid
    prompts = [random_prompt(length, length) for length in (1, 2, 3, 4, 5, 33, 100)]
    prompts += [prompts[-1][:50] + random_prompt(seed, 7 + seed) for seed in range(3)]
    prompts.append(prompts[-1])
    params = [greedy(6 + index) for index in range(len(prompts))]
    expected = [oracle(prompt, each.max_tokens) for prompt, each in zip(prompts, params)]
    with make_llm(
        path,
        max_num_batched_tokens=budget,
        num_kvcache_blocks=num_blocks,
        enable_chunked_prefill=is_chunked,
        enable_prefix_caching=is_caching,
        enable_kernels=with_kernels,
        tensor_parallel_size=size,
    ) as llm:
        for _ in range(2):
            assert generate_ids(llm, prompts, params) == expected
            check_engine(llm)
        assert num_blocks == 200 or budget < 24 or llm.stats["num_preemptions"] > 0
        assert is_caching or llm.stats["num_cached_tokens"] == 0
        assert not is_caching or num_blocks < 200 or llm.stats["num_cached_tokens"] > 0
