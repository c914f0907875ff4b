"""Samples follow the requested distribution, and a seeded sample depends on nothing but its prompt.

The noise is a function of seed, position and token, so a test draws many samples at many positions.
"""

import pytest
import torch
from conftest import generate_ids, make_sampling_batch, random_prompt

from nanovllm import SamplingParams
from nanovllm.engine.sequence import Sequence
from nanovllm.layers import sampler
from nanovllm.layers.noise import gumbel_noise, make_noise_keys
from nanovllm.layers.sampler import Sampler, find_best

VOCAB_SIZE = 50


def make_logits(num_rows):
    return 2 * torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))


def sample(logits, params, seeds, positions):
    vocab_size = logits.shape[-1]
    batch = make_sampling_batch(params, seeds, positions, vocab_size)
    return Sampler(vocab_size)(logits, batch).tolist()


def find_probs(logits, params):
    """The probabilities after temperature, top-k, top-p and min-p, by their definitions."""
    probs = torch.softmax(logits.double() / params.temperature, -1)
    order = probs.argsort(descending=True).tolist()
    if params.top_k > 0:
        order = order[: params.top_k]
    total = probs[order].sum()
    kept = torch.zeros_like(probs)
    for token_id in order:
        if kept.sum() / total >= params.top_p:
            break
        kept[token_id] = probs[token_id]
    kept[probs < params.min_p * probs.max()] = 0.0
    return kept / kept.sum()


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.3},
        {"temperature": 2.5},
        {"top_k": 1000},
        {"temperature": 0.5, "top_p": 0.95},
        {"temperature": 1.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    ],
    ids=str,
)
def test_samples_follow_their_distribution(settings):
    """A chi-square test."""
    num_draws = 10_000
    params = SamplingParams(**settings)
    logits = make_logits(1).expand(num_draws, -1)
    tokens = sample(logits, [params] * num_draws, [11] * num_draws, range(num_draws))
    counts = torch.bincount(torch.tensor(tokens), minlength=VOCAB_SIZE)
    expected = find_probs(logits[0], params) * num_draws
    assert counts[expected == 0].sum() == 0
    likely = expected > 5
    chi_square = ((counts - expected) ** 2 / expected)[likely].sum()
    assert chi_square / likely.sum() < 1.7


def count_kept(logits, **settings):
    batch = make_sampling_batch([SamplingParams(**settings)], [0], [0], len(logits))
    return int(Sampler(len(logits)).filter(logits[None], batch.filters).isfinite().sum())


PLAIN = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
# Probabilities of 0.28 for each 2, 0.04 for each 0 and 0.01 for -1.
TIES = torch.tensor([0.0, 2.0, 0.0, 2.0, 0.0, 2.0, -1.0])


@pytest.mark.parametrize(
    "logits, settings, num_kept",
    [
        (PLAIN, {"top_p": 0.79}, 2),  # the token that crosses top_p is kept
        (PLAIN, {"top_p": 0.81}, 3),
        (torch.tensor([0.5, 0.25, 0.25]).log(), {"top_p": 0.5}, 1),
        (PLAIN, {"min_p": 0.55}, 2),
        (PLAIN, {"top_k": 0, "min_p": 0.01}, 4),  # top_k=0 is off
        (PLAIN, {"top_k": 1}, 1),
        # top_p=1 is off, although the float32 probability of the first token is 1.
        (torch.tensor([25.0, 0.0, 0.0]), {"min_p": 1e-30}, 3),
        # Equal logits stay or go together. Otherwise a choice could depend on the batch.
        (TIES, {"top_k": 4}, 6),
        (TIES, {"top_p": 1e-50}, 3),
        (TIES, {"top_k": 4, "top_p": 0.95}, 3),  # of the first four, three have 0.957
        (TIES, {"top_k": 4, "top_p": 0.96}, 6),
    ],
    ids=str,
)
def test_filters_keep_so_many_tokens(logits, settings, num_kept):
    assert count_kept(logits, **settings) == num_kept


def test_filters_of_a_row_do_not_depend_on_those_of_another():
    """top-p counts the tokens that the row's own top-k keeps, and only these."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().repeat(2, 1)
    for rows, num_kept in (
        (({"top_k": 2, "top_p": 0.5}, {"top_k": 4}), [1, 4]),
        (({"top_k": 1}, {"top_p": 0.95}), [1, 4]),
    ):
        params = [SamplingParams(**settings) for settings in rows]
        batch = make_sampling_batch(params, [0, 0], [0, 0], 4)
        filtered = Sampler(4).filter(logits, batch.filters)
        assert filtered.isfinite().sum(1).tolist() == num_kept


def test_a_greedy_row_has_no_noise():
    """The first of equal logits is its token, also beside a random row."""
    params = [SamplingParams(temperature=0.0), SamplingParams()]
    for seed in range(5):
        assert sample(torch.zeros(2, 50), params, [seed] * 2, [0, 0])[0] == 0


def test_all_rows_of_a_draft_are_filtered():
    """They belong to one sequence."""
    greedy, other, drafting = (
        Sequence(0, [1, 2], SamplingParams(**settings))
        for settings in ({"temperature": 0.0}, {}, {"top_k": 1})
    )
    rows = [other, drafting, drafting, greedy, drafting]
    batch = sampler.make_sampling_batch(rows, [2, 2, 3, 2, 4], 8, torch.device("cpu"))
    assert batch.filters.rows.tolist() == [1, 2, 4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_in_16_bits_are_filtered_and_sampled_in_float32(dtype):
    logits = make_logits(2000).to(dtype)
    rows = range(len(logits))
    for settings in ({}, {"top_p": 0.7, "min_p": 0.1, "temperature": 1.3}):
        params = [SamplingParams(**settings)] * len(logits)
        sampled = sample(logits, params, rows, rows)
        assert sampled == sample(logits.float(), params, rows, rows)


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_p": 0.9}], ids=str)
def test_a_row_with_nan_gives_minus_one(settings):
    logits = make_logits(3)
    logits[0, -1] = torch.nan
    logits[1] = torch.nan
    tokens = sample(logits, [SamplingParams(**settings)] * 3, range(3), range(3))
    assert [token_id < 0 for token_id in tokens] == [True, True, False]


def test_the_first_of_equal_scores_is_the_best():
    for vocab_size in (5, 50, 5000):
        assert find_best(torch.zeros(2, vocab_size)).tolist() == [0, 0]
    scores = torch.tensor([[0.0, torch.inf, 1.0, torch.inf], [-torch.inf] * 4])
    assert find_best(scores).tolist() == [1, 0]
    assert find_best(torch.tensor([[0.0, torch.inf, -torch.inf]])).tolist() == [1]
    params = [SamplingParams(), SamplingParams()]
    assert sample(scores, params, [0, 1], [0, 1]) == [1, 0], "also with noise"


def test_a_row_does_not_depend_on_its_batch():
    kinds = [
        {"temperature": 0.0},
        {},
        {"top_k": 3, "top_p": 0.5},
        {"top_k": 30},
        {"top_p": 0.5},
        {"min_p": 0.3, "temperature": 3.0},
    ]
    params = [SamplingParams(**kind) for kind in kinds] * 10
    rows = range(len(params))
    logits = make_logits(len(params))
    together = sample(logits, params, rows, rows)
    for i in rows:
        assert [together[i]] == sample(logits[[i]], [params[i]], [i], [i])
        if params[i].temperature == 0:
            assert together[i] == logits[i].argmax()


@pytest.mark.parametrize(
    "seeds, positions",
    [(range(500), [5] * 500), ([5] * 500, range(500))],
    ids=["seeds", "positions"],
)
def test_noise_is_gumbel_and_uncorrelated(seeds, positions):
    """It is uncorrelated over tokens, over positions of a seed, and over seeds."""
    keys = torch.from_numpy(make_noise_keys(seeds, positions))
    noise = gumbel_noise(Sampler(2000).token_hashes, keys)
    uniform = (-(-noise.double()).exp()).exp()  # Gumbel's distribution function
    histogram = torch.histc(uniform.float(), 100, 0, 1) / uniform.numel() * 100
    assert (histogram - 1).abs().max() < 0.05
    centered = (uniform - 0.5) * 12**0.5
    for shift in (1, 2, 3):
        for rows in (centered, centered.T):
            assert abs((rows[shift:] * rows[:-shift]).mean()) < 0.005
    winners = torch.bincount(noise.argmax(0), minlength=500).double()
    assert winners.var() / winners.mean() < 1.3


def test_the_largest_noise_does_not_tie():
    """It is -log(-log1p(-u)), because a uniform u in float32 is finest near 0.

    -log(-log(u)) has the same distribution, but its largest values come from u near 1, where
    neighbouring numbers are 6e-8 apart. Equal noise of two tokens would decide by their order.
    """
    keys = torch.from_numpy(make_noise_keys(range(500), [0] * 500))
    largest = gumbel_noise(Sampler(8000).token_hashes, keys).flatten().topk(1000).values
    num_different = len(largest.unique())
    assert num_different > 990, "the noise of small u must be the largest: -log(-log1p(-u))"


def test_seed_and_position_are_not_only_added():
    """Otherwise a request would repeat the noise of another one, some positions later."""
    keys = make_noise_keys([1, 2, 3, 0], [2, 1, 0, 3])
    assert len({tuple(key) for key in keys.tolist()}) == 4


def test_noise_keys_have_64_bits():
    keys = make_noise_keys(range(500), [0] * 500)
    assert (keys[:, 0] != keys[:, 1]).all()
    first, second = make_noise_keys([1, 1 + 2**32], [5, 5]).tolist()
    assert first != second, "all bits of a seed count"


def test_noise_is_float32_whatever_the_default_dtype_is():
    keys = torch.tensor([[3, 5]], dtype=torch.int32)
    hashes = Sampler(100).token_hashes
    expected = gumbel_noise(hashes, keys)
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            noise = gumbel_noise(hashes, keys)
        finally:
            torch.set_default_dtype(torch.float32)
        assert noise.dtype == torch.float32
        assert torch.equal(noise, expected)


def test_extreme_noise_keys_stay_finite():
    keys = torch.tensor([[0, 0], [-1, -1], [2**31 - 1, -(2**31)]], dtype=torch.int32)
    noise = gumbel_noise(torch.arange(-1000, 1000, dtype=torch.int32), keys)
    assert noise.abs().max() < 25


def test_no_two_tokens_share_their_noise():
    assert len(Sampler(300_000).token_hashes.unique()) == 300_000


def test_a_seed_decides_alone(make_llm):
    """A sample depends on no other request, chunk, cache hit, preemption, policy or engine seed."""
    prompts = [random_prompt(i, 6 + i) for i in range(5)]
    settings = {"temperature": 0.9, "top_p": 0.9, "max_tokens": 12}
    params = [SamplingParams(seed=100 + i, **settings) for i in range(5)]
    llm = make_llm()
    alone = [generate_ids(llm, *pair)[0] for pair in zip(prompts, params)]
    for options in (
        {"max_num_batched_tokens": 3},
        {"num_kvcache_blocks": 7},
        {"enable_chunked_prefill": False, "kvcache_block_size": 2, "seed": 9, "max_num_seqs": 2},
    ):
        llm = make_llm(**options)
        for _ in range(2):
            assert generate_ids(llm, prompts, params) == alone, options
            generate_ids(llm, random_prompt(50, 3))
        assert "num_kvcache_blocks" not in options or llm.stats["num_preemptions"]


def test_requests_without_a_seed_use_the_seed_of_the_engine(make_llm):
    prompts = [random_prompt(1, 4)] * 3
    first, again, other = [generate_ids(make_llm(seed=seed), prompts) for seed in (1, 1, 2)]
    assert first == again != other
    assert len({tuple(token_ids) for token_ids in first}) == 3
