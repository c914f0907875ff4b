"""The kernels of the sampler in Triton.

A row of logits is too long for one program. A program finds the best token of a part of a row, and
torch takes the maximum over the parts.

To filter, the lowest logit to keep is found digit by digit, as in a radix sort. A key with digits
of 4 bits stands for a logit. In each launch, a program counts the tokens of its part by their next
digit, if they have the digits found so far, and sums their probabilities. The next launch adds up
the parts and finds the digit. With top_k = 3 and two digits:

    keys             5c 5a 51 3f 07
    first digits     three tokens have 5, one 3, one 0    the third token begins with 5
    second digits    one token has c, one a, one 1        the third token is 51
"""

import math

import triton
import triton.language as tl
from triton.language import constexpr

_LOG_2 = constexpr(math.log(2))


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
    do_not_specialize=["level"],
    do_not_specialize_on_alignment=[
        "rows_ptr",
        "temperatures_ptr",
        "top_ks_ptr",
        "top_ps_ptr",
        "min_ps_ptr",
    ],
)
def filter_kernel(
    logits_ptr,
    output_ptr,
    highest_ptr,
    rows_ptr,
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    min_ps_ptr,
    # For each level and row: the digits so far, and for the tokens above them their number, their
    # probabilities up to a factor, and the limit of one of these.
    prefixes_ptr,  # uint32 [num_levels, num_filtered]
    states_ptr,  # float32 [num_levels, num_filtered, 3]
    # The tokens that have the digits so far, by their next digit: number and probabilities.
    sums_ptr,  # float32 [num_levels, num_filtered, num_parts, 2, 16]
    level,
    vocab_size,
    NUM_DIGITS: constexpr,
    PARTS: constexpr,  # num_parts, rounded up to a power of two
    BLOCK: constexpr,
):
    """Find a digit at each level, first those of top-k and then those of top-p.

    The last level, 2 * NUM_DIGITS, removes tokens. All parts of a row write the same state.
    """
    index = tl.program_id(0)
    part = tl.program_id(1)
    num_filtered = tl.num_programs(0)
    num_parts = tl.num_programs(1)
    row = tl.load(rows_ptr + index).to(tl.int64)
    state = (level * num_filtered + index).to(tl.int64)
    digits = tl.arange(0, 16)
    prefix = tl.full([], 0, dtype=tl.uint32)
    count = 0.0
    mass = 0.0
    limit = tl.load(top_ks_ptr + index).to(tl.float32)
    if level > 0:
        before = state - num_filtered
        if level != NUM_DIGITS + 1:
            prefix = tl.load(prefixes_ptr + before)
        count = tl.load(states_ptr + 3 * before)
        mass = tl.load(states_ptr + 3 * before + 1)
        limit = tl.load(states_ptr + 3 * before + 2)
        parts = tl.arange(0, PARTS)[:, None]
        part_ptrs = sums_ptr + (before * num_parts + parts) * 32 + digits[None, :]
        counts = tl.sum(tl.load(part_ptrs, mask=parts < num_parts, other=0.0), axis=0)
        masses = tl.sum(tl.load(part_ptrs + 16, mask=parts < num_parts, other=0.0), axis=0)
        counts_above = count + (tl.cumsum(counts, reverse=True) - counts)
        masses_above = mass + (tl.cumsum(masses, reverse=True) - masses)
        above = tl.where(level <= NUM_DIGITS, counts_above, masses_above)
        digit = tl.min(tl.where(above < limit, digits, 15), axis=0)
        prefix = prefix * 16 + digit.to(tl.uint32)
        count = tl.sum(tl.where(digits == digit, counts_above, 0.0), axis=0)
        mass = tl.sum(tl.where(digits == digit, masses_above, 0.0), axis=0)
        if level == NUM_DIGITS:
            # More than top_k tokens stay if some have the logit of the last one. Only top_k of
            # them count.
            share = (limit - count) / tl.sum(tl.where(digits == digit, counts, 0.0), axis=0)
            mass += share * tl.sum(tl.where(digits == digit, masses, 0.0), axis=0)
            limit = mass * tl.load(top_ps_ptr + index)
            count = 0.0
            mass = 0.0
    tl.store(prefixes_ptr + state, prefix)
    tl.store(states_ptr + 3 * state, count)
    tl.store(states_ptr + 3 * state + 1, mass)
    tl.store(states_ptr + 3 * state + 2, limit)

    tokens = part * BLOCK + tl.arange(0, BLOCK)
    exists = tokens < vocab_size
    logits = _load_logits(logits_ptr + row * vocab_size, tokens, vocab_size)
    # Unsigned integers in the order of the logits. Adding 0 turns -0 into 0.
    bits = (logits + 0.0).to(tl.uint32, bitcast=True)
    keys = tl.where(bits >> 31 == 0, bits | 0x80000000, ~bits) >> (32 - 4 * NUM_DIGITS)
    highest = tl.load(highest_ptr + row)
    probs = tl.exp((logits - highest) / tl.load(temperatures_ptr + index))
    if level < 2 * NUM_DIGITS:
        if level == NUM_DIGITS:
            prefix = tl.full([], 0, dtype=tl.uint32)
        keys = keys >> (4 * (NUM_DIGITS - 1 - level % NUM_DIGITS)).to(tl.uint32)
        next_digits = tl.where(exists & (keys >> 4 == prefix), (keys & 15).to(tl.int32), 16)
        is_digit = next_digits[None, :] == digits[:, None]
        sums_ptrs = sums_ptr + (state * num_parts + part) * 32 + digits
        tl.store(sums_ptrs, tl.sum(is_digit.to(tl.float32), axis=1))
        tl.store(sums_ptrs + 16, tl.sum(tl.where(is_digit, probs[None, :], 0.0), axis=1))
    elif highest < float("inf"):  # not if a logit is infinite or NaN
        cut = tl.maximum(tl.load(prefixes_ptr + NUM_DIGITS * num_filtered + index), prefix)
        is_removed = (keys < cut) | (probs < tl.load(min_ps_ptr + index))
        is_removed &= exists & (logits < highest)
        tl.store(output_ptr + row * vocab_size + tokens, float("-inf"), mask=is_removed)


@triton.jit
def _load_logits(logits_ptr, tokens, vocab_size):
    logits = tl.load(logits_ptr + tokens, mask=tokens < vocab_size, other=float("-inf"))
    return logits.to(tl.float32)
