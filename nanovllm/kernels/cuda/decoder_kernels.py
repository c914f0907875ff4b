"""The kernels of decoder.py in Triton. A program computes one token or a part of its heads.

They round where the replaced layers round.
"""

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit
def add_rms_norm_kernel(
    x_ptr,
    branch_ptr,
    weight_ptr,
    total_ptr,
    normed_ptr,
    size,
    eps,
    BLOCK: constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < size
    x = tl.load(x_ptr + token * size + offsets, mask=mask, other=0.0)
    if branch_ptr is not None:
        branch = tl.load(branch_ptr + token * size + offsets, mask=mask, other=0.0)
        x = (x.to(tl.float32) + branch.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + token * size + offsets, x, mask=mask)
    wide = x.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide) / size + eps)
    weight = tl.load(weight_ptr + offsets, mask=mask)
    normed = _scale(wide, factor, weight)
    tl.store(normed_ptr + token * size + offsets, normed, mask=mask)


@triton.jit
def _scale(x, factor, weight):
    """x * factor * weight in the weight's dtype, rounded before and after the second product."""
    rounded = (x * factor).to(weight.dtype).to(tl.float32)
    return (rounded * weight.to(tl.float32)).to(weight.dtype)


# slots_ptr can have any alignment in a packed batch.
@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def rotate_and_store_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    q_eps,
    k_eps,
    cos_ptr,
    sin_ptr,
    query_ptr,
    cache_ptr,
    slots_ptr,
    values_offset,
    NUM_HEADS: constexpr,
    NUM_KV_HEADS: constexpr,
    HALF: constexpr,
    ROTATED: constexpr,
    HEADS: constexpr,
    BLOCK: constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    # 64 bits, because slot * NUM_KV_HEADS * head_dim overflows 32 bits in large caches.
    slot = tl.load(slots_ptr + token).to(tl.int64)
    # Query heads come first, then key heads, then value heads.
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    dims = tl.arange(0, BLOCK)[None, :]
    is_dim = dims < HALF
    # Pair i is dimensions i and i + ROTATED of a head. If these are not all dimensions, the others
    # make pairs, too, whose cos is 1 and whose sin is 0.
    is_rotated = dims < ROTATED
    first_dims = dims
    distance = HALF
    if ROTATED < HALF:
        first_dims = tl.where(is_rotated, dims, dims + ROTATED)
        distance = tl.where(is_rotated, ROTATED, HALF - ROTATED)
    is_query = heads < NUM_HEADS
    num_heads = NUM_HEADS + 2 * NUM_KV_HEADS
    source = qkv_ptr + (token * num_heads + heads) * 2 * HALF + first_dims
    mask = is_dim & (heads < num_heads)
    first = tl.load(source, mask=mask, other=0.0)  # [HEADS, BLOCK]
    second = tl.load(source + distance, mask=mask, other=0.0)

    x = first.to(tl.float32)
    y = second.to(tl.float32)
    if q_weight_ptr is not None:
        squares = tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)
        mean_square = (squares / (2 * HALF))[:, None]
        factor = tl.rsqrt(mean_square + tl.where(is_query, q_eps, k_eps))
        q_weight = tl.load(q_weight_ptr + first_dims, mask=is_dim)
        k_weight = tl.load(k_weight_ptr + first_dims, mask=is_dim)
        x = _scale(x, factor, tl.where(is_query, q_weight, k_weight)).to(tl.float32)
        q_weight = tl.load(q_weight_ptr + distance + first_dims, mask=is_dim)
        k_weight = tl.load(k_weight_ptr + distance + first_dims, mask=is_dim)
        y = _scale(y, factor, tl.where(is_query, q_weight, k_weight)).to(tl.float32)
    cos = tl.load(cos_ptr + token * ROTATED + dims, mask=is_rotated)
    sin = tl.load(sin_ptr + token * ROTATED + dims, mask=is_rotated)
    if ROTATED < HALF:
        cos = tl.where(is_rotated, cos, 1.0)
        sin = tl.where(is_rotated, sin, 0.0)
    rotated_x = (x * cos - y * sin).to(first.dtype)
    rotated_y = (y * cos + x * sin).to(first.dtype)

    target = query_ptr + (token * NUM_HEADS + heads) * 2 * HALF + first_dims
    tl.store(target, rotated_x, mask=is_dim & is_query)
    tl.store(target + distance, rotated_y, mask=is_dim & is_query)
    if slot >= 0:
        heads -= NUM_HEADS  # heads of the cache: keys, then values
        kind = heads // NUM_KV_HEADS  # 0: a key, 1: a value
        rows = slot * NUM_KV_HEADS + heads % NUM_KV_HEADS
        target = cache_ptr + kind * values_offset + rows * 2 * HALF + first_dims
        is_cached = is_dim & (heads >= 0) & (heads < 2 * NUM_KV_HEADS)
        tl.store(target, tl.where(kind == 1, first, rotated_x), mask=is_cached)
        tl.store(target + distance, tl.where(kind == 1, second, rotated_y), mask=is_cached)


@triton.jit
def silu_and_mul_kernel(gate_up_ptr, output_ptr, size, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    gate = tl.load(gate_up_ptr + row * 2 * size + offsets, mask=mask).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * size + size + offsets, mask=mask).to(tl.float32)
    output = gate * tl.sigmoid(gate) * up
    tl.store(output_ptr + row * size + offsets, output.to(output_ptr.dtype.element_ty), mask=mask)
