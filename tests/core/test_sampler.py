"""The sampler draws from the requested distribution, and a seeded sample depends on nothing else."""

import pytest
import torch
from conftest import make_sampling_batch, random_prompt

from nanovllm import SamplingParams
from nanovllm.batch import SamplingBatch
from nanovllm.layers.noise import gumbel_noise, make_noise_keys
from nanovllm.layers.sampler import Sampler

VOCAB = 50


def sample(logits, params, seeds, positions):
    batch = make_sampling_batch(params, seeds, positions, logits.shape[-1])
    return Sampler(logits.shape[-1])(logits, batch).tolist()


def draw_many(logits, params, num_draws=20_000):
    tokens = sample(
        logits.expand(num_draws, -1), [params] * num_draws, [11] * num_draws, list(range(num_draws))
    )
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[-1])


def chi_square_per_degree(counts, probs):
    expected = probs * counts.sum()
    likely = expected > 5
    assert counts[~likely].sum() <= 3 * expected[~likely].sum() + 10
    return float(((counts - expected) ** 2 / expected)[likely].sum() / likely.sum())


@pytest.fixture
def logits():
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)) * 2


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_draws_follow_softmax(logits, temperature):
    counts = draw_many(logits, SamplingParams(temperature=temperature))
    assert chi_square_per_degree(counts, torch.softmax(logits / temperature, -1)) < 1.6


def filter_by_definition(logits, p):
    """Probabilities after temperature, top-k, top-p and min-p, by their definitions."""
    probs = torch.softmax(logits.double() / p.temperature, -1)
    order = probs.argsort(descending=True).tolist()
    kept = order[: p.top_k] if p.top_k > 0 else order
    total, reached, nucleus = sum(probs[i] for i in kept), 0.0, []
    for i in kept:
        nucleus.append(i)
        reached += probs[i] / total
        if reached >= p.top_p:
            break
    final = torch.zeros_like(probs)
    for i in nucleus:
        if probs[i] >= p.min_p * probs[order[0]]:
            final[i] = probs[i]
    return (final / final.sum()).float()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=1), SamplingParams(top_k=5), SamplingParams(top_k=1000), SamplingParams(top_p=0.7),
        SamplingParams(top_p=1e-6), SamplingParams(min_p=0.1), SamplingParams(min_p=1.0),
        SamplingParams(temperature=1.7, top_k=20, top_p=0.8, min_p=0.05), SamplingParams(temperature=0.5, top_p=0.95),
    ],
    ids=str,
)  # fmt: skip
def test_filters_match_their_definitions(logits, params):
    probs = filter_by_definition(logits, params)
    counts = draw_many(logits, params)
    assert counts[probs == 0].sum() == 0
    assert chi_square_per_degree(counts, probs) < 2.0


def test_crossing_token_stays():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert (draw_many(logits, SamplingParams(top_p=0.79), 5000) > 0).tolist() == [
        True,
        True,
        False,
        False,
    ]
    assert (draw_many(logits, SamplingParams(top_p=0.81), 5000) > 0).tolist() == [
        True,
        True,
        True,
        False,
    ]


def test_equal_logits_stay_or_go_together():
    logits = torch.tensor(
        [0.0, 2.0, 0.0, 2.0, 0.0, 2.0, -1.0]
    )  # probabilities of 2: 0.28 each, of 0: 0.04, of -1: 0.01
    first, second = [1, 3, 5], list(range(6))
    cases = [(dict(top_k=k), first) for k in (1, 2, 3)] + [
        (dict(top_k=k), second) for k in (4, 5, 6)
    ]
    cases += [(dict(top_p=p), first) for p in (1e-50, 0.2, 0.8)] + [
        (dict(top_p=p), second) for p in (0.87, 0.9, 0.97)
    ]
    cases += [
        (dict(top_k=4, top_p=0.95), first),
        (dict(top_k=4, top_p=0.96), second),
        (dict(min_p=0.13), second),
    ]
    for settings, tokens in cases:  # with top_k=4, the first three have 0.957
        assert (
            draw_many(logits, SamplingParams(**settings), 5000).nonzero().flatten().tolist()
            == tokens
        ), settings


def test_greedy_and_mixed_batches(logits):
    """A row of a mixed batch gives what it gives alone. A greedy row gives the argmax."""
    kinds = [
        SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=3), SamplingParams(temperature=0.0, top_k=3),
        SamplingParams(top_p=0.5), SamplingParams(min_p=0.3, temperature=3.0), SamplingParams(temperature=1e-4),
    ]  # fmt: skip
    params, rows = kinds * 20, torch.randn(140, VOCAB, generator=torch.Generator().manual_seed(1))
    seeds, positions = list(range(140)), [7 * i for i in range(140)]
    together = sample(rows, params, seeds, positions)
    for i in range(140):
        assert (
            together[i]
            == sample(rows[i : i + 1], params[i : i + 1], seeds[i : i + 1], positions[i : i + 1])[0]
        )
        if params[i].temperature < 0.01:
            assert together[i] == rows[i].argmax()
    assert make_sampling_batch(kinds[:1] * 4, [0] * 4, [0] * 4, VOCAB) == SamplingBatch(), (
        "all greedy: no work"
    )


def test_large_vocabulary_in_chunks():
    rows = torch.randn(5, 300_000, generator=torch.Generator().manual_seed(2))
    params, seeds, positions = [SamplingParams()] * 5, [3] * 5, [1, 2, 3, 4, 5]
    together = sample(rows, params, seeds, positions)
    assert together == [sample(rows[i : i + 1], params[:1], [3], [i + 1])[0] for i in range(5)]


def test_noise_is_gumbel_and_uncorrelated():
    """Noise is uncorrelated over tokens, over positions of a seed, and over seeds."""
    hashes = Sampler(2000).token_hashes
    by_position = gumbel_noise(
        hashes, torch.from_numpy(make_noise_keys([5] * 500, list(range(500))))
    )
    by_seed = gumbel_noise(hashes, torch.from_numpy(make_noise_keys(list(range(500)), [5] * 500)))
    for noise in (by_position, by_seed):
        assert noise.isfinite().all()
        uniform = (-(-noise.double()).exp()).exp()  # Gumbel's distribution function
        assert abs(uniform.mean() - 0.5) < 0.002 and abs(uniform.var() - 1 / 12) < 0.001
        histogram = torch.histc(uniform.float(), 100, 0, 1) / uniform.numel() * 100
        assert (histogram - 1).abs().max() < 0.05
        centered = (uniform - 0.5) * 12**0.5
        for shift in (1, 2, 3):
            assert abs((centered[:, shift:] * centered[:, :-shift]).mean()) < 0.005
            assert abs((centered[shift:] * centered[:-shift]).mean()) < 0.005
        winners = torch.bincount(noise.argmax(0), minlength=500).double()
        assert winners.var() / winners.mean() < 1.3


def test_no_two_tokens_share_their_noise():
    assert len(Sampler(300_000).token_hashes.unique()) == 300_000


def test_filters_that_filter_nothing_keep_the_tail():
    """top_p=1 is off, even if a float32 sum of probabilities reaches 1 too early."""
    logits = torch.zeros(200_000)
    logits[0] = 12.0
    counts = draw_many(logits, SamplingParams(min_p=1e-30), 200)
    assert counts[100_000:].sum() > 20


def test_extreme_filters_keep_the_most_probable(logits):
    for params in (SamplingParams(top_p=1e-50), SamplingParams(temperature=1e6, top_k=1)):
        assert draw_many(logits, params, 50)[logits.argmax()] == 50


def test_extreme_keys_stay_finite():
    keys = torch.tensor([[0, 0], [-1, -1], [2**31 - 1, -(2**31)], [-(2**31), 1]], dtype=torch.int32)
    noise = gumbel_noise(torch.arange(-1000, 1000, dtype=torch.int32), keys)
    assert noise.isfinite().all() and noise.abs().max() < 25


def test_a_seed_decides_alone(make_llm):
    """Samples are the same alone, in a batch, in chunks, after hits and preemptions, with both
    policies.
    """
    prompts = [random_prompt(i, 6 + i) for i in range(5)]
    params = [
        SamplingParams(temperature=0.9, top_p=0.9, seed=100 + i, max_tokens=12) for i in range(5)
    ]
    alone = [
        make_llm().generate(prompt, p, use_tqdm=False)[0]["token_ids"]
        for prompt, p in zip(prompts, params)
    ]
    assert len({tuple(tokens) for tokens in alone}) == 5
    for options in (
        {}, {"max_num_batched_tokens": 3}, {"num_kvcache_blocks": 7}, {"enable_chunked_prefill": False},
        {"kvcache_block_size": 2, "seed": 9}, {"max_num_seqs": 2},
    ):  # fmt: skip
        llm = make_llm(**options)
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [o["token_ids"] for o in outputs] == alone, options
            llm.generate(random_prompt(50, 3), use_tqdm=False)
        assert "num_kvcache_blocks" not in options or llm.stats["num_preemptions"]


def test_engine_seed(make_llm):
    """Requests without seeds differ from each other and repeat with the engine's seed."""
    prompts = [random_prompt(1, 4)] * 3
    first, same, other = (
        make_llm(seed=seed).generate(prompts, use_tqdm=False) for seed in (1, 1, 2)
    )
    assert len({tuple(o["token_ids"]) for o in first}) == 3
    assert (
        [o["token_ids"] for o in first]
        == [o["token_ids"] for o in same]
        != [o["token_ids"] for o in other]
    )
