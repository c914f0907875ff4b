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

    struct: Struct  # what C++ functions take

    def convert(self) -> bool:
        if self.weight.dtype != self.dtype or not self.weight.is_contiguous():
            return False
        self.struct = Norm(self, size=len(self.weight), kind=self.KIND)
        return True

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        size = len(self.weight)
        assert x.shape[-1] == size
        output = torch.empty_like(x)
        load(x.dtype).rms_norm(x, self.struct, output, x.numel() // size)
        return output


class FastZeroCenteredRMSNorm(FastRMSNorm, ZeroCenteredRMSNorm):
    KIND = NormKind.ZERO_CENTERED


class FastOnceRoundedRMSNorm(FastRMSNorm, OnceRoundedRMSNorm):
    KIND = NormKind.ROUNDED_ONCE


NORMS = (FastRMSNorm, FastZeroCenteredRMSNorm, FastOnceRoundedRMSNorm)


def describe_norm(norm: Any) -> Struct:
    """Describe an optimized norm for C++. Without one, the weight is null."""
    return Norm() if norm is None else norm.struct
