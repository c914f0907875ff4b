"""What random models do not show of norms and rotary embeddings."""

import torch

from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import apply_rotary


def test_zeros_stay_zeros():
    norm = RMSNorm(4, eps=1e-6, dtype=torch.float32)
    assert not norm.normalize(torch.zeros(1, 4)).any()


def test_partial_rope_rotates_the_first_dimensions():
    """By a quarter of a turn. Dimensions 0 and 2 are a pair, 1 and 3 another one."""
    x = torch.arange(1.0, 7.0).view(1, 1, 6)
    cos, sin = torch.zeros(1, 1, 2), torch.ones(1, 1, 2)
    assert apply_rotary(x, cos, sin).tolist() == [[[-3.0, -4.0, 1.0, 2.0, 5.0, 6.0]]]
