"""The KV cache gets the memory that is left, and the profile run finds out how much that is."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import VOCAB_SIZE

from nanovllm.config import MAX_DRAFT_STEP, Config
from nanovllm.engine.warm_up import sample_each_kind
from nanovllm.layers import attention
from nanovllm.layers.tensor_parallel import ALONE
from nanovllm.worker import cache_plan, startup
from nanovllm.worker.cache_plan import CacheUnits, plan_cache
from nanovllm.worker.memory import find_available_memory, show_bytes
from nanovllm.worker.startup import profile

BLOCK_BYTES = 4 * 2 * 2 * 2 * 16 * 4  # block size, K and V, layers, KV heads, head_dim, float32


def test_given_bytes_are_divided_into_blocks(make_llm):
    """A given number of blocks has precedence over a number of bytes."""
    budget = 10 * BLOCK_BYTES + 1
    for num_kvcache_blocks, expected in ((None, 10), (7, 7)):
        llm = make_llm(num_kvcache_blocks=num_kvcache_blocks, kvcache_memory_bytes=budget)
        assert llm.stats["num_blocks"] == expected


def test_a_backend_determines_the_bytes_of_a_block(make_llm, monkeypatch):
    """In a cache of 16 bits, twice as many blocks have room as in one of 32 bits."""

    def make_cache(*args):
        *shape, _, device = args
        return attention.make_cache(*shape, torch.bfloat16, device)

    backend = SimpleNamespace(**{**vars(attention), "make_cache": make_cache})
    monkeypatch.setattr(startup, "attention", backend)
    budget = 10 * BLOCK_BYTES
    llm = make_llm(
        num_kvcache_blocks=None, kvcache_memory_bytes=budget, device="cpu", enable_kernels=False
    )
    assert llm.stats["num_blocks"] == 20
    assert sum(cache.nbytes for cache in llm.executor.worker.kv_caches) == budget


@pytest.mark.parametrize(
    "membership, limits, left",
    [
        ("0::/", {}, None),
        ("9:cpu,memory:/a\n0::/a/b", {"a/b/memory.max": 1000, "a/b/memory.high": "max"}, 500),
        ("0::/a/b", {"a/b/memory.max": 1000, "a/memory.high": 900}, 400),
        ("0::/docker/unseen", {"memory.max": 400}, 0),
        ("9:memory:/a", {"a/memory.max": 1000}, None),
    ],
)
def test_memory_is_limited_by_cgroups(tmp_path, membership, limits, left):
    """Each cgroup uses 700 bytes, of which 200 can be reclaimed."""
    files = {"proc/self/cgroup": membership}
    for path, limit in limits.items():
        group = f"sys/fs/cgroup/{path}".rpartition("/")[0]
        files[f"sys/fs/cgroup/{path}"] = limit
        files[f"{group}/memory.current"] = 700
        files[f"{group}/memory.stat"] = "anon 500\ninactive_file 200"
    for path, content in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{content}\n")
    available = find_available_memory(tmp_path)
    if left is None:
        assert available > 2**20
    else:
        assert available == left
    assert find_available_memory(tmp_path / "not-linux") > 2**20


class FakeGPU:
    """A MemoryMeter of a GPU with 100 MB, of which the profile run takes 10 MB."""

    total = 100_000_000

    def __init__(self, free_before):
        self.free_before = free_before

    def peak(self):
        return 10_000_000


def count_tokens_on_gpu(free, utilization, max_model_len):
    """Count the tokens that fit into a KV cache where a token takes 1000 bytes."""
    config = Config("", gpu_memory_utilization=utilization)
    plan = plan_cache(
        config,
        FakeGPU(free),
        CacheUnits(block_bytes=10_000, block_size=10, max_model_len=max_model_len),
    )
    assert f"{plan.num_blocks} blocks of 10" in plan.describe()
    assert plan.num_tokens == plan.num_blocks * 10
    return plan.num_tokens


@pytest.mark.parametrize(
    "free, utilization, max_model_len, num_tokens",
    [
        (100_000_000, 0.9, 1000, 80_000),
        (100_000_000, 0.5, 1000, 40_000),
        (40_000_000, 0.9, 1000, 28_000),
        (100_000_000, 0.9, 91, 25_600),
    ],
)
def test_a_gpu_gives_what_the_largest_step_leaves(free, utilization, max_model_len, num_tokens):
    """The limit is a share of the GPU, 95% of what was free, or what 256 sequences can use."""
    assert count_tokens_on_gpu(free, utilization, max_model_len) == num_tokens


def test_too_little_memory_is_an_error():
    with pytest.raises(ValueError, match="gpu_memory_utilization"):
        count_tokens_on_gpu(10_000_000, 0.9, 1000)


@pytest.mark.parametrize("draft_len, num_logits", [(0, 7), (2, MAX_DRAFT_STEP)])
def test_the_profile_run_is_a_largest_step(make_llm, draft_len, num_logits):
    """A step with drafts has a row of logits for each draft token."""
    llm = make_llm(max_num_batched_tokens=301, max_num_seqs=7, num_speculative_tokens=draft_len)
    worker = llm.executor.worker
    worker.compute = Mock(wraps=worker.compute)
    profile(worker)
    (batch,) = worker.compute.call_args.args
    assert len(batch.input_ids) == 301
    assert len(batch.logits_indices) == num_logits
    if draft_len == 0:
        assert batch.max_seqlen_q == llm.max_model_len


def test_the_profile_run_ends_with_the_costliest_sampling(make_llm):
    llm = make_llm()
    sample = Mock(wraps=llm.model_runner.sample_and_read)
    sample_each_kind(sample, llm.executor.worker, torch.zeros(7, VOCAB_SIZE))
    _, step = sample.call_args.args
    assert max(len(seq.token_ids) for seq in step.seqs) == llm.max_model_len
    for seq in step.seqs:
        assert seq.params.penalizes
        assert seq.params.has_filters
        assert seq.params.logprobs
        assert len(seq.token_ids) < seq.min_num_tokens
        assert seq.stop_token_ids


def plan_with_states(meter, state_bytes, tp=ALONE, **options):
    """Plan a cache in which a block of 10 tokens takes 1000 bytes."""
    config = Config("", **options)
    sizes = dict(block_bytes=1000, state_bytes=state_bytes, block_size=10, max_model_len=1000)
    return plan_cache(config, meter, CacheUnits(**sizes), tp)


@pytest.mark.parametrize("num_drafts, num_lanes", [(0, 24), (3, 16)])
def test_states_have_at_most_half_of_the_memory(num_drafts, num_lanes):
    """A lane has a state and a snapshot, and another state with drafts. 2 slots have no lane."""
    options = dict(kvcache_memory_bytes=100_000, num_speculative_tokens=num_drafts)
    plan = plan_with_states(FakeGPU(0), 1000, **options)
    assert (plan.num_blocks, plan.num_lanes) == (50, num_lanes)
    line = plan.describe()
    assert f"50000 B for states of {num_lanes} lanes = 50000 B) / 1000 B" in line
    assert f"max_num_seqs is lowered from 256 to {num_lanes}" in line


@pytest.mark.parametrize(
    "options, num_lanes",
    [({}, 19), ({"max_num_seqs": 7}, 7), ({"kvcache_memory_bytes": 12_000_000}, 2)],
)
def test_a_given_number_of_blocks_does_not_unbound_the_states(options, num_lanes):
    """The GPU has 80 MB for blocks and states. A state takes 1 MB."""
    meter = FakeGPU(100_000_000)
    plan = plan_with_states(meter, 1_000_000, num_kvcache_blocks=50, **options)
    assert (plan.num_blocks, plan.num_lanes) == (50, num_lanes)
    shown = f"{show_bytes((2 + 2 * num_lanes) * 10**6)} for states of {num_lanes} lanes"
    assert f"(as requested, beside {shown} = 50000 B)" in plan.describe()


def test_states_of_lanes_without_a_block_are_not_allocated():
    plan = plan_with_states(FakeGPU(100_000_000), 1_000_000, num_kvcache_blocks=3)
    assert (plan.num_blocks, plan.num_lanes) == (3, 3)
    assert "8000000 B for states of 3 lanes" in plan.describe()


def test_a_laptop_serves_16_sequences_with_states(monkeypatch):
    """With 12 of 16 GB free, and the states and K/V of Qwen3.5-0.8B."""
    monkeypatch.setattr(cache_plan, "find_available_memory", lambda: 12_000_000_000)
    sizes = dict(block_bytes=16 * 12_288, state_bytes=20_201_472, block_size=16, max_model_len=4096)
    plan = plan_cache(Config(""), None, CacheUnits(**sizes))
    assert plan.num_lanes >= 16
    assert plan.num_tokens >= 16 * 4096
    line = plan.describe()
    assert "(0.25 * 12.00 GB available / 1 ranks - 1.49 GB for states of 36 lanes" in line


@pytest.mark.parametrize("state_bytes", [2000, 6000])
def test_no_memory_for_one_state_is_an_error(state_bytes):
    problem = f"states of one sequence take {4 * state_bytes} B, more than half"
    with pytest.raises(ValueError, match=problem):
        plan_with_states(FakeGPU(0), state_bytes, kvcache_memory_bytes=10_000)


def test_ranks_agree_on_the_smallest_numbers():
    tp = Mock(size=2, minimum=lambda numbers: [numbers[0] - 1, numbers[1] - 2, *numbers[2:]])
    plan = plan_with_states(FakeGPU(0), 1000, tp, kvcache_memory_bytes=100_000)
    assert (plan.num_blocks, plan.num_lanes) == (49, 22)


def plan_with_windows(tp=ALONE, block_bytes=1000, **options):
    """Plan a second pool of blocks that take 1000 bytes, for windows of 30 tokens."""
    units = CacheUnits(
        block_bytes=block_bytes,
        window_block_bytes=1000,
        block_size=10,
        max_model_len=1000,
        window=30,
    )
    return plan_cache(Config("", **options), FakeGPU(0), units, tp)


def test_windows_have_half_of_the_memory_and_a_step_an_eighth():
    """A lane has 5 blocks: three of its window, and incomplete ones at both ends."""
    plan = plan_with_windows(kvcache_memory_bytes=100_000)
    assert plan.max_num_batched_tokens == 120
    assert (plan.num_blocks, plan.num_lanes) == (53, 7)
    assert plan.num_window_blocks == 7 * 5 + 12
    line = plan.describe()
    assert "as requested - 47000 B for windows of 7 lanes = 53000 B) / 1000 B = 53 blocks" in line
    assert "and 47 blocks for windows of 30; max_num_seqs is lowered from 256 to 7;" in line
    assert "max_num_batched_tokens is lowered from 8192 to 120" in line


def test_windows_of_few_short_sequences_need_no_more_than_the_sequences():
    plan = plan_with_windows(kvcache_memory_bytes=10_000_000, max_num_seqs=2)
    assert plan.num_window_blocks == 2 * 100
    assert plan.max_num_batched_tokens == 8192


def test_windows_have_all_of_the_memory_if_all_layers_have_one():
    plan = plan_with_windows(block_bytes=0, kvcache_memory_bytes=100_000)
    assert (plan.num_lanes, plan.num_window_blocks) == (17, 17 * 5 + 12)
    assert plan.num_blocks == 17 * 100
    assert "97000 B for windows of all layers = 1700 blocks" in plan.describe()


def test_too_little_memory_for_a_window_is_an_error():
    with pytest.raises(ValueError, match="the windows of one sequence take 6000 B"):
        plan_with_windows(kvcache_memory_bytes=10_000)


def test_ranks_agree_on_the_size_of_the_second_pool():
    tp = Mock(size=2, minimum=lambda numbers: [40, 3, 70, *numbers[3:]])
    plan = plan_with_windows(tp, kvcache_memory_bytes=100_000)
    assert plan.max_num_batched_tokens == 70
    assert plan.num_window_blocks == 3 * 5 + 7


def test_gemma_4b_serves_several_sequences_on_a_laptop(monkeypatch):
    """With 4 GB free beside the weights. A token takes 118,784 bytes in layers with a window."""
    monkeypatch.setattr(cache_plan, "find_available_memory", lambda: 4_000_000_000)
    units = CacheUnits(
        block_bytes=16 * 20_480,
        window_block_bytes=16 * 118_784,
        block_size=16,
        max_model_len=4096,
        window=1024,
    )
    plan = plan_cache(Config(""), None, units)
    assert plan.num_lanes >= 3
    assert plan.max_num_batched_tokens >= 1024
    assert plan.num_tokens >= 3 * 4096
