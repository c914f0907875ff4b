"""Optimized layers for CPUs, in C++. Each replaces several passes of torch over the same data.

prepacked.py has the layers with GEMMs, and fused_layers.py runs all decoder layers in one C++ call.
"""

from typing import ClassVar

import torch
from torch import Tensor

from nanovllm.batch import Filters, Noise
from nanovllm.kernels import OptimizedLayer, has_plain_norms
from nanovllm.kernels.cpu.fused_layers import FusedLayers
from nanovllm.kernels.cpu.gated_delta import FastDeltaLayer, FastGatedDeltaRule
from nanovllm.kernels.cpu.library import load
from nanovllm.kernels.cpu.library import reason_unavailable as reason_unavailable
from nanovllm.kernels.cpu.prepacked import (
    PrepackedColumnParallelLinear,
    PrepackedEmbedding,
    PrepackedExperts,
    PrepackedRowParallelLinear,
)
from nanovllm.kernels.sampler import OptimizedSampler
from nanovllm.layers.norm import RMSNorm, ZeroCenteredRMSNorm
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.models.decoder import MLP, Attention, CosSin


class FastRMSNorm(OptimizedLayer, RMSNorm):
    replaces: ClassVar[type[RMSNorm]] = RMSNorm
    IS_ZERO_CENTERED: ClassVar[bool] = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        output = torch.empty_like(x)
        size = len(self.weight)
        num_rows = x.numel() // size
        compute = load(x.dtype).rms_norm
        compute(x, self.weight, output, num_rows, size, self.eps, self.IS_ZERO_CENTERED)
        return output


class FastZeroCenteredRMSNorm(FastRMSNorm, ZeroCenteredRMSNorm):
    replaces = ZeroCenteredRMSNorm
    IS_ZERO_CENTERED = True


class FastRotaryEmbedding(OptimizedLayer, RotaryEmbedding):
    replaces = RotaryEmbedding

    inv_freq: Tensor

    def forward(self, positions: Tensor) -> CosSin:
        assert positions.dtype == torch.int32
        num_tokens, half = len(positions), len(self.inv_freq)
        cos, sin = self.inv_freq.new_empty(2, num_tokens, 1, half)
        # The library of the model's dtype, because that of float32 may not be compiled.
        compute = load(self.dtype).cos_and_sin
        compute(positions, self.inv_freq, self.attention_factor, cos, sin, num_tokens, half)
        return cos, sin


class FastAttention(OptimizedLayer, Attention):
    replaces = Attention

    def convert(self) -> bool:
        return has_plain_norms(self)

    def norm_and_rotate(self, heads: Tensor, norm: RMSNorm | None, cos_sin: CosSin) -> Tensor:
        assert heads[:1].is_contiguous()  # the tokens need not be adjacent
        output = heads.new_empty(heads.shape)
        num_tokens, num_heads, head_dim = heads.shape
        load(heads.dtype).rotary(
            heads.data_ptr(),
            *cos_sin,
            norm.weight if norm is not None else None,
            output,
            num_tokens,
            heads.stride(0),
            output.stride(0),
            num_heads,
            head_dim // 2,
            norm.eps if norm is not None else 0.0,
        )
        return output


class FastMLP(OptimizedLayer, MLP):
    replaces = MLP

    def forward(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up_proj(x)
        output = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        load(gate_up.dtype).silu_and_mul(gate_up, output, *output.shape)
        return self.down_proj(output)


class FastSampler(OptimizedSampler):
    """Filters without sorting, like the Triton kernel.

    Penalties and filters return float32. The library of the model's dtype reads these logits too.
    """

    def filter(self, logits: Tensor, filters: Filters) -> Tensor:
        logits = logits.contiguous()
        output = torch.empty_like(logits, dtype=torch.float32)
        num_rows, vocab_size = logits.shape
        load(self.dtype).filter_logits(
            logits,
            self._is_float32(logits),
            output,
            filters.rows,
            filters.temperatures,
            filters.top_ks,
            filters.top_ps,
            filters.min_ps,
            num_rows,
            vocab_size,
            len(filters.rows),
        )
        return output

    def draw(self, logits: Tensor, noise: Noise | None) -> Tensor:
        logits = logits.contiguous()
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        load(self.dtype).sample(
            logits,
            self._is_float32(logits),
            self.token_hashes,
            noise.keys if noise is not None else None,
            noise.temperatures if noise is not None else None,
            tokens,
            *logits.shape,
        )
        return tokens

    def _is_float32(self, logits: Tensor) -> bool:
        assert logits.dtype in (self.dtype, torch.float32)
        return logits.dtype == torch.float32


OPTIMIZED_LAYERS: list[type[OptimizedLayer]] = [
    FastRMSNorm,
    FastZeroCenteredRMSNorm,
    FastRotaryEmbedding,
    FastAttention,
    FastMLP,
    FastSampler,
    FastGatedDeltaRule,
    FastDeltaLayer,
    FusedLayers,
    PrepackedColumnParallelLinear,
    PrepackedRowParallelLinear,
    PrepackedEmbedding,
    PrepackedExperts,
]
