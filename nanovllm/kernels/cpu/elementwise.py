"""RMSNorm and RoPE in C++ (layers.h), and MLPs."""

from enum import IntEnum
from types import NoneType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nanovllm.kernels.cpu.declarations import Norm, Struct
from nanovllm.kernels.cpu.library import load
from nanovllm.kernels.cpu.panels import can_prepack
from nanovllm.kernels.cpu.prepacked import Gate, PrepackedWeight
from nanovllm.kernels.optimized_layer import OptimizedLayer, has_parts, list_hooks
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.layers.norm import RMSNorm, ZeroCenteredRMSNorm
from nanovllm.layers.tensor_parallel import TensorParallel
from nanovllm.models.decoder import MLP, Attention, CosSin
from nanovllm.models.gemma3 import GeluMLP
from nanovllm.models.olmo import HeadsNorm, OlmoNorm


def run_on_one_rank(*linears: RowParallelLinear) -> bool:
    """Return whether there is nothing to reduce over ranks."""
    return all([type(each.tp) is TensorParallel and each.tp.size == 1 for each in linears])


class NormKind(IntEnum):
    """How a norm applies its weight, as in layers.h."""

    ROUNDED_TWICE = 0  # before the product as well
    ROUNDED_ONCE = 1
    ZERO_CENTERED = 2  # multiplies by 1 + weight, and rounds once


class FastRMSNorm(OptimizedLayer, RMSNorm):
    replaces: ClassVar[type[RMSNorm]] = RMSNorm
    KIND = NormKind.ROUNDED_TWICE

    def convert(self) -> bool:
        return self.weight.dtype == self.dtype and self.weight.is_contiguous()

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        assert x.shape[-1:] == self.weight.shape
        output = torch.empty_like(x)
        size = len(self.weight)
        num_rows = x.numel() // size
        compute = load(x.dtype).rms_norm
        compute(x, self.weight, output, num_rows, size, self.eps, self.KIND)
        return output


class FastZeroCenteredRMSNorm(FastRMSNorm, ZeroCenteredRMSNorm):
    replaces = ZeroCenteredRMSNorm
    KIND = NormKind.ZERO_CENTERED


class FastOlmoNorm(FastRMSNorm, OlmoNorm):
    replaces = OlmoNorm
    KIND = NormKind.ROUNDED_ONCE


class FastHeadsNorm(FastRMSNorm, HeadsNorm):
    replaces = HeadsNorm
    KIND = NormKind.ROUNDED_ONCE

    def convert(self) -> bool:
        """The C++ code has the mean of one rank."""
        return self.tp.size == 1 and super().convert()


NORMS = (FastRMSNorm, FastZeroCenteredRMSNorm, FastOlmoNorm, FastHeadsNorm, NoneType)


def describe_norm(norm: Any) -> Struct:
    """Describe an optimized norm for C++. Without one, the weight is null."""
    if norm is None or isinstance(norm, nn.Identity):
        return Norm()
    return Norm(weight=norm.weight, size=len(norm.weight), eps=norm.eps, kind=norm.KIND)


class FastAttention(OptimizedLayer, Attention):
    replaces = Attention
    parts: ClassVar = {"q_norm": NORMS, "k_norm": NORMS}

    def norm_and_rotate(self, heads: Tensor, norm: RMSNorm | None, cos_sin: CosSin) -> Tensor:
        fused = norm if isinstance(norm, NORMS) and not any(self.hooks) else None
        if norm is not None and fused is None:
            heads = norm(heads).contiguous()
        num_tokens, num_heads, head_dim = heads.shape
        half = cos_sin[0].shape[-1]
        assert 2 * half <= head_dim
        assert fused is None or len(fused.weight) == head_dim
        assert heads[:1].is_contiguous()  # the tokens need not be adjacent
        output = heads.new_empty(heads.shape)
        described = describe_norm(fused)
        load(heads.dtype).rotary(
            heads.data_ptr(),
            *cos_sin,
            described.weight,
            described.eps,
            described.kind,
            output,
            num_tokens,
            heads.stride(0),
            output.stride(0),
            num_heads,
            head_dim,
            half,
        )
        return output


class FastMLP(OptimizedLayer, MLP):
    replaces = MLP
    GATE = Gate.SILU

    gate_up: PrepackedWeight  # in place of gate_up_proj, applies the gate, too

    def convert(self) -> bool:
        projection = self.gate_up_proj
        is_plain = has_parts(projection, {"": ColumnParallelLinear}) and projection.bias is None
        if not is_plain or any(list_hooks(projection)) or not can_prepack(projection.weight):
            return False
        self.gate_up = PrepackedWeight(projection.weight, self.GATE)
        del self.gate_up_proj
        return True

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_up.multiply(x))


class FastGeluMLP(FastMLP, GeluMLP):
    replaces = GeluMLP
    GATE = Gate.GELU
