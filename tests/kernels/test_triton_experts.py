"""Experts in Triton compute the same as models/moe.py, with shapes that do not depend on values."""

import pytest
import torch
from conftest import DEVICE, ON_GPU
from kernel_helpers import LaunchRecorder, needs_triton, optimize, quantize, randomize

from nanovllm.layers.quantized import INT8
from nanovllm.models.moe import Experts

pytestmark = needs_triton
moe = pytest.importorskip("nanovllm.kernels.cuda.moe")
decoder = pytest.importorskip("nanovllm.kernels.cuda.decoder")
# The interpreter multiplies bfloat16 incorrectly.
DTYPES = [torch.float16] + [torch.bfloat16] * ON_GPU
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of values around 1


def make_experts(dtype, hidden_size=70, num_experts=5, expert_size=35):
    """Make experts whose sizes do not fill tiles, always with the same weights."""
    return randomize(Experts(num_experts, hidden_size, expert_size, dtype)).to(DEVICE)


def make_inputs(num_tokens, dtype):
    """Make x, two experts of each token, and their weights. Equal arguments give equal numbers."""
    random = torch.Generator().manual_seed(num_tokens)
    x = 0.2 * torch.randn(num_tokens, 70, generator=random)
    weights, chosen = torch.rand(num_tokens, 5, generator=random).topk(2)
    return x.to(DEVICE, dtype), chosen.to(DEVICE), weights.to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_match_plain_ones(dtype):
    """With small and large tiles, several of an expert, and experts that get no token or all."""
    plain = make_experts(dtype)
    experts = optimize(make_experts(dtype), "triton", dtype)
    assert type(experts) is moe.FastExperts
    for num_tokens in (1, 20, 70):
        x, chosen, weights = make_inputs(num_tokens, dtype)
        for each in (chosen, torch.tensor([3, 1], device=DEVICE).expand_as(chosen)):
            expected = plain(x, each, weights)
            limit = TOLERANCE[dtype]
            output = experts(x, each, weights)
            torch.testing.assert_close(output, expected, atol=limit, rtol=limit)


@pytest.mark.parametrize("num_tokens", [20, 50])
def test_a_token_does_not_depend_on_others(num_tokens):
    experts = optimize(make_experts(torch.float16), "triton", torch.float16)
    x, chosen, weights = make_inputs(num_tokens, torch.float16)
    expected = experts(x, chosen, weights)
    x[3:] = torch.nan
    output = experts(x, chosen.roll(1, 1), weights.roll(1, 1))
    assert torch.equal(output[:3], expected[:3])
    assert output[3:].isnan().all()


def test_shapes_do_not_depend_on_values(monkeypatch):
    """With tensors that have no values, all launches are known. They have a program per tile."""
    experts = optimize(make_experts(torch.float16), "triton", torch.float16).to("meta")
    experts.bounds = experts.bounds.to("meta")
    grids = []

    def record(kernel, grid, *args, **constants):
        grids.append(grid)

    for module, name in ((moe, "multiply_experts_kernel"), (decoder, "silu_and_mul_kernel")):
        monkeypatch.setattr(module, name, LaunchRecorder(name, record))
    for num_tokens in (1, 32, 33, 100):
        inputs = [each.to("meta") for each in make_inputs(num_tokens, torch.float16)]
        assert experts(*inputs).shape == (num_tokens, 70)
    tiles = [tiles for _, tiles in grids]
    assert tiles == [2, 1, 2, 9, 1, 9, 6, 1, 6, 8, 1, 8]


def test_experts_in_float32_and_quantized_ones_stay():
    plain = make_experts(torch.float32)
    assert type(optimize(plain, "triton", torch.float32)) is Experts
    quantized = quantize(make_experts(torch.float16, 128, 5, 64), INT8)
    assert type(optimize(quantized, "triton", torch.float16)) is Experts
