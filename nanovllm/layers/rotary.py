"""Rotary position embedding (RoPE, Su et al. 2021).

Dimension pair i of a head is rotated by position * inv_freq[i], so that the score of a query and a
key depends on their distance. The variants for longer contexts ("linear", "yarn", "llama3",
"longrope") differ only in these frequencies and in a factor on cos and sin. Frequencies of 0 rotate
nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class RopeSpec:
    """Frequencies and scale of one RoPE variant."""

    # float32 [head_dim / 2], or fewer for partial RoPE, in radians per position.
    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0  # factor of YaRN and longrope on cos and sin

    @classmethod
    def from_base(cls, theta: float, head_dim: int) -> "RopeSpec":
        """Compute the original frequencies, on the CPU.

        A GPU rounds differently, and one unit in the last place is up to 2.0e-3 rad at position
        32,768.
        """
        pairs = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        return cls(tuple((1.0 / theta**pairs).tolist()))


class RotaryEmbedding(nn.Module):
    """Computes cos and sin of the positions of a step, once for all layers."""

    inv_freq: Tensor

    def __init__(self, spec: RopeSpec) -> None:
        super().__init__()
        self.attention_factor = spec.attention_factor
        # Models are made on the device "meta", where numbers would be lost.
        inv_freq = torch.tensor(spec.inv_freq, dtype=torch.float32, device="cpu")
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each float32 [num_tokens, 1, len(inv_freq)]."""
        angles = (positions.float()[:, None] * self.inv_freq).unsqueeze(1)
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [num_tokens, num_heads, head_dim] by cos and sin [num_tokens, 1, half].

    A pair is dimension i and i + half, as in Hugging Face models. If half is less than
    head_dim / 2, only the first dimensions are rotated (partial RoPE). The result is computed in
    float32 and rounded once.
    """
    half = cos.shape[-1]
    first, second, rest = x.float().tensor_split((half, 2 * half), dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin, rest)
    return torch.cat(rotated, dim=-1).to(x.dtype)
