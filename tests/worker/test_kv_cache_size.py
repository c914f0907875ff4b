"""The KV cache gets the memory that is left, and the profile run finds out how much that is."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import VOCAB_SIZE

from nanovllm.config import MAX_DRAFT_STEP, Config
from nanovllm.layers import attention
from nanovllm.layers.tensor_parallel import TensorParallel
from nanovllm.utils.helpers import cdiv
from nanovllm.worker import cache_plan, memory
from nanovllm.worker import worker as worker_module
from nanovllm.worker.cache_plan import CachePlanner, find_budget
from nanovllm.worker.memory import find_available_memory, show_bytes
from nanovllm.worker.startup import profile, warm_up

BLOCK_BYTES = 4 * 2 * 2 * 2 * 16 * 4  # block size, K and V, layers, KV heads, head_dim, float32


def test_given_bytes_are_divided_into_blocks(make_llm):
    """A given number of blocks has precedence over a number of bytes."""
    budget = 10 * BLOCK_BYTES + 1
    for num_kvcache_blocks, expected in ((None, 10), (7, 7)):
        llm = make_llm(num_kvcache_blocks=num_kvcache_blocks, kvcache_memory_bytes=budget)
        assert llm.stats["num_blocks"] == expected
        assert llm.executor.worker.plan.num_lanes == expected


def test_a_backend_determines_the_bytes_of_a_block(make_llm, monkeypatch):
    """In a cache of 16 bits, twice as many blocks have room as in one of 32 bits."""

    def make_cache(*args):
        *shape, _, device = args
        return attention.make_cache(*shape, torch.bfloat16, device)

    backend = SimpleNamespace(**{**vars(attention), "make_cache": make_cache})
    monkeypatch.setattr(worker_module, "attention", backend)
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
        ("9:cpu,memory:/a\n0::/a/b", {"a/b/memory.max": 1000, "a/memory.max": "max"}, 500),
        ("0::/a/b", {"a/b/memory.max": 1000, "a/memory.max": 900}, 400),
        ("0::/docker/unseen", {"memory.max": 400}, 0),
        ("9:memory:/a", {"a/memory.max": 1000}, None),
    ],
)
def test_memory_is_limited_by_cgroups(tmp_path, monkeypatch, membership, limits, left):
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
    monkeypatch.setattr(memory, "Path", lambda path: tmp_path / path.removeprefix("/"))
    available = find_available_memory()
    if left is None:
        assert available > 2**20
    else:
        assert available == left
    monkeypatch.setattr(memory, "Path", lambda path: tmp_path / "not-linux")
    assert find_available_memory() > 2**20


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
    planner = CachePlanner(
        config=config,
        block_bytes=10_000,
        block_size=10,
        blocks_per_lane=cdiv(max_model_len, 10),
    )
    plan = planner.plan(*find_budget(config, FakeGPU(free)))
    assert f"{plan.num_blocks} blocks of 10 = {plan.num_tokens} tokens" in plan.description
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


def test_ranks_share_the_memory_of_a_cpu(monkeypatch):
    monkeypatch.setattr(cache_plan, "find_available_memory", lambda: 8_000)
    budgets = [find_budget(Config("", tensor_parallel_size=size), None) for size in (1, 2)]
    assert [num_bytes for num_bytes, _ in budgets] == [2_000, 1_000]


def test_the_memory_of_a_gpu_and_given_bytes_are_those_of_one_rank():
    two_ranks = Config("", tensor_parallel_size=2)
    assert find_budget(two_ranks, FakeGPU(100_000_000))[0] == 80_000_000
    given = Config("", tensor_parallel_size=2, kvcache_memory_bytes=1_000)
    assert find_budget(given, None)[0] == 1_000


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


@pytest.mark.parametrize("max_num_seqs", [1, 4, 40])
def test_few_sequences_can_warm_up(make_llm, max_num_seqs):
    """Their tokens are kept for the next step, as those of other steps."""
    runner = make_llm(max_num_seqs=max_num_seqs).model_runner
    seen = []

    def sample(logits):
        seen.append(len(logits))
        runner.sample_each_kind(logits)

    warm_up(runner.executor.worker, sample)
    assert seen == [min(33, max_num_seqs), 1]


def test_the_profile_run_ends_with_the_costliest_sampling(make_llm):
    llm = make_llm()
    runner = llm.model_runner
    runner.sample = Mock(wraps=runner.sample)
    runner.sample_each_kind(torch.zeros(7, VOCAB_SIZE))
    _, step = runner.sample.call_args.args
    assert max(len(seq.token_ids) for seq in step.seqs) == llm.max_model_len
    for seq in step.seqs:
        assert seq.params.penalizes
        assert seq.params.has_filters
        assert seq.params.logprobs
        assert len(seq.token_ids) < seq.min_num_tokens
        assert seq.stop_token_ids


def plan_with_states(num_bytes, state_bytes, **options):
    """Plan a cache in which a block of 10 tokens takes 1000 bytes."""
    sizes = dict(block_bytes=1000, state_bytes=state_bytes, block_size=10, blocks_per_lane=100)
    return CachePlanner(config=Config("", **options), **sizes).plan(num_bytes, "tests")


@pytest.mark.parametrize("num_drafts, num_lanes", [(0, 24), (3, 16)])
def test_states_have_at_most_half_of_the_memory(num_drafts, num_lanes):
    """A lane has a state and a snapshot, and another state with drafts. 2 slots have no lane."""
    plan = plan_with_states(100_000, 1000, num_speculative_tokens=num_drafts)
    assert (plan.num_blocks, plan.num_lanes) == (50, num_lanes)
    assert plan.description == (
        "KV cache: of 100000 B (tests), 50000 B for 50 blocks of 10 = 500 tokens, 50000 B for"
        f" states and windows; at most {num_lanes} sequences and 8192 tokens in a step"
    )


@pytest.mark.parametrize(
    "options, num_lanes",
    [({}, 19), ({"max_num_seqs": 7}, 7)],
)
def test_a_given_number_of_blocks_does_not_unbound_the_states(options, num_lanes):
    """There are 80 MB for blocks and states. A state takes 1 MB."""
    plan = plan_with_states(80_000_000, 1_000_000, num_kvcache_blocks=50, **options)
    assert (plan.num_blocks, plan.num_lanes) == (50, num_lanes)
    shown = f"{show_bytes((2 + 2 * num_lanes) * 10**6)} for states and windows"
    assert f"{shown}; at most {num_lanes} sequences" in plan.description


@pytest.mark.parametrize("state_bytes", [2000, 6000])
def test_no_memory_for_one_state_is_an_error(state_bytes):
    problem = f"which may use half, take {4 * state_bytes} B"
    with pytest.raises(ValueError, match=problem):
        plan_with_states(10_000, state_bytes)


def test_ranks_agree_on_the_smallest_budget(make_llm, monkeypatch):
    """And on one size of blocks."""
    monkeypatch.setattr(TensorParallel, "minimum", lambda tp, numbers: [numbers[0] // 2, 4])
    options = dict(num_kvcache_blocks=None, kvcache_memory_bytes=10 * BLOCK_BYTES)
    assert make_llm(**options).stats["num_blocks"] == 5
    with pytest.raises(ValueError, match="blocks of 4 and 8 tokens: set kvcache_block_size"):
        make_llm(**options, kvcache_block_size=8)


@pytest.mark.parametrize("num_bytes", [10**6, -100])
def test_lanes_are_no_more_than_given_blocks(num_bytes):
    """A lane that cannot run needs no state, and without states no lane needs memory."""
    for state_bytes in (0, 10) if num_bytes > 0 else (0,):
        planner = CachePlanner(
            config=Config("", num_kvcache_blocks=4, max_num_seqs=8),
            block_bytes=10,
            state_bytes=state_bytes,
            block_size=4,
            blocks_per_lane=8,
        )
        assert planner.count_lanes(num_bytes, num_step_tokens=16) == 4


def plan_with_windows(num_bytes, block_bytes=1000, **options):
    """Plan a second pool of blocks that take 1000 bytes, for windows of 30 tokens."""
    planner = CachePlanner(
        config=Config("", **options),
        block_bytes=block_bytes,
        window_block_bytes=1000,
        block_size=10,
        blocks_per_lane=100,
        window=30,
    )
    return planner.plan(num_bytes, "tests")


def test_windows_have_half_of_the_memory_and_a_step_an_eighth():
    """A lane has 5 blocks: three of its window, and incomplete ones at both ends."""
    plan = plan_with_windows(100_000)
    assert plan.max_num_batched_tokens == 120
    assert (plan.num_blocks, plan.num_lanes) == (53, 7)
    assert plan.num_window_blocks == 7 * 5 + 12
    assert "53000 B for 53 blocks" in plan.description
    assert "47000 B for states and windows; at most 7 sequences and 120 tok" in plan.description


def test_a_step_has_all_its_tokens_if_only_given_blocks_limit_the_lanes():
    plan = plan_with_windows(1_000_000, block_bytes=0, num_kvcache_blocks=30, max_num_seqs=40)
    assert (plan.num_lanes, plan.max_num_batched_tokens) == (30, 8192)


def test_blocks_of_both_pools_have_their_own_bytes():
    plan = plan_with_windows(100_000, block_bytes=500)
    assert (plan.num_blocks, plan.num_lanes) == (106, 7)
    assert "47000 B for states and windows" in plan.description


def test_windows_of_few_short_sequences_need_no_more_than_the_sequences():
    plan = plan_with_windows(10_000_000, max_num_seqs=2)
    assert plan.num_window_blocks == 2 * 100
    assert plan.max_num_batched_tokens == 8192


def test_windows_have_all_of_the_memory_if_all_layers_have_one():
    plan = plan_with_windows(100_000, block_bytes=0)
    assert (plan.num_lanes, plan.num_window_blocks) == (17, 17 * 5 + 12)
    assert plan.num_blocks == 17 * 100
    assert "1700 blocks of 10 = 17000 tokens, 97000 B for states and windows" in plan.description


def test_too_little_memory_for_a_window_is_an_error():
    with pytest.raises(ValueError, match="which may use half, take 6000 B"):
        plan_with_windows(10_000)
