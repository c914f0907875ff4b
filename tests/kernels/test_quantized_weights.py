"""The CPU kernels for quantized weights compute what layers/quantized.py specifies."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import make_batch
from kernel_helpers import CPU, DTYPES, all_dtypes, make_spec, needs_compiler, quantize, randomize
from torch.testing import assert_close

from nanovllm.kernels import kernelize
from nanovllm.kernels.cpu import attention as cpp_backend
from nanovllm.kernels.cpu.decoder import FastDecoderLayers
from nanovllm.kernels.cpu.linear import FastEmbedding, PrepackedWeight
from nanovllm.kernels.cpu.moe import FastExperts
from nanovllm.kernels.cpu.panels import can_prepack
from nanovllm.layers import attention as torch_backend
from nanovllm.layers.quantized import INT4, INT8, QuantizedWeight, Scheme
from nanovllm.models.moe import Experts
from nanovllm.utils.helpers import cdiv

pytestmark = needs_compiler
SCHEMES = [INT8, INT4, Scheme(4, 32), Scheme(4, 96), Scheme(8, 64)]
all_schemes = pytest.mark.parametrize("scheme", SCHEMES, ids=str)


def make_weight(out_features, in_features, scheme, dtype):
    torch.manual_seed(0)
    return QuantizedWeight.quantize(torch.randn(out_features, in_features).to(dtype), scheme)


def relative_error(output, expected):
    expected = expected.double()
    return (output.double() - expected).norm() / expected.norm()


@all_dtypes
@all_schemes
@pytest.mark.parametrize("in_features, out_features", [(64, 100), (200, 34), (1030, 130)])
def test_products_are_those_of_the_dequantized_weight(in_features, out_features, scheme, dtype):
    weight = make_weight(out_features, in_features, scheme, dtype)
    prepacked = PrepackedWeight(weight)
    rounded = weight.dequantize()
    weight.dtype = torch.float32
    # Kernels for 16-bit dtypes need not round the weight.
    exact = weight.dequantize()
    bias = torch.randn(out_features).to(dtype)
    for num_rows in (0, 1, 5, 7, 13, 70, 150):
        x = torch.randn(num_rows, in_features).to(dtype)
        output = prepacked.multiply(x, bias)
        if dtype == torch.float32:
            assert torch.equal(output, PrepackedWeight(rounded).multiply(x, bias))
            assert_close(output, F.linear(x, rounded, bias), atol=1e-4, rtol=1e-6)
            continue
        is_rounded_once = []
        for each in (exact, rounded):
            expected = F.linear(x.double(), each.double(), bias.double())
            rounding = (expected.to(dtype) - expected).norm()
            is_rounded_once.append((output - expected).norm() <= 1.1 * rounding)
        assert any(is_rounded_once)


# The last rows of 512, which are several passes. Further rows make another tile, up to three tiles
# of 12 or six of 6, or let a block of codes be converted once for all tiles.
ROW_COUNTS = (1, 2, 5, 6, 7, 12, 13, 24, 25, 36, 37, 48, 49, 70, 150, 511)


@all_dtypes
@all_schemes
def test_a_row_does_not_depend_on_the_other_rows(scheme, dtype):
    prepacked = PrepackedWeight(make_weight(70, 1030, scheme, dtype))
    x = torch.randn(512, 1030).to(dtype)
    # Of the last row, this leaves what a 16-bit dtype would otherwise round.
    bias = -prepacked.multiply(x[-1:])[0]
    output = prepacked.multiply(x, bias)
    for num_rows in ROW_COUNTS:
        assert torch.equal(prepacked.multiply(x[-num_rows:], bias), output[-num_rows:])


@all_dtypes
@pytest.mark.parametrize("zero", [0, 5, 16])
def test_all_differences_of_codes_and_zeros_are_exact(zero, dtype):
    """Each input selects a column of codes, and the result needs no rounding."""
    for scheme, size in ((Scheme(4, 32), 16), (Scheme(8, 32), 256)):
        codes = torch.arange(size, dtype=torch.uint8).expand(32, -1).contiguous()
        zeros = torch.full((32, cdiv(size, 32)), zero * size // 16)
        weight = QuantizedWeight.from_codes(
            scheme, dtype, codes, torch.full_like(zeros, 0.5, dtype=torch.float32), zeros
        )
        x = torch.eye(size, dtype=dtype)
        expected = (torch.arange(size) - zero * size // 16) / 2
        for num_rows in (1, size):
            output = PrepackedWeight(weight).multiply(x[-num_rows:])
            assert torch.equal(output, expected[-num_rows:, None].to(dtype).expand(-1, 32))


@all_dtypes
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_an_invalid_input_shows_in_all_outputs_of_its_row_only(value, dtype):
    prepacked = PrepackedWeight(make_weight(40, 256, INT8, dtype))
    x = torch.randn(9, 256).to(dtype)
    expected = prepacked.multiply(x)
    x[4, 200] = value
    output = prepacked.multiply(x)
    assert not output[4].isfinite().any()
    others = torch.arange(9) != 4
    assert torch.equal(output[others], expected[others])


@pytest.mark.parametrize("factor", [0.0, 1e-38, 1e-30, 1e30])
def test_inputs_of_any_size_are_multiplied(factor):
    weight = make_weight(40, 256, INT4, torch.bfloat16)
    x = (torch.randn(2, 256) * factor).bfloat16()
    expected = F.linear(x.double(), weight.dequantize().double())
    output = PrepackedWeight(weight).multiply(x)
    assert_close(output.double(), expected, atol=max(0.1 * factor, 1e-28), rtol=1e-2)


def test_groups_that_kernels_do_not_know_are_not_prepacked():
    for group_size, is_known in ((32, True), (96, True), (128, True), (16, False), (256, False)):
        weight = QuantizedWeight.quantize(torch.ones(4, 256), Scheme(8, group_size))
        assert can_prepack(weight) == is_known
    for dtype in DTYPES:
        weight = QuantizedWeight.quantize(torch.ones(4, 31, dtype=dtype), INT8)
        assert can_prepack(weight) == (dtype == torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", [INT8, INT4], ids=str)
def test_a_quantized_model_matches_plain_layers(scheme, dtype):
    """Queries have 40 numbers. The last layer skips a panel of them for tokens without logits."""
    spec = make_spec(dtype, head_dim=20, hidden_size=160, intermediate_size=136, qk_norm=True)
    plain = quantize(randomize(spec.make_model(torch_backend)), scheme)
    fused = quantize(randomize(spec.make_model(cpp_backend)), scheme)
    kernelize(fused, CPU, dtype)
    assert type(fused.model.layers) is FastDecoderLayers
    assert type(fused.model.embed_tokens) is FastEmbedding
    num_tokens = 50
    tokens = torch.arange(num_tokens, dtype=torch.int32)
    batch = make_batch([num_tokens], [num_tokens], torch.arange(4, dtype=torch.int32)[None])
    batch = replace(batch, input_ids=tokens, positions=tokens, slot_mapping=tokens)
    caches = [torch.zeros(2, 4, 16, 1, 20, dtype=dtype) for _ in range(2 * spec.num_layers)]
    plain_caches, fused_caches = caches[: spec.num_layers], caches[spec.num_layers :]
    limit = 1e-5 if dtype == torch.float32 else 0.03
    with torch.inference_mode():
        hidden = plain(batch, plain_caches)
        logits = plain.compute_logits(hidden)
        pairs = [(fused(batch, fused_caches), hidden), (fused.compute_logits(hidden), logits)]
        for output, expected in [*pairs, *zip(fused_caches, plain_caches)]:
            assert relative_error(output, expected) < limit


@all_dtypes
def test_quantized_experts_match_plain_ones(dtype):
    experts = randomize(Experts(num_experts=3, hidden_size=40, width=24, dtype=dtype))
    quantize(experts, INT4)
    x = torch.randn(5, 40).to(dtype)
    chosen = torch.tensor([[0, 2], [2, 1], [0, 1], [1, 0], [2, 0]])
    weights = torch.rand(5, 2)
    expected = experts(x, chosen, weights)
    kernelize(experts, CPU, dtype)
    assert type(experts) is FastExperts
    limit = 1e-6 if dtype == torch.float32 else 0.01
    assert relative_error(experts(x, chosen, weights), expected) < limit
