"""The C++ kernels are right on this processor, and on lesser ones whose instructions it has too.

Of the lesser instruction sets, one is tested in one dtype, compiled with few optimizations. With
-m sweep, all are tested, compiled as on such a processor.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import cover_pairs
from kernel_helpers import (
    BATCHES,
    DELTA_LENGTHS,
    DELTA_SHAPES,
    DTYPES,
    GATES,
    compare_attention,
    compare_delta_rules,
    make_step,
    needs_compiler,
)
from torch.testing import assert_close

from nanovllm.kernels.cpu import attention as cpp_backend
from nanovllm.kernels.cpu import library
from nanovllm.kernels.cpu.linear import Gate, PrepackedWeight
from nanovllm.layers.quantized import INT4, INT8, QuantizedWeight

pytestmark = needs_compiler
all_gates = pytest.mark.parametrize(
    "kind, activate",
    [(Gate.SILU, F.silu), (Gate.GELU, partial(F.gelu, approximate="tanh"))],
    ids=["silu", "gelu"],
)
# Each with dtypes that take paths of their own there. Without AVX2, panels of quantized weights are
# dequantized, as with AMX.
F32, BF16, F16 = DTYPES
LESSER = {
    "x86-64-v4": [BF16],
    "x86-64-v3": [F16, F32],
    "sandybridge": [BF16],
    "x86-64": [F16, F32],
}
RUNNABLE = {"AVX512": list(LESSER), "AVX2": ["sandybridge", "x86-64"]}


def list_builds():
    """List further compiler flags, each with a dtype."""
    builds = [([], dtype) for dtype in DTYPES]
    processors = RUNNABLE.get(torch.backends.cpu.get_cpu_capability(), [])
    for processor in processors:
        flags = [f"-march={processor}"]
        for dtype in LESSER[processor]:
            builds.append(pytest.param((flags, dtype), marks=pytest.mark.sweep))
    if processors:
        builds.append(([f"-march={processors[1]}", "-O1"], F16))
    return builds


@pytest.fixture(scope="module", params=list_builds(), ids=str)
def dtype(request):
    """The dtype of the kernels, which are compiled for one instruction set."""
    flags, dtype = request.param
    cached = (library.reason_unavailable, library.load)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "FLAGS", library.FLAGS + flags)
        for function in cached:
            function.cache_clear()
        yield dtype
    for function in cached:
        function.cache_clear()


@pytest.mark.parametrize(
    "in_features, out_features, has_bias",
    [(2, 1, True), (30, 64, False), (64, 100, True), (320, 16, False), (4096, 130, True)],
)
def test_prepacked_weight_multiplies_like_a_linear_layer(
    in_features, out_features, has_bias, dtype
):
    torch.manual_seed(0)
    plain = torch.randn(out_features, in_features).to(dtype)
    prepacked = PrepackedWeight(plain)
    bias = torch.randn(out_features).to(dtype) if has_bias else None
    atol = (2e-6 if dtype == torch.float32 else 1e-3) * in_features**0.5
    # 150 rows of 4,096 inputs are more than one pass takes.
    for num_rows in (0, 1, 2, 5, 12, 13, 17, 32, 150):
        x = torch.randn(num_rows, in_features).to(dtype)
        expected = F.linear(x.double(), plain.double(), bias.double() if has_bias else None)
        output = prepacked.multiply(x, bias)
        assert_close(output.double(), expected, atol=atol, rtol=torch.finfo(dtype).eps)
        assert torch.equal(prepacked.multiply(x[:1], bias), output[:1]), "depends on other rows"
        with_gaps = torch.cat((x, x), dim=-1)[:, None, :in_features]
        assert torch.equal(prepacked.multiply(with_gaps, bias), output[:, None])
    ids = torch.tensor([out_features - 1, 0, out_features // 2], dtype=torch.int32)
    assert torch.equal(prepacked.rows(ids), plain[ids])


@all_gates
@pytest.mark.parametrize("in_features, out_features", [(2, 1), (30, 16), (64, 100), (1030, 48)])
def test_gated_weight_computes_swiglu_or_geglu(in_features, out_features, kind, activate, dtype):
    torch.manual_seed(0)
    plain = torch.randn(2 * out_features, in_features).to(dtype)
    prepacked = PrepackedWeight(plain, kind)
    atol, rtol = (1e-5, 1e-5) if dtype == torch.float32 else (1e-3, 8e-3)
    for num_rows in (0, 1, 12, 33, 150):
        x = torch.randn(num_rows, in_features).to(dtype) / in_features**0.5
        gate, up = (x.double() @ plain.double().T).chunk(2, dim=-1)
        output = prepacked.multiply(x).double()
        assert_close(output, activate(gate) * up, atol=atol, rtol=rtol)


SIZES = torch.tensor([6e4, 1e4, 1e3, 1e2, 1.0, 1e-2])  # of inputs; float16 holds all


@pytest.mark.parametrize("num_large", [1, 5, 100, 190])
@pytest.mark.parametrize("scheme", [INT8, INT4], ids=str)
def test_small_inputs_beside_large_ones_keep_their_precision(scheme, num_large, dtype):
    """The weights of the large ones are 0, so all of a product comes from the small ones."""
    torch.manual_seed(0)
    x = torch.randn(40, 200)
    order = torch.randperm(200)
    large = order[:num_large]
    plain = torch.randn(130, 200) * 0.01
    plain[:, large] = 0
    weight = QuantizedWeight.quantize(plain.to(dtype), scheme)
    prepacked = PrepackedWeight(weight)
    ids = torch.arange(130, dtype=torch.int32)
    assert torch.equal(prepacked.rows(ids), weight.dequantize())
    rounded = weight.dequantize().double()
    weight.dtype = torch.float32
    exact = weight.dequantize().double()  # kernels need not round the weight
    # Half of a unit in the last place is the most that rounding an exact product costs.
    limit = torch.finfo(dtype).eps * (0.5 if dtype.itemsize == 2 else 20)
    for smallest in range(1, len(SIZES)):
        spread = x * SIZES[smallest]
        spread[:, large] *= SIZES[torch.arange(num_large) % smallest] / SIZES[smallest]
        spread[::3, large] = x[::3, large] * SIZES[smallest]  # some rows have no large ones
        spread = spread.clamp(-65504, 65504).to(dtype)
        output = prepacked.multiply(spread).double()
        errors = []
        for each in (exact, rounded):
            expected = F.linear(spread.double(), each)
            errors.append((output - expected).norm(dim=-1) / expected.norm(dim=-1))
        assert (torch.minimum(*errors) < limit).all()
        for rows in ([1], [0, 1, 2], list(range(13)), list(range(25)), list(range(2, 39))):
            assert torch.equal(prepacked.multiply(spread[rows]).double(), output[rows])


def multiply_by_numbers(factor, numbers, num_rows, gate=Gate.NONE):
    """Multiply `factor` by each number, in the layout of a weight."""
    weight = torch.stack((numbers, torch.zeros_like(numbers)), dim=-1)
    x = torch.tensor([[factor, 0.0]] * num_rows, dtype=numbers.dtype)
    return PrepackedWeight(weight, gate).multiply(x)


@all_gates
def test_gated_weight_takes_extreme_gates(kind, activate, dtype):
    gates = torch.tensor(GATES, dtype=dtype)
    output = multiply_by_numbers(1.0, torch.cat((gates, torch.ones_like(gates))), 40, kind)
    assert_close(output, activate(gates).expand(40, -1), equal_nan=True)


@pytest.mark.parametrize("factor", [1.0, 20.0, 0.375])
def test_every_float16_is_read_exactly_and_rounded_to_nearest(factor, dtype):
    if dtype != torch.float16:
        pytest.skip("of float16 only")
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    expected = (factor * numbers.float()).half()
    for num_rows in (1, 7):
        output = multiply_by_numbers(factor, numbers, num_rows)
        assert_close(output, expected.expand(num_rows, -1), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "lengths, heads, window",
    cover_pairs(
        [*BATCHES.values(), ([9, 600], [700, 600])],
        [(4, 2, 80), (14, 2, 128), (3, 1, 10)],
        [None, 20, 260],
    ),
    ids=str,
)
def test_attention_matches_the_torch_backend(lengths, heads, window, dtype):
    step = make_step(lengths, heads, 16, dtype, window=window)
    compare_attention(cpp_backend, *step, window)


@torch.inference_mode()
@pytest.mark.parametrize("shape", DELTA_SHAPES, ids=str)
def test_the_delta_rule_matches_the_plain_layer(shape, dtype):
    for lengths in DELTA_LENGTHS:
        compare_delta_rules(lengths, shape, dtype)
