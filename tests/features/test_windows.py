"""Layers with a window keep the K/V that a later token can attend to, and release all others.

A simulated memory shows for each slot of both pools the tokens whose K/V it has. Tests with a model
fill the free blocks with NaN before each step, except those that a prefix hit may still read.
"""

from types import SimpleNamespace

import pytest
import torch
from conftest import (
    attach,
    check_invariants,
    check_windows,
    find_feature,
    finish_step,
    generate_ids,
    greedy,
    random_prompt,
)
from families import make_family
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import POLICIES
from nanovllm.engine.sequence import Sequence
from nanovllm.features.speculation.costs import StepCosts
from nanovllm.features.speculation.drafts import Drafts
from nanovllm.features.windows import Windows
from nanovllm.utils.helpers import cdiv
from nanovllm.worker.cache_plan import CachePlan, CachePlanner


class Simulation:
    """A scheduler with a second pool of the planned size, and tokens in place of K/V."""

    def __init__(
        self, window, block_size=4, num_lanes=2, budget=10, num_blocks=60, policy="mixed",
        draft_len=0, enable_prefix_caching=True, max_model_len=200,
    ):  # fmt: skip
        planner = CachePlanner(
            config=Config(""),
            block_bytes=1,
            window_block_bytes=1,
            block_size=block_size,
            blocks_per_lane=cdiv(max_model_len, block_size),
            window=window,
        )
        worker = SimpleNamespace(
            spec=SimpleNamespace(window=window),
            block_size=block_size,
            block_table_width=cdiv(max_model_len, block_size),
            plan=CachePlan(
                num_window_blocks=planner.count_window_blocks(num_lanes, budget),
                num_lanes=num_lanes,
            ),
            config=SimpleNamespace(enable_prefix_caching=enable_prefix_caching),
        )
        blocks = BlockManager(num_blocks, block_size, enable_prefix_caching)
        self.scheduler = POLICIES[policy](blocks, num_lanes, budget)
        self.drafts = Drafts()
        self.drafts.max_draft_len = draft_len
        self.drafts.costs = StepCosts(per_token=0.0)
        self.windows = Windows()
        executor = SimpleNamespace(worker=worker)
        assert self.windows.start(SimpleNamespace(executor=executor, scheduler=self.scheduler))
        features = [self.windows]
        if draft_len:
            features.insert(0, self.drafts)
        attach(self.scheduler, *features)
        self.first_pool = {}  # slot -> the tokens up to the one whose K/V it has
        self.second_pool = {}

    def serve(self, prompt, max_tokens=1):
        """Run a prompt alone, and return its sequence."""
        seq = Sequence(0, prompt, SamplingParams(max_tokens=max_tokens))
        self.scheduler.add(seq)
        while not seq.finish_reason:
            self.run_step()
        return seq

    def run_step(self):
        block_size = self.scheduler.block_size
        step = self.scheduler.schedule()
        scheduled = {}  # the positions of each sequence
        for seq, num_tokens, _ in step:
            end = seq.num_computed_tokens + num_tokens
            scheduled[seq] = range(seq.num_computed_tokens, end)
            for position in scheduled[seq]:
                index, offset = divmod(position, block_size)
                tokens = seq.token_ids[: position + 1]
                self.first_pool[seq.block_table[index], offset] = tokens
                self.second_pool[self.find_id(seq, index), offset] = tokens
        for seq, positions in scheduled.items():
            for position in range(positions.stop):
                index, offset = divmod(position, block_size)
                tokens = seq.token_ids[: position + 1]
                assert self.first_pool[seq.block_table[index], offset] == tokens
                if position > positions.start - self.windows.window:
                    assert self.second_pool[self.find_id(seq, index), offset] == tokens
        sampled = []
        for seq, _, num_logits in step:
            ends = range(len(seq.token_ids) - num_logits + 1, len(seq.token_ids) + 1)
            sampled.append([sum(seq.token_ids[:end][-2:]) % 3 for end in ends])
        info, described = self.windows.describe(step)
        assert sum(info["window_pool"].values()) == self.windows.pool.num_blocks
        for seq, facts in described.items():
            held = self.windows.held[seq]
            ids = [self.find_id(seq, index) for index in range(held.start, held.end)]
            assert facts == {"window_start": held.start, "window_blocks": ids}
        finish_step(self.scheduler, step, sampled)
        check_windows(self.windows)

    def find_id(self, seq, index):
        window = self.windows.held[seq]
        assert window.start <= index < window.end
        return self.windows.tables[seq.lane, index]

    def find_hit(self, prompt):
        """The number of tokens that a prompt would reuse now."""
        seq = Sequence(0, prompt, SamplingParams())
        found = self.scheduler.block_manager.find_prefix(seq)
        prefix = self.windows.limit_prefix(seq, found)
        self.windows.held.pop(seq)
        return len(prefix) * self.scheduler.block_size


LOADS = st.tuples(st.integers(0, 2), st.integers(1, 40), st.integers(1, 30))


@given(
    loads=st.lists(LOADS, min_size=1, max_size=8),
    window=st.integers(1, 23),
    block_size=st.integers(2, 5),
    num_lanes=st.integers(1, 4),
    budget=st.integers(1, 60),
    num_blocks=st.integers(35, 60),
    policy=st.sampled_from(list(POLICIES)),
    draft_len=st.sampled_from([0, 0, 3]),
    enable_prefix_caching=st.booleans(),
    aborted=st.sets(st.integers(0, 30), max_size=3),
)
@settings(max_examples=120, deadline=None, derandomize=True)
def test_every_token_that_a_query_attends_to_is_there(loads, aborted, **options):
    """And the pool never runs out, although it is as small as planned."""
    if options["policy"] == "prefill_first":
        options["budget"] = max(options["budget"], 45)  # the longest prompt must fit
    simulation = Simulation(max_model_len=70, **options)
    scheduler = simulation.scheduler
    seqs = []
    for seq_id, (first_token, prompt_len, max_tokens) in enumerate(loads):
        prompt = [first_token, *(i % 3 for i in range(prompt_len - 1)), seq_id]
        seqs.append(Sequence(seq_id, prompt, SamplingParams(max_tokens=max_tokens)))
    for step in range(1000):
        if step % 3 == 0 and step // 3 < len(seqs):
            scheduler.add(seqs[step // 3])
        if step in aborted and scheduler.running:
            scheduler.finish(scheduler.running[step % len(scheduler.running)], "abort")
        simulation.run_step()
        if all(seq.finish_reason for seq in seqs):
            break
    assert all(seq.finish_reason for seq in seqs)
    assert len(simulation.windows.pool.free_block_ids) == simulation.windows.pool.num_blocks
    assert not simulation.windows.held


# --- prefix hits


def test_a_hit_needs_the_last_window():
    """A prompt that ends within the window of another one can reuse what both have."""
    simulation = Simulation(window=6, enable_prefix_caching=True)
    prompt = list(range(30))
    simulation.serve(prompt)
    assert simulation.find_hit([*prompt, 50]) == 28
    pool = simulation.windows.pool
    for index in (6, 5):  # token 28 attends to the tokens from 23 on
        seq = Sequence(0, [*prompt, 50], SamplingParams())
        pool.uncache(pool.find_block(seq, index).block_id)
        assert simulation.find_hit([*prompt, 50]) == 4 * index


def test_equal_prompts_of_one_step_share_their_windows():
    simulation = Simulation(window=6, num_lanes=3, budget=100)
    prompt = list(range(21))
    seqs = [Sequence(i, [*prompt, 50 + i], SamplingParams(max_tokens=2)) for i in range(3)]
    for seq in seqs:
        simulation.scheduler.add(seq)
    simulation.run_step()
    assert [seq.num_cached_tokens for seq in seqs] == [0, 20, 20]


def test_a_preempted_sequence_starts_from_its_last_window():
    """Wherever it was preempted, and also if all that its window has left is evicted."""
    for num_steps in range(2, 10):
        simulation = Simulation(window=6)
        seq = Sequence(0, list(range(18)), SamplingParams(max_tokens=30))
        simulation.scheduler.add(seq)
        for _ in range(num_steps):
            simulation.run_step()
        pool = simulation.windows.pool
        for block_id in pool.passed:
            pool.uncache(block_id)
        simulation.scheduler.preempt(seq)
        simulation.scheduler.schedule()
        assert seq.num_computed_tokens == (len(seq.token_ids) - 1) // 4 * 4


def test_the_end_of_a_sequence_with_accepted_drafts_can_be_hit():
    """The last step can fill a block with draft tokens. Sums modulo 3 repeat after 8 tokens."""
    num_accepted = 0
    for max_tokens in range(1, 13):
        simulation = Simulation(window=6, draft_len=3)
        seq = simulation.serve([1, 1, 2, 0, 2, 2, 1, 0] * 2, max_tokens)
        assert simulation.find_hit([*seq.token_ids, 50]) == (16 + max_tokens - 1) // 4 * 4
        num_accepted += simulation.drafts.num_accepted_tokens
    assert num_accepted > 12


def test_a_sequence_with_nan_leaves_nothing_to_hit():
    """Not even blocks that its window has left. NaN is sampled as -1."""
    simulation = Simulation(window=6, budget=40)
    seq = Sequence(0, list(range(30)), SamplingParams())
    simulation.scheduler.add(seq)
    simulation.run_step()
    finish_step(simulation.scheduler, simulation.scheduler.schedule(), [[-1]])
    assert seq.finish_reason == "error"
    assert not simulation.windows.pool.hash_to_block_id


def test_the_end_of_a_shared_prompt_is_evicted_after_the_middle_of_a_long_text():
    simulation = Simulation(window=6, num_lanes=4, num_blocks=500)
    system_prompt = list(range(20))
    for question in (60, 61):  # the second one shows where the system prompt ends
        simulation.serve([*system_prompt, *[question] * 20])
        assert simulation.find_hit([*system_prompt, 70]) == 20
    simulation.serve(range(100, 190))  # more tokens than the second pool holds
    assert simulation.find_hit([*system_prompt, 70]) == 20
    assert simulation.find_hit([*range(100, 190), 70]) == 88
    assert simulation.find_hit([*range(100, 140), 70]) == 0


# --- models


@pytest.mark.parametrize(
    "options, larger",
    [
        ({"max_model_len": 20}, {"max_model_len": 21}),
        # Each lane would have windows of 20 tokens, and no sequence gets as long.
        ({"num_kvcache_blocks": 5}, {"num_kvcache_blocks": 6}),
    ],
    ids=str,
)
def test_a_window_that_covers_all_tokens_needs_no_second_pool(tmp_path, options, larger):
    oracle = make_family(tmp_path, "gemma3", sliding_window=20)
    prompt = random_prompt(1, 12)
    for each, has_windows in ((options, False), (larger, True)):
        with LLM(tmp_path, kvcache_block_size=4, **each) as llm:
            assert generate_ids(llm, [prompt], greedy(8)) == [oracle(prompt, 8)]
            assert (find_feature(llm, Windows) is not None) == has_windows
            assert (llm.stats["num_window_blocks"] > 0) == has_windows


@torch.inference_mode()
def fill_unused_blocks(llm):
    """Fill all blocks with NaN that no sequence holds and no prefix hit can read."""
    worker = llm.executor.worker
    pools = [llm.scheduler.block_manager, find_feature(llm, Windows).pool]
    for layer, kv_cache in enumerate(worker.kv_caches):
        pool = pools[worker.spec.attention_shape(layer).window is not None]
        unused = [i for i in pool.free_block_ids if not pool.blocks[i].is_cached]
        kv_cache[:, unused] = torch.nan


def generate_amid_nan(llm, prompts, params):
    for prompt, each in zip(prompts, params):
        llm.add_request(prompt, each)
    results = {}
    num_steps = 0
    while not llm.is_finished():
        fill_unused_blocks(llm)
        for output in llm.step():
            results[output["request_id"]] = output["token_ids"]
        check_invariants(llm)
        num_steps += 1
        assert num_steps < 500, "a request never ends"
    return [results[request_id] for request_id in sorted(results)]


@pytest.mark.parametrize(
    "window, options",
    [
        (1, dict(kvcache_block_size=2, max_num_batched_tokens=1, num_kvcache_blocks=16)),
        (1, dict(kvcache_block_size=256, num_kvcache_blocks=1, num_speculative_tokens=2)),
        (2, dict(kvcache_block_size=2, num_kvcache_blocks=16, policy="prefill_first")),
        (5, dict(kvcache_block_size=3, kvcache_memory_bytes=30_000, max_model_len=32)),
        (31, dict(kvcache_block_size=4, num_kvcache_blocks=8, max_num_seqs=1)),
    ],
    ids=str,
)
def test_the_smallest_engines_serve_what_they_accept(tmp_path, window, options):
    """vLLM #39734, #2163: a pool that was too small for a prompt was a hang."""
    oracle = make_family(tmp_path, "gemma3", sliding_window=window)
    oracle.model.generation_config.use_cache = False  # that of transformers needs windows of 2
    prompts = [random_prompt(length, length) for length in (1, 13, 20)]
    prompts.append([*prompts[-1][:17], 3])
    expected = [oracle(prompt, 12) for prompt in prompts]
    with LLM(tmp_path, **options) as llm:
        for _ in range(2):
            assert generate_amid_nan(llm, prompts, [greedy(12)] * 4) == expected


@pytest.mark.parametrize(
    "name, options",
    [
        ("gemma3", dict(max_num_batched_tokens=9, num_speculative_tokens=3)),
        ("gemma3", dict(num_kvcache_blocks=50, max_num_batched_tokens=50)),
        ("mistral-window", dict(max_num_seqs=2, policy="prefill_first")),
        ("ministral-windows", dict(enable_prefix_caching=False, kvcache_block_size=3)),
        ("qwen3-windows", dict(num_speculative_tokens=2, kvcache_block_size=2)),
        ("qwen3-moe-window", dict(max_num_batched_tokens=50)),
    ],
    ids=str,
)
def test_tokens_match_transformers_amid_nan(tmp_path, name, options):
    """With texts that are many windows long, twice, so that the second run has prefix hits."""
    oracle = make_family(tmp_path, name)
    prompts = [random_prompt(length, length) for length in (1, 7, 60, 120)]
    prompts.append(prompts[-1][:50] + random_prompt(0, 10))
    prompts.append(random_prompt(5, 6) * 8)  # drafts are accepted
    lengths = [70, 30, 40, 20, 50, 40]
    expected = [oracle(prompt, length) for prompt, length in zip(prompts, lengths)]
    defaults = {"kvcache_block_size": 4, "num_kvcache_blocks": 200, "max_model_len": 160}
    with LLM(tmp_path, **{**defaults, **options}) as llm:
        for _ in range(2):
            assert generate_amid_nan(llm, prompts, [greedy(n) for n in lengths]) == expected
        stats = llm.stats
        assert stats["num_free_window_blocks"] == stats["num_window_blocks"] > 0
        if llm.config.enable_prefix_caching:
            assert stats["num_cached_tokens"] > 0


def test_a_prompt_above_the_lowered_budget_is_told_why(tmp_path):
    """The option has the default, which no prompt exceeds."""
    make_family(tmp_path, "gemma3")
    options = dict(policy="prefill_first", kvcache_memory_bytes=40_000, kvcache_block_size=4)
    with LLM(tmp_path, max_model_len=60, **options) as llm:
        with pytest.raises(ValueError, match="max_num_batched_tokens=4: .* kvcache_memory_bytes"):
            llm.generate(random_prompt(1, 40))
        assert len(generate_ids(llm, [random_prompt(1, 4)], greedy(40))[0]) == 40
