"""Rotary position embedding (RoPE, Su et al. 2021) and how contexts longer than the trained one are fitted in.

Dimension pair i of a head turns by position * inv_freq[i]. "linear" slows all pairs down by a factor. "yarn" (Peng et
al. 2023) slows only the pairs that turn too slowly to have seen a full circle in training, blends in between, and
scales cos and sin to keep the attention's temperature. "llama3" (Llama 3.1, 2024) slows the same pairs, and blends by
wavelength.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class RopeSpec:
    """`theta` is the base of the frequencies; what `rope_type` ignores keeps its default."""

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    original_max_len: int = 0  # positions seen in training
    attention_factor: float = 1.0  # of cos and sin
    beta_fast: float = 32.0  # circles in original_max_len above which a pair is left alone
    beta_slow: float = 1.0  # and below which it is slowed down in full
    truncate: bool = True  # round the pairs where the two happen outwards
    low_freq_factor: float = 1.0  # llama3: circles in original_max_len below which a pair is slowed down in full
    high_freq_factor: float = 4.0  # and above which it is left alone


class RotaryEmbedding(nn.Module):
    def __init__(self, head_dim: int, spec: RopeSpec) -> None:
        super().__init__()
        pairs = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        inv_freq = 1.0 / spec.theta**pairs
        if spec.rope_type == "linear":
            inv_freq = inv_freq / spec.factor
        elif spec.rope_type == "yarn":
            kept = _share_kept(head_dim, spec).to(inv_freq.device)
            inv_freq = inv_freq / spec.factor * (1 - kept) + inv_freq * kept
        elif spec.rope_type == "llama3":
            circles = spec.original_max_len * inv_freq / (2 * math.pi)
            kept = ((circles - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)).clamp(0, 1)
            inv_freq = inv_freq / spec.factor * (1 - kept) + inv_freq * kept
        self.attention_factor = spec.attention_factor
        self.register_buffer("inv_freq", inv_freq, persistent=False)  # float32 [head_dim / 2]

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [num_tokens, 1, head_dim / 2], computed once per step for all layers."""
        angles = (positions.float()[:, None] * self.inv_freq).unsqueeze(1)
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor


def _share_kept(head_dim: int, spec: RopeSpec) -> Tensor:
    """Per pair, how much of its own frequency YaRN leaves it: 1 for fast pairs, 0 for slow ones, a ramp between."""

    def pair_that_turns(circles: float) -> float:
        return head_dim * math.log(spec.original_max_len / (circles * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = pair_that_turns(spec.beta_fast), pair_that_turns(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 * (low == high)  # no division by zero below
    return 1 - ((torch.arange(head_dim // 2).float() - low) / (high - low)).clamp(0, 1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [num_tokens, num_heads, head_dim] by cos and sin [num_tokens, 1, head_dim / 2].

    A pair is dimension i and i + head_dim / 2, as in Hugging Face models. It turns in float32 and is rounded once.
    """
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
