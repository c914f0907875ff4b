"""What random models in float32 do not show of norms and rotary embeddings."""

import pytest
import torch

from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import apply_rotary

DTYPES = [torch.bfloat16, torch.float16]


def test_zeros_stay_zeros():
    norm = RMSNorm(4, eps=1e-6, dtype=torch.float32)
    assert not norm.normalize(torch.zeros(1, 4)).any()


def test_eps_is_added_to_the_mean_of_squares():
    norm = RMSNorm(4, eps=1e-6, dtype=torch.float32)
    normalized = norm.normalize(torch.full((1, 4), 1e-3))
    torch.testing.assert_close(normalized, torch.full((1, 4), 0.5**0.5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_compute_in_float32(dtype):
    """The squares of 300 and more have no room in float16."""
    norm = RMSNorm(64, eps=1e-6, dtype=dtype)
    x = (torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * 300).to(dtype)
    normalized = norm.normalize(x)
    assert normalized.dtype == torch.float32
    assert torch.equal(normalized, norm.normalize(x.float()))


def test_partial_rope_rotates_the_first_dimensions():
    """By a quarter of a turn. Dimensions 0 and 2 are a pair, 1 and 3 another one."""
    x = torch.arange(1.0, 7.0).view(1, 1, 6)
    cos, sin = torch.zeros(1, 1, 2), torch.ones(1, 1, 2)
    assert apply_rotary(x, cos, sin).tolist() == [[[-3.0, -4.0, 1.0, 2.0, 5.0, 6.0]]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope_computes_in_float32_and_rounds_once(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 4, 16, generator=generator).to(dtype)
    angles = torch.rand(64, 1, 8, generator=generator) * 6
    expected = apply_rotary(x.float(), angles.cos(), angles.sin()).to(dtype)
    assert torch.equal(apply_rotary(x, angles.cos(), angles.sin()), expected)
