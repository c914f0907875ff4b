"""The kernel of experts in Triton. moe.py explains it."""

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit(do_not_specialize=["pairs_per_row"])
def multiply_experts_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    pairs_ptr,
    starts_ptr,
    output_ptr,
    pairs_per_row,
    OUT_FEATURES: constexpr,
    IN_FEATURES: constexpr,
    EXPERTS: constexpr,
    N: constexpr,
    M: constexpr,
    K: constexpr,
):
    tile = tl.program_id(1)
    starts_ptrs = starts_ptr + tl.arange(0, EXPERTS)
    num_pairs = tl.load(starts_ptrs + 1) - tl.load(starts_ptrs)  # of each expert
    tile_ends = tl.cumsum(tl.cdiv(num_pairs, M))
    is_before = tile_ends <= tile
    expert = tl.sum(is_before.to(tl.int32))
    if expert == EXPERTS:
        return
    tile -= tl.max(tl.where(is_before, tile_ends, 0))
    places = tl.load(starts_ptr + expert) + tile * M + tl.arange(0, M)[None, :]
    is_pair = places < tl.load(starts_ptr + expert + 1)
    pairs = tl.load(pairs_ptr + places, mask=is_pair, other=0)
    outputs = (tl.program_id(0) * N + tl.arange(0, N))[:, None]
    is_output = outputs < OUT_FEATURES
    x_ptrs = x_ptr + pairs // pairs_per_row * IN_FEATURES
    weight_ptrs = weight_ptr + (expert.to(tl.int64) * OUT_FEATURES + outputs) * IN_FEATURES
    acc = tl.zeros([N, M], dtype=tl.float32)
    for first in range(0, IN_FEATURES, K):
        inputs = first + tl.arange(0, K)
        is_input = inputs < IN_FEATURES
        mask = is_output & is_input[None, :]
        weight = tl.load(weight_ptrs + inputs[None, :], mask=mask, other=0.0)
        x = tl.load(x_ptrs + inputs[:, None], mask=is_pair & is_input[:, None], other=0.0)
        acc = tl.dot(weight, x, acc)
    if scales_ptr is not None:
        acc *= tl.load(scales_ptr + pairs, mask=is_pair, other=0.0)
    output_ptrs = output_ptr + pairs * OUT_FEATURES + outputs
    tl.store(output_ptrs, acc.to(output_ptr.dtype.element_ty), mask=is_output & is_pair)
