"""Rotary position embedding (RoPE, Su et al. 2021): a query and a key meet at an angle that depends on their distance.

Dimension pair i of a head turns by position * inv_freq[i], fast pairs first. How contexts longer than the trained one are
fitted in ("linear", "yarn", "llama3") is only a matter of these frequencies, and of a factor on cos and sin.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class RopeSpec:
    inv_freq: tuple[float, ...]  # [head_dim / 2], radians per position, each a float32
    attention_factor: float = 1.0  # of cos and sin: YaRN's, keeps the attention's temperature

    @classmethod
    def from_base(cls, theta: float, head_dim: int) -> "RopeSpec":
        """The original frequencies. Computed on the CPU: one unit in a GPU's last place is 1.6e-3 rad at position 32k."""
        pairs = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
        return cls(tuple((1.0 / theta**pairs).tolist()))


class RotaryEmbedding(nn.Module):
    inv_freq: Tensor

    def __init__(self, spec: RopeSpec) -> None:
        super().__init__()
        self.attention_factor = spec.attention_factor
        self.register_buffer(
            "inv_freq", torch.tensor(spec.inv_freq, dtype=torch.float32), persistent=False
        )

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [num_tokens, 1, head_dim / 2], computed once per step for all layers."""
        angles = (positions.float()[:, None] * self.inv_freq).unsqueeze(1)
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [num_tokens, num_heads, head_dim] by cos and sin [num_tokens, 1, head_dim / 2].

    A pair is dimension i and i + head_dim / 2, as in Hugging Face models. It turns in float32 and is rounded once.
    """
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
