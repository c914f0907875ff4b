"""Kernels in Triton for what takes torch several passes over the same numbers: a GPU spends a decode on such passes.

Each takes a row of numbers per program, and rounds where the layer rounds that it stands for. A vocabulary is too long
for one program: of every part of it `sample` keeps the best token, and torch finds the best of those.
"""

from collections.abc import Callable
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.layers.sampler import find_best

_SAMPLE_PART = 4096  # tokens of the vocabulary


def try_out(trial: Callable[[], None]) -> str | None:
    """Why `trial` of some kernels fails; None: they work. Triton compiles for the GPU at hand with the help of the host's
    C compiler: only a trial tells whether that works."""
    try:
        trial()
    except Exception as error:  # of the compiler, the driver or the launch: all of them mean that it does not work
        return f"the kernels fail on this GPU: {error!r}"
    return None


@cache
def reason_unavailable(dtype: torch.dtype) -> str | None:
    def trial() -> None:
        x = torch.ones(2, 2, 16, dtype=dtype, device="cuda")
        angles = torch.ones(2, 1, 8, dtype=torch.float32, device="cuda")
        integers = torch.ones(2, 16, dtype=torch.int32, device="cuda")
        rms_norm(x[0], x[0, 0], 1e-6)
        rotary(x, angles, angles, x[0, 0], 1e-6)
        silu_and_mul(x[0])
        sample(x[0], integers[0], integers, angles.flatten())
        torch.cuda.synchronize()

    return try_out(trial)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """norm.RMSNorm of x [num_tokens, size]."""
    assert x.is_contiguous()
    output = x.new_empty(x.shape)
    num_tokens, size = x.shape
    _rms_norm_kernel[(num_tokens,)](x, weight, output, size, eps, BLOCK=triton.next_power_of_2(size))
    return output


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, output_ptr, size, eps, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < size
    x = tl.load(x_ptr + token * size + offsets, mask=mask, other=0.0).to(tl.float32)
    dtype = output_ptr.dtype.element_ty
    normed = (x * tl.rsqrt(tl.sum(x * x) / size + eps)).to(dtype).to(tl.float32)  # rounded before the weight is applied
    weight = tl.load(weight_ptr + offsets, mask=mask).to(tl.float32)
    tl.store(output_ptr + token * size + offsets, (normed * weight).to(dtype), mask=mask)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, norm_weight: Tensor | None, eps: float) -> Tensor:
    """rotary.apply_rotary of x [num_tokens, num_heads, head_dim], whose tokens may lie apart."""
    assert x[:1].is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    output = x.new_empty(x.shape)
    num_tokens, num_heads, head_dim = x.shape
    _rotary_kernel[(num_tokens, num_heads)](
        x, cos, sin, norm_weight, output, x.stride(0), num_heads, head_dim // 2, eps,
        HAS_NORM=norm_weight is not None, BLOCK=triton.next_power_of_2(head_dim // 2),
    )  # fmt: skip
    return output


@triton.jit
def _rotary_kernel(
    x_ptr, cos_ptr, sin_ptr, norm_weight_ptr, output_ptr, stride, num_heads, half, eps,
    HAS_NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < half
    cos, sin = tl.load(cos_ptr + token * half + offsets, mask=mask), tl.load(sin_ptr + token * half + offsets, mask=mask)
    start = token * stride + head * 2 * half
    first = tl.load(x_ptr + start + offsets, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + start + half + offsets, mask=mask, other=0.0).to(tl.float32)
    dtype = output_ptr.dtype.element_ty
    if HAS_NORM:  # rounded where _rms_norm_kernel rounds
        factor = tl.rsqrt((tl.sum(first * first) + tl.sum(second * second)) / (2 * half) + eps)
        weight = tl.load(norm_weight_ptr + offsets, mask=mask).to(tl.float32)
        first = ((first * factor).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
        weight = tl.load(norm_weight_ptr + half + offsets, mask=mask).to(tl.float32)
        second = ((second * factor).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
    start = (token * num_heads + head) * 2 * half
    tl.store(output_ptr + start + offsets, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(output_ptr + start + half + offsets, (second * cos + first * sin).to(dtype), mask=mask)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu of the first half of each token's numbers, times the second half."""
    assert gate_up.is_contiguous()
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty(num_tokens, size)
    _silu_and_mul_kernel[(num_tokens, triton.cdiv(size, 1024))](gate_up, output, size, BLOCK=1024)
    return output


@triton.jit
def _silu_and_mul_kernel(gate_up_ptr, output_ptr, size, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    gate = tl.load(gate_up_ptr + token * 2 * size + offsets, mask=mask).to(tl.float32)
    up = tl.load(gate_up_ptr + token * 2 * size + size + offsets, mask=mask).to(tl.float32)
    output = gate * tl.sigmoid(gate) * up
    tl.store(output_ptr + token * size + offsets, output.to(output_ptr.dtype.element_ty), mask=mask)


def sample(logits: Tensor, token_hashes: Tensor, noise_keys: Tensor | None, temperatures: Tensor | None) -> Tensor:
    """sampler.Sampler's draw: argmax of logits [num_rows, vocab_size] + temperature * noise, or -1, int64 [num_rows]."""
    if temperatures is None:
        return find_best(logits)
    num_rows, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, _SAMPLE_PART)
    scores = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_rows, num_parts, dtype=torch.int64, device=logits.device)
    _sample_kernel[(num_rows, num_parts)](
        logits, token_hashes, noise_keys, temperatures, scores, tokens, logits.stride(0), vocab_size, BLOCK=_SAMPLE_PART
    )
    return tokens.gather(1, scores.argmax(-1, keepdim=True)).squeeze(1)


@triton.jit
def _sample_kernel(
    logits_ptr, hashes_ptr, keys_ptr, temperatures_ptr, scores_ptr, tokens_ptr, stride, vocab_size, BLOCK: tl.constexpr
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = part * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < vocab_size
    scores = tl.load(logits_ptr + row * stride + tokens, mask=mask, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures_ptr + row)
    if temperature > 0:
        x = tl.load(hashes_ptr + tokens, mask=mask, other=0).to(tl.uint32, bitcast=True)
        x = x ^ tl.load(keys_ptr + 2 * row).to(tl.uint32, bitcast=True)
        x = (x ^ (x >> 16)) * (tl.load(keys_ptr + 2 * row + 1).to(tl.uint32, bitcast=True) | 1)
        x = ((x ^ (x >> 15)) * 0x2C1B3C6D) >> 1
        uniform = x.to(tl.int32, bitcast=True).to(tl.float32) * (2.0**-31 * (1 - 2.0**-23)) + 2.0**-33
        # -log(1 - uniform): near 0, where 1 - uniform would round the digits away, by its power series.
        series = uniform * (1 + uniform * (1 / 2 + uniform * (1 / 3 + uniform * (1 / 4))))
        scores -= temperature * tl.log(tl.where(uniform < 0.01, series, -tl.log(1 - uniform)))
    # Triton's maxima pass over NaN, torch's argmax over the parts finds it: the token of such a part is -1.
    has_nan = tl.max((scores != scores).to(tl.int32), axis=0) > 0
    best = part * BLOCK + tl.argmax(scores, axis=0)
    num_parts = tl.num_programs(1)
    tl.store(scores_ptr + row * num_parts + part, tl.where(has_nan, float("nan"), tl.max(scores, axis=0)))
    tl.store(tokens_ptr + row * num_parts + part, tl.where(has_nan, -1, best).to(tl.int64))
