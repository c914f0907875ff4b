"""RMSNorm (Zhang and Sennrich, 2019)."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nanovllm.layers.linear import Target
from nanovllm.layers.tensor_parallel import TensorParallel


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension.

    The mean of squares is computed in float32, because bfloat16 is too coarse for it.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))

    def normalize(self, x: Tensor) -> Tensor:
        """Compute x / rms(x) in float32."""
        wide = x.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.normalize(x).to(x.dtype)


class ZeroCenteredRMSNorm(RMSNorm):
    """x / rms(x) * (1 + weight), rounded once."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.normalize(x) * (1.0 + self.weight.float())).to(x.dtype)


class ParallelRMSNorm(RMSNorm):
    """RMSNorm over features that are sharded over the ranks in whole units, such as heads."""

    def __init__(
        self, size: int, eps: float, dtype: torch.dtype, tp: TensorParallel, unit: int
    ) -> None:
        shard_size, self.start = tp.divide(size, unit)
        super().__init__(shard_size, eps, dtype)
        self.tp = tp
        self.full_size = size

    def targets(self, name: str) -> Iterator[tuple[str, Target]]:
        yield f"{name}.weight", Target(self.weight, 0, self.start, self.full_size)

    def normalize(self, x: Tensor) -> Tensor:
        """Average the means of all ranks. If ranks share heads, every head counts as often."""
        wide = x.float()
        means = self.tp.all_reduce(wide.square().mean(-1, keepdim=True))
        return wide * torch.rsqrt(means / self.tp.size + self.eps)
