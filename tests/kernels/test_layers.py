"""Optimized layers, in C++ and in Triton, compute the same as the plain layers they replace."""

import pytest
import torch
from kernel_helpers import (
    GATES,
    all_dtypes,
    all_kernels,
    make_layers,
    needs_compiler,
    optimize,
)
from torch import nn

from nanovllm.layers.norm import RMSNorm
from nanovllm.models.decoder import MLP

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def check_close(output, expected):
    limit = TOLERANCE[expected.dtype]
    assert output.dtype == expected.dtype
    torch.testing.assert_close(output, expected, atol=limit, rtol=limit, equal_nan=True)


@all_kernels
@all_dtypes
@pytest.mark.parametrize("num_tokens", [0, 1, 70])
def test_optimized_layers_match_plain_ones(num_tokens, dtype, language, device):
    if device == "cpu" and language == "triton":
        num_tokens = min(num_tokens, 5)  # each is a program, and the interpreter is slow
    layers = make_layers(dtype, device)
    optimized = optimize(make_layers(dtype, device), language, dtype)
    # MLPs on a CPU need projections, see test_instruction_sets.py.
    replaced = {RMSNorm} if language == "cpp" else {RMSNorm, MLP}
    assert not {type(layer) for layer in optimized.modules()} & replaced
    torch.manual_seed(0)
    wide = torch.randn(num_tokens, 300).to(device, dtype)
    heads = wide[:, 100:200].unflatten(-1, (5, 20))  # tokens are not adjacent
    strided = wide.repeat(1, 4).view(-1, 2, 600)[..., ::2]
    angles = torch.randn(num_tokens, 1, 10).to(device)

    def compute(layers):
        attention = layers["attention"]
        outputs = [layers["mlp"](wide * 5)]
        for name in ("norm", "zero_centered", "once_rounded"):
            outputs += [layers[name](wide), layers[name](strided)]
        for part in (angles, angles[..., :7].contiguous()):
            cos_sin = (part.cos(), part.sin())
            for norm in (None, attention.q_norm):
                outputs.append(attention.norm_and_rotate(heads, norm, cos_sin))
        return outputs

    with torch.device("meta"):  # the caller's default device has no effect
        outputs = compute(optimized)
    for output, expected in zip(outputs, compute(layers)):
        assert output.is_contiguous()
        check_close(output, expected)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["norm", "zero_centered", "once_rounded"])
def test_norms_round_as_plain_ones(name, dtype):
    """Sums in another order change few results. Another rounding would change every third one."""
    torch.manual_seed(0)
    x = torch.randn(70, 300).to(dtype)
    output = optimize(make_layers(dtype, "cpu"), "cpp", dtype)[name](x)
    assert (output != make_layers(dtype, "cpu")[name](x)).float().mean() < 0.01


@all_kernels
@all_dtypes
def test_extreme_numbers_give_the_same_infinities_and_nans(dtype, language, device):
    gates = torch.tensor(GATES, dtype=dtype, device=device)
    gate_up = torch.cat((gates, torch.ones_like(gates)))[None]
    inf, nan = torch.inf, torch.nan
    pairs = [[0.0, 0.0], [1e30, -2e30], [1e38, 1.0], [1e-30, 0.0], [inf, 1.0], [nan, 1.0]]
    rows = torch.tensor(pairs).to(device, dtype)
    cos = torch.ones(len(rows), 1, 10, device=device)

    def compute(layers):
        attention = layers["attention"]
        for norm in (layers["norm"], attention.q_norm):
            nn.init.ones_(norm.weight)
            norm.eps = 1e-6
        heads = rows.repeat(1, 10)[:, None]
        rotated = attention.norm_and_rotate(heads, attention.q_norm, (cos, cos * 0.5))
        return [layers["mlp"](gate_up), layers["norm"](rows.repeat(1, 150)), rotated]

    outputs = compute(optimize(make_layers(dtype, device), language, dtype))
    torch.testing.assert_close(outputs, compute(make_layers(dtype, device)), equal_nan=True)
