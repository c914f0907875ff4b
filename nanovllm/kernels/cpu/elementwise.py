"""RMSNorm, RoPE, SwiGLU and GeGLU in C++ (layers.h)."""

from types import NoneType
from typing import ClassVar

import torch
from torch import Tensor

from nanovllm.kernels.changes import has_parts, list_hooks
from nanovllm.kernels.cpu.declarations import Norm, Struct
from nanovllm.kernels.cpu.library import load
from nanovllm.kernels.cpu.panels import can_prepack
from nanovllm.kernels.cpu.prepacked import Gate, PrepackedWeight
from nanovllm.kernels.optimized_layer import OptimizedLayer
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.layers.norm import RMSNorm, ZeroCenteredRMSNorm
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.layers.tensor_parallel import TensorParallel
from nanovllm.models.decoder import MLP, Attention, CosSin
from nanovllm.models.gemma3 import GeluMLP


def describe_norm(norm: RMSNorm | None) -> Struct:
    """Describe a norm for C++. Without one, the weight is null."""
    if norm is None:
        return Norm(weight=None, eps=0.0, is_zero_centered=False)
    is_zero_centered = isinstance(norm, ZeroCenteredRMSNorm)
    return Norm(weight=norm.weight, eps=norm.eps, is_zero_centered=is_zero_centered)


def run_on_one_rank(*linears: RowParallelLinear) -> bool:
    """Return whether there is nothing to reduce over ranks."""
    return all([type(each.tp) is TensorParallel and each.tp.size == 1 for each in linears])


class FastRMSNorm(OptimizedLayer, RMSNorm):
    replaces: ClassVar[type[RMSNorm]] = RMSNorm

    def convert(self) -> bool:
        return self.weight.dtype == self.dtype and self.weight.is_contiguous()

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        assert x.shape[-1:] == self.weight.shape
        output = torch.empty_like(x)
        size = len(self.weight)
        num_rows = x.numel() // size
        is_zero_centered = isinstance(self, ZeroCenteredRMSNorm)
        compute = load(x.dtype).rms_norm
        compute(x, self.weight, output, num_rows, size, self.eps, is_zero_centered)
        return output


class FastZeroCenteredRMSNorm(FastRMSNorm, ZeroCenteredRMSNorm):
    replaces = ZeroCenteredRMSNorm


NORMS = (FastRMSNorm, FastZeroCenteredRMSNorm)


class FastRotaryEmbedding(OptimizedLayer, RotaryEmbedding):
    replaces = RotaryEmbedding

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
    parts: ClassVar = {"q_norm": (*NORMS, NoneType), "k_norm": (*NORMS, NoneType)}

    def norm_and_rotate(self, heads: Tensor, norm: RMSNorm | None, cos_sin: CosSin) -> Tensor:
        if any(self.hooks) or 2 * cos_sin[0].shape[-1] != heads.shape[-1]:
            return super().norm_and_rotate(heads, norm, cos_sin)
        assert norm is None or norm.weight.shape == heads.shape[-1:]
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
            isinstance(norm, ZeroCenteredRMSNorm),
        )
        return output


class FastMLP(OptimizedLayer, MLP):
    replaces: ClassVar[type[MLP]] = MLP
    GATE: ClassVar[Gate] = Gate.SILU

    gate_up: PrepackedWeight | None  # in place of gate_up_proj, applies the gate, too

    def convert(self) -> bool:
        self.gate_up = None
        projection = self.gate_up_proj
        is_plain = has_parts(projection, {"": ColumnParallelLinear}) and projection.bias is None
        is_hooked = any(list_hooks(projection))
        if is_plain and not is_hooked and can_prepack(projection.weight):
            self.gate_up = PrepackedWeight(projection.weight, self.GATE)
            del self.gate_up_proj
        return True

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_up is not None:
            return self.down_proj(self.gate_up.multiply(x))
        gate_up = self.gate_up_proj(x)
        output = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        load(gate_up.dtype).activate_and_mul(gate_up, output, *output.shape, self.GATE)
        return self.down_proj(output)


class FastGeluMLP(FastMLP, GeluMLP):
    replaces = GeluMLP
    GATE = Gate.GELU
