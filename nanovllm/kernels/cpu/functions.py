"""The C++ kernels as functions of tensors: what torch has no single operation for."""

import torch
from torch import Tensor

from nanovllm.batch import SamplingBatch
from nanovllm.kernels.cpu.library import call, load


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """norm.RMSNorm of x [num_tokens, size]."""
    assert x.is_contiguous()
    output = x.new_empty(x.shape)
    num_tokens, size = x.shape
    call(load(x.dtype).rms_norm, x, weight, output, num_tokens, size, eps)
    return output


def cos_and_sin(positions: Tensor, inv_freq: Tensor, attention_factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """rotary.RotaryEmbedding's, of `positions` [num_tokens]: float32, by the library of `dtype`."""
    assert positions.is_contiguous()
    cos, sin = inv_freq.new_empty(2, len(positions), 1, len(inv_freq))
    call(load(dtype).cos_and_sin, positions, inv_freq, attention_factor, cos, sin, len(positions), len(inv_freq))
    return cos, sin


def rotary(x: Tensor, cos: Tensor, sin: Tensor, norm_weight: Tensor | None, eps: float) -> Tensor:
    """rotary.apply_rotary of x [num_tokens, num_heads, head_dim], whose tokens may lie apart."""
    assert x[:1].is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    output = x.new_empty(x.shape)
    num_tokens, num_heads, head_dim = x.shape
    call(
        load(x.dtype).rotary, x, cos, sin, norm_weight, output, num_tokens, x.stride(0), output.stride(0), num_heads,
        head_dim // 2, eps,
    )  # fmt: skip
    return output


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu of the first half of each token's numbers, times the second half."""
    assert gate_up.is_contiguous()
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty(num_tokens, size)
    call(load(gate_up.dtype).silu_and_mul, gate_up, output, num_tokens, size)
    return output


def filter_logits(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """sampler.Sampler.filter without sorting, as the one of kernels/cuda/functions.py."""
    output = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    call(
        load(output.dtype).filter_logits, output, batch.filtered_rows, batch.filtered_temperatures, batch.top_ks, batch.top_ps,
        batch.min_ps, len(batch.filtered_rows), output.shape[1],
    )  # fmt: skip
    return output


def sample(logits: Tensor, token_hashes: Tensor, noise_keys: Tensor | None, temperatures: Tensor | None) -> Tensor:
    """sampler.Sampler's draw: argmax of logits [num_rows, vocab_size] + temperature * noise, or -1, int64 [num_rows]."""
    logits = logits.contiguous()
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    call(load(logits.dtype).sample, logits, token_hashes, noise_keys, temperatures, tokens, *logits.shape)
    return tokens
