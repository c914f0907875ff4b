"""RMSNorm in C++ (layers.h)."""

from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels.cpu.declarations import Norm, Struct
from nanovllm.kernels.cpu.library import load
from nanovllm.kernels.optimized_layer import OptimizedLayer
from nanovllm.layers.norm import OnceRoundedRMSNorm, RMSNorm, ZeroCenteredRMSNorm


class NormKind(IntEnum):
    """How a norm applies its weight, as in layers.h."""

    ROUNDED_TWICE = 0  # before the product as well
    ROUNDED_ONCE = 1
    ZERO_CENTERED = 2  # multiplies by 1 + weight, and rounds once


class FastRMSNorm(OptimizedLayer, RMSNorm):
    KIND = NormKind.ROUNDED_TWICE

    def convert(self) -> bool:
        return self.weight.dtype == self.dtype and self.weight.is_contiguous()

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        size = len(self.weight)
        assert x.shape[-1] == size
        output = torch.empty_like(x)
        load(x.dtype).rms_norm(x, describe_norm(self), output, x.numel() // size)
        return output


class FastZeroCenteredRMSNorm(FastRMSNorm, ZeroCenteredRMSNorm):
    KIND = NormKind.ZERO_CENTERED


class FastOnceRoundedRMSNorm(FastRMSNorm, OnceRoundedRMSNorm):
    KIND = NormKind.ROUNDED_ONCE


NORMS = (FastRMSNorm, FastZeroCenteredRMSNorm, FastOnceRoundedRMSNorm)


def describe_norm(norm: Any) -> Struct:
    """Describe an optimized norm for C++. Without one, the weight is null."""
    if norm is None:
        return Norm()
    return Norm(norm, size=len(norm.weight), kind=norm.KIND)
