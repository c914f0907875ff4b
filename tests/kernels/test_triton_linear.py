"""Linear layers in Triton compute the same as the plain layers they replace."""

import pytest
import torch
from conftest import DEVICE, ON_GPU
from kernel_helpers import needs_triton, optimize, quantize, randomize, triton_layers

from nanovllm.layers.embedding import Embedding
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.layers.quantized import Scheme

pytestmark = needs_triton
linear = pytest.importorskip("nanovllm.kernels.cuda.linear")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of values around 1
# The interpreter multiplies bfloat16 incorrectly.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def fill(layer, scheme):
    """Fill a layer with random numbers, always with the same, and quantize its weight."""
    return quantize(randomize(layer), scheme).to(DEVICE)


def make_column(scheme, dtype, out_features=70, in_features=323, bias=True):
    return fill(ColumnParallelLinear(in_features, [("", out_features)], bias, dtype), scheme)


def make_row(scheme, dtype):
    return fill(RowParallelLinear(96, 130, False, dtype), scheme)


def make_embedding(scheme, dtype):
    return fill(Embedding(99, 200, dtype), scheme)


def make_x(num_rows, layer, dtype):
    random = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, layer.weight.in_features, generator=random)
    return (0.2 * x).to(DEVICE, dtype)


def check_close(output, expected):
    limit = TOLERANCE[expected.dtype]
    assert output.dtype == expected.dtype
    torch.testing.assert_close(output, expected, atol=limit, rtol=limit, equal_nan=True)


@all_dtypes
@pytest.mark.parametrize(
    "make, scheme",
    [(make_column, Scheme(bits, size)) for bits in (4, 8) for size in (32, 64, 128)]
    + [(make_row, Scheme(4, 64))],
)
def test_linear_layers_match_plain_ones(make, scheme, dtype):
    plain = make(scheme, dtype)
    layer = optimize(make(scheme, dtype), "triton", dtype)
    assert type(layer) in triton_layers().OPTIMIZED_LAYERS
    for num_rows in (0, 1, 3, 17, 70):
        x = make_x(num_rows, layer, dtype)
        check_close(layer(x), plain(x))


@all_dtypes
@pytest.mark.parametrize("scheme", [Scheme(4, 64), Scheme(8, 128)], ids=str)
def test_embeddings_match_plain_ones(scheme, dtype):
    plain = make_embedding(scheme, dtype)
    embedding = optimize(make_embedding(scheme, dtype), "triton", dtype)
    assert type(embedding) in triton_layers().OPTIMIZED_LAYERS
    ids = torch.tensor([98, 0, 7, 7], device=DEVICE)
    assert torch.equal(embedding(ids), plain(ids))
    # The rows of two in one are not adjacent.
    hidden = make_x(20, embedding, dtype)[::2]
    check_close(embedding.logits(hidden), plain.logits(hidden))


def make_plain_column(scheme, dtype):
    layer = randomize(ColumnParallelLinear(323, [("", 70)], True, dtype))
    return (quantize(layer, scheme) if scheme else layer).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", [None, Scheme(4, 32), Scheme(8, 128)], ids=str)
def test_few_rows_match_the_plain_layer_and_do_not_depend_on_others(scheme, dtype, monkeypatch):
    monkeypatch.setattr(linear, "_K_OF_FEW_ROWS", 128)  # three steps
    plain = make_plain_column(scheme, dtype)
    layer = optimize(make_plain_column(scheme, dtype), "triton", dtype)
    assert type(layer) in triton_layers().OPTIMIZED_LAYERS
    x = (0.2 * torch.randn(4, 323, generator=torch.Generator().manual_seed(0))).to(DEVICE, dtype)
    rows = torch.cat([layer(row[None]) for row in x])
    check_close(rows, plain(x))
    x[3] = torch.nan
    for num_rows in (2, 3, 4):
        output = layer(x[:num_rows])
        assert torch.equal(output[:3], rows[:num_rows][:3])
    assert output[3].isnan().all()


@pytest.mark.parametrize("few_outputs, expected", [(70, [0, 5]), (69, [0, 4, 5])])
def test_only_few_rows_of_small_weights_are_replaced(few_outputs, expected, monkeypatch):
    monkeypatch.setattr(linear, "_SMALL_WEIGHT", 70 * 323)
    monkeypatch.setattr(linear, "_FEW_OUTPUTS", few_outputs)
    others = [make_plain_column(None, torch.float32)]
    others.append(randomize(ColumnParallelLinear(323, [("", 71)], True, torch.float16)).to(DEVICE))
    for layer in others:
        assert type(optimize(layer, "triton", layer.weight.dtype)) is ColumnParallelLinear
    layer = optimize(make_plain_column(None, torch.float16), "triton", torch.float16)
    calls = []

    def watch(x, *_):
        calls.append(len(x))
        return x

    monkeypatch.setattr("nanovllm.kernels.cuda.linear.multiply", watch)
    for num_rows in (0, 1, 4, 5):
        layer(torch.zeros(num_rows, 323, dtype=torch.float16, device=DEVICE))
    assert calls == expected


def test_split_inputs_give_the_same_sums(monkeypatch):
    """A GPU with few multiprocessors splits less. The bias is added once."""
    layer = optimize(make_column(Scheme(4, 32), torch.float32, in_features=600), "triton")
    x = make_x(2, layer, torch.float32)
    outputs = []
    for num_processors in (1000, 2, 1):
        monkeypatch.setattr(
            "nanovllm.kernels.cuda.linear.describe_gpu", lambda device, n=num_processors: (9, n)
        )
        outputs.append(layer(x))
        assert torch.equal(layer(x), outputs[-1])
        check_close(outputs[-1], outputs[0])
    # Other splits round differently.
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[1], outputs[2])


@pytest.mark.parametrize("scheme", [Scheme(4, 32), Scheme(8, 64)], ids=str)
def test_a_nan_stays_in_its_row(scheme):
    layer = optimize(make_column(scheme, torch.float32), "triton")
    layer.weight.scales[5] = torch.nan
    x = make_x(18, layer, torch.float32)
    x[3, 7] = torch.nan
    is_nan = layer(x).isnan().cpu()
    expected = torch.zeros(18, 70, dtype=torch.bool)
    expected[:, 5] = True
    expected[3] = True
    assert torch.equal(is_nan, expected)
