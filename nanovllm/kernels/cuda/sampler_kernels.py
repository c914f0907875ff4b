"""The kernels of the sampler in Triton.

A row of logits is too long for one program to sample from. A program finds the best token of a part
of a row, and torch takes the maximum over the parts. To filter, a program passes over a row several
times and searches by bisection for the lowest logit to keep.
"""

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language import constexpr

_LOG_2 = constexpr(math.log(2))


class _Cut(NamedTuple):
    """The lowest logit that stays, and the tokens at or above it, and above it. Mass is weight."""

    logit: Any
    count: Any
    mass: Any
    count_above: Any
    mass_above: Any


@triton.jit(do_not_specialize_on_alignment=["keys_ptr", "temperatures_ptr"])
def sample_kernel(
    logits_ptr,
    hashes_ptr,
    keys_ptr,
    temperatures_ptr,
    scores_ptr,
    tokens_ptr,
    vocab_size,
    BLOCK: constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    tokens = part * BLOCK + tl.arange(0, BLOCK)
    logits_ptr += row * vocab_size
    scores = _load_logits(logits_ptr, tokens, vocab_size)
    is_nan = scores != scores
    has_nan = tl.max(is_nan.to(tl.int32), axis=0) > 0
    scores = tl.where(is_nan, float("-inf"), scores)
    temperature = tl.load(temperatures_ptr + row)
    if temperature > 0:
        keys_ptr += 2 * row
        uniform = _find_uniform(hashes_ptr, keys_ptr, tokens, vocab_size)
        # Most programs compute the noise of only one token, because an upper bound excludes all
        # others. Noise is less than -log(uniform), since -log(1 - u) > u. The bits of a float,
        # scaled, are its log2 at powers of two and below it elsewhere. 1e-4 exceeds all rounding.
        bits = uniform.to(tl.int32, bitcast=True).to(tl.float32)
        bounds = scores + temperature * (_LOG_2 * 127 + 1e-4 - bits * (_LOG_2 * 2.0**-23))
        best = part * BLOCK + tl.argmax(bounds, axis=0)
        highest = _perturb(logits_ptr, hashes_ptr, keys_ptr, temperature, best, vocab_size)
        num_candidates = tl.sum((bounds >= highest).to(tl.int32), axis=0)
        if (num_candidates > 1) & (highest > float("-inf")):
            scores = _perturb(logits_ptr, hashes_ptr, keys_ptr, temperature, tokens, vocab_size)
            best = part * BLOCK + tl.argmax(scores, axis=0)
            highest = tl.max(scores, axis=0)
    else:
        best = part * BLOCK + tl.argmax(scores, axis=0)
        highest = tl.max(scores, axis=0)
    # A part with a NaN has score NaN, which torch's argmax over the parts selects, and token -1.
    index = row * tl.num_programs(1) + part
    tl.store(scores_ptr + index, tl.where(has_nan, float("nan"), highest))
    tl.store(tokens_ptr + index, tl.where(has_nan, -1, best).to(tl.int64))


@triton.jit
def _find_uniform(hashes_ptr, keys_ptr, tokens, vocab_size):
    """The uniform numbers of layers/noise.py."""
    x = tl.load(hashes_ptr + tokens, mask=tokens < vocab_size, other=0).to(tl.uint32, bitcast=True)
    x = x ^ tl.load(keys_ptr).to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * (tl.load(keys_ptr + 1).to(tl.uint32, bitcast=True) | 1)
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) >> 1
    number = x.to(tl.int32, bitcast=True).to(tl.float32)
    return number * (2.0**-31 * (1 - 2.0**-23)) + 2.0**-33


@triton.jit
def _perturb(logits_ptr, hashes_ptr, keys_ptr, temperature, tokens, vocab_size):
    """Load logits, and add Gumbel noise. Loading again takes fewer registers than keeping them."""
    uniform = _find_uniform(hashes_ptr, keys_ptr, tokens, vocab_size)
    # -log(1 - uniform). Near 0, where 1 - uniform loses digits, its power series is used, of which
    # four terms are enough for float32.
    series = uniform * (1 + uniform * (1 / 2 + uniform * (1 / 3 + uniform * (1 / 4))))
    exponential = tl.where(uniform < 0.01, series, -tl.log(1 - uniform))
    return _load_logits(logits_ptr, tokens, vocab_size) - temperature * tl.log(exponential)


@triton.jit(
    do_not_specialize_on_alignment=[
        "rows_ptr",
        "temperatures_ptr",
        "top_ks_ptr",
        "top_ps_ptr",
        "min_ps_ptr",
    ]
)
def filter_kernel(
    logits_ptr,
    output_ptr,
    rows_ptr,
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    min_ps_ptr,
    vocab_size,
    BLOCK: constexpr,
):
    index = tl.program_id(0)
    row = tl.load(rows_ptr + index).to(tl.int64)
    logits_ptr += row * vocab_size
    top_k = tl.load(top_ks_ptr + index).to(tl.int32)
    top_p = tl.load(top_ps_ptr + index)
    min_p = tl.load(min_ps_ptr + index)
    scale = 1 / tl.load(temperatures_ptr + index)

    maxima = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for start in range(0, vocab_size, BLOCK):
        logits = _load_logits(logits_ptr, start + tl.arange(0, BLOCK), vocab_size)
        maxima = tl.maximum(maxima, logits)
    highest = tl.max(maxima)
    masses = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, vocab_size, BLOCK):
        logits = _load_logits(logits_ptr, start + tl.arange(0, BLOCK), vocab_size)
        masses += tl.exp((logits - highest) * scale)

    mass = tl.sum(masses)
    kept_mass = mass
    # Nothing is cut yet: all tokens stay. Triton 3.4 takes variables and literals in a named tuple,
    # but not the result of float().
    lowest = float("-inf")
    cut = _Cut(lowest, vocab_size, mass, 0, 0.0)
    if (top_k < vocab_size) & (highest < float("inf")):
        cut = _find_cut(logits_ptr, vocab_size, highest, scale, cut, top_k, float("inf"), BLOCK)
        # More than top_k tokens stay if some have the logit of the cut. Only top_k of them count.
        num_at_cut = cut.count - cut.count_above
        missing_mass = (top_k - cut.count_above) * (cut.mass - cut.mass_above) / num_at_cut
        kept_mass = cut.mass_above + missing_mass
    if (top_p < 1) & (highest < float("inf")):
        max_mass = top_p * kept_mass
        cut = _find_cut(logits_ptr, vocab_size, highest, scale, cut, top_k, max_mass, BLOCK)
    for start in range(0, vocab_size, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        logits = _load_logits(logits_ptr, tokens, vocab_size)
        # False for NaN, which therefore stays.
        is_removed = (logits < cut.logit) | (tl.exp((logits - highest) * scale) < min_p)
        mask = is_removed & (tokens < vocab_size)
        tl.store(output_ptr + row * vocab_size + tokens, float("-inf"), mask=mask)


@triton.jit
def _find_cut(
    logits_ptr,
    vocab_size,
    highest,
    scale,
    cut,
    max_count,
    max_mass,
    BLOCK: constexpr,
):
    """Find the lowest logit that stays: fewer than max_count tokens, with less mass than max_mass,
    have higher logits.

    Bisection between the logit of `cut`, an earlier cut, and the highest. With logits 5, 4, 4, 2, 1
    and max_count 2:

        low  high  pivot  above it
        -inf  5    -inf   5 4 4 2 1    too many: low becomes the lowest of them, 1
         1    5     3     5 4 4        too many: low becomes 4
         4    5     4.5   5            few enough: high becomes the highest of the others, 4

    The result is the cut at 4, with the counts of 5 4 4 and of 5, and their masses.
    """
    low = cut.logit
    count_low = cut.count
    mass_low = cut.mass
    high = highest
    count_high = 0  # number of tokens above `high`
    mass_high = 0.0
    while low < high:
        pivot = tl.maximum(low * 0.5 + high * 0.5, low)
        pivot = tl.where(pivot < high, pivot, low)  # the middle may have been rounded up
        counts = tl.zeros([BLOCK], dtype=tl.int32)
        masses = tl.zeros([BLOCK], dtype=tl.float32)
        below = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
        above = tl.full([BLOCK], float("inf"), dtype=tl.float32)
        for start in range(0, vocab_size, BLOCK):
            logits = _load_logits(logits_ptr, start + tl.arange(0, BLOCK), vocab_size)
            is_above = logits > pivot
            counts += is_above.to(tl.int32)
            masses += tl.where(is_above, tl.exp((logits - highest) * scale), 0.0)
            above = tl.minimum(above, tl.where(is_above, logits, float("inf")))
            below = tl.maximum(below, tl.where(is_above, float("-inf"), logits))
        count = tl.sum(counts)
        mass = tl.sum(masses)
        # The end that moves becomes the logit of a token, so that the ends meet even if many
        # logits are equal.
        if (count < max_count) & (mass < max_mass):
            high = tl.max(below)
            count_high = count
            mass_high = mass
        else:
            low = tl.min(above)
            count_low = count
            mass_low = mass
    return _Cut(low, count_low, mass_low, count_high, mass_high)


@triton.jit
def _load_logits(logits_ptr, tokens, vocab_size):
    logits = tl.load(logits_ptr + tokens, mask=tokens < vocab_size, other=float("-inf"))
    return logits.to(tl.float32)
