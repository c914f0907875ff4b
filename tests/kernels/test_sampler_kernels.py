"""The optimized samplers filter and draw like the plain sampler, also from extreme logits.

The logits have the model's dtype, or float32 as after penalties and filters.
"""

from copy import deepcopy
from dataclasses import make_dataclass, replace

import pytest
import torch
from conftest import cover_pairs, make_sampling_batch
from kernel_helpers import all_kernels, optimize

from nanovllm import SamplingParams
from nanovllm.batch.batch import SamplingBatch
from nanovllm.layers.sampler import Sampler
from nanovllm.utils.helpers import report_once

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
all_kinds = pytest.mark.parametrize(
    "model_dtype, dtype, vocab_size",
    [(F32, F32, 5001), (BF16, BF16, 128), (BF16, F32, 97), (F16, F16, 97), (F16, F32, 3)],
    ids=str,
)


def make_samplers(vocab_size, model_dtype, language, device):
    plain = Sampler(vocab_size).to(device)
    return plain, optimize(deepcopy(plain), language, model_dtype)


@all_kernels
@all_kinds
def test_optimized_sampler_draws_the_same_tokens(vocab_size, dtype, model_dtype, language, device):
    torch.manual_seed(0)
    logits = torch.randn(16, vocab_size).to(device, dtype)
    logits[0] = 1.0  # of equal logits, the first token is sampled
    kinds = [(t, top_k) for t in (0.0, 0.7, 1.3, 1e-3) for top_k in (-1, 3)]
    params = [SamplingParams(temperature=t, top_k=top_k) for t, top_k in kinds * 2]
    batch = make_sampling_batch(params, list(range(16)), [100] * 16, vocab_size, device)
    plain, optimized = make_samplers(vocab_size, model_dtype, language, device)
    expected = plain(logits, batch)
    with torch.device("meta"):  # the caller's default device has no effect
        assert torch.equal(optimized(logits, batch), expected)
    assert expected[0] == 0
    assert torch.equal(optimized(logits, SamplingBatch()), logits.float().argmax(-1))
    assert optimized(logits[:0], SamplingBatch()).shape == (0,)


@all_kernels
def test_the_highest_bound_of_the_noise_need_not_win(language, device):
    """In some of 200 rows another token has the highest score."""
    params = [SamplingParams()] * 200
    batch = make_sampling_batch(params, list(range(200)), [9] * 200, 300, device)
    plain, optimized = make_samplers(300, F32, language, device)
    logits = torch.randn(200, 300, generator=torch.Generator().manual_seed(0)).to(device)
    assert torch.equal(optimized(logits, batch), plain(logits, batch))


def change(group, **values):
    """Add fields to Noise, Filters or SamplingBatch, as a new sampling option would."""
    kind = type(group)
    names = [(name, type(value)) for name, value in values.items()]
    longer = make_dataclass(kind.__name__, names, bases=(kind,), frozen=True, kw_only=True)
    return longer(**{**vars(group), **values})


@all_kernels
@pytest.mark.parametrize("group, method", [("noise", "draw"), ("filters", "filter")])
def test_an_unknown_field_is_left_to_the_plain_sampler(
    group, method, language, device, monkeypatch, capfd
):
    report_once.cache_clear()
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).to(device)
    params = [SamplingParams(top_p=0.9), SamplingParams(top_k=2), SamplingParams(temperature=0.0)]
    batch = make_sampling_batch(params, [1, 2, 3], [5] * 3, 50, device)
    plain, optimized = make_samplers(50, F32, language, device)
    expected = plain(logits, batch)
    calls = []
    original = getattr(Sampler, method)

    def watched(*args):
        calls.append(method)
        return original(*args)

    monkeypatch.setattr(Sampler, method, watched)

    def add_field(value):
        return replace(batch, **{group: change(getattr(batch, group), sigmas=value)})

    assert torch.equal(optimized(logits, add_field(None)), expected)  # no row uses the option
    assert not calls
    assert not capfd.readouterr().err
    for _ in range(2):
        assert torch.equal(optimized(logits, add_field(torch.ones(2))), expected)
    assert calls == [method] * 2
    assert torch.equal(optimized(logits, batch), expected)
    assert calls == [method] * 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line == "nanovllm: the sampling kernels ignore sigmas: such steps use the plain sampler"


@all_kernels
def test_a_new_field_of_the_batch_is_left_to_the_plain_forward(language, device, monkeypatch):
    """Kernels replace the methods that get Noise and Filters, not the one that gets the batch."""
    forward = Sampler.forward

    def add_bonus(sampler, logits, batch):
        return forward(sampler, logits + batch.bonus, batch)

    monkeypatch.setattr(Sampler, "forward", add_bonus)
    bonus = torch.zeros(50, device=device)
    bonus[7] = torch.inf
    batch = make_sampling_batch([SamplingParams(top_k=3)] * 2, [1, 2], [5] * 2, 50, device)
    for sampler in make_samplers(50, F32, language, device):
        logits = torch.zeros(2, 50, device=device)
        assert sampler(logits, change(batch, bonus=bonus)).tolist() == [7, 7]


EXTREME_PARAMS = [
    *[{"temperature": temperature} for temperature in (0.0, 1e-6, 1.0, 1e6)],
    {"min_p": 0.1},
    {"top_k": 2, "top_p": 0.5, "min_p": 0.1},
    {"top_p": 1e-50},
    {"top_p": 0.9, "temperature": 1e-6},
]


@all_kernels
@all_kinds
def test_a_row_gives_minus_one_exactly_if_it_has_a_nan(
    vocab_size, dtype, model_dtype, language, device
):
    last = vocab_size - 1
    noise = torch.randn(vocab_size, generator=torch.Generator().manual_seed(0))
    all_low = torch.full_like(noise, -torch.inf)
    one_left = all_low.clone()
    one_left[last] = noise[last]
    one_high = noise.clone()
    one_high[last] = torch.inf
    two_high = noise.clone()
    two_high[1:] = torch.inf
    rows = [all_low, one_left, one_high, two_high]
    expected = [0, last, last, 1]
    negative_nan = -torch.tensor(torch.nan)  # its sign bit is set
    for others in (noise, all_low, two_high):
        for positions in (0, last // 2, last, slice(None)):
            row = others.clone()
            row[positions] = torch.nan if positions == last else negative_nan
            rows.append(row)
            expected.append(-1)
    logits = torch.stack(rows).to(device, dtype)
    seeds = list(range(len(rows)))
    for settings in EXTREME_PARAMS:
        params = [SamplingParams(**settings)] * len(rows)
        batch = make_sampling_batch(params, seeds, seeds, vocab_size, device)
        for sampler in make_samplers(vocab_size, model_dtype, language, device):
            assert sampler(logits, batch).tolist() == expected, settings


@all_kernels
@all_kinds
def test_optimized_filter_keeps_the_same_tokens(vocab_size, dtype, model_dtype, language, device):
    """Among many tokens, a sum that rounds differently can move the cut by one value."""
    torch.manual_seed(0)
    logits = (torch.randn(12, vocab_size) * 3).to(device, dtype)
    logits[::2] = logits[::2].round()  # equal logits at the cuts
    logits[3] = 1.0
    logits[4] = 0.0
    logits[4, vocab_size // 2 :] = -0.0
    logits[5, ::3] = -torch.inf
    before = logits.clone()
    names = ("temperature", "top_k", "top_p", "min_p")
    settings = cover_pairs(
        (0.6, 1.0, 7.0), (-1, 1, 2, 40), (1.0, 0.53, 0.97, 1e-6, 1e-50), (0.0, 0.03)
    )
    kinds = [SamplingParams(**dict(zip(names, values))) for values in settings]
    plain, optimized = make_samplers(vocab_size, model_dtype, language, device)
    for first in (0, len(kinds) - 12):  # all kinds, in two steps
        params = kinds[first : first + 12]
        batch = make_sampling_batch(params, [1] * 12, [2] * 12, vocab_size, device)
        filtered = optimized.filter(logits, batch.filters)
        expected = plain.filter(logits, batch.filters)
        assert filtered.dtype == F32
        assert len(logits[filtered != expected].unique()) <= (1 if vocab_size > 1000 else 0)
    assert torch.equal(logits, before)
