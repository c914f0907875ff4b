"""RMSNorm (Zhang and Sennrich, 2019)."""

import torch
from torch import Tensor, nn


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


class OnceRoundedRMSNorm(RMSNorm):
    """x / rms(x) * weight, rounded once. An RMSNorm rounds before the product as well."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.normalize(x) * self.weight).to(x.dtype)


class ZeroCenteredRMSNorm(RMSNorm):
    """x / rms(x) * (1 + weight), rounded once."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.normalize(x) * (1.0 + self.weight.float())).to(x.dtype)
