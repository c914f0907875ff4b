"""Layers of several ranks compute what those of one rank do. Each rank is a thread here.

tests/worker/test_ranks.py has ranks in processes of their own.
"""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from nanovllm.layers.embedding import Embedding
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.layers.quantized import QuantizedWeight, Scheme
from nanovllm.layers.tensor_parallel import TensorParallel

HIDDEN_SIZE = 12
VOCAB_SIZE = 31  # no number of ranks divides it


def run_ranks(size, function):
    """Call `function(tp)` for each rank, and return the results. A lost rank is an error."""
    store = dist.HashStore()
    timeout = timedelta(seconds=10)

    def run(rank):
        group = None if size == 1 else dist.ProcessGroupGloo(store, rank, size, timeout)
        with torch.inference_mode():
            return function(TensorParallel(rank, size, group))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


def fill(layer, name="layer"):
    """Load random tensors of full size, the same on each rank."""
    for full_name, target in layer.targets(name):
        generator = torch.Generator().manual_seed(len(full_name) + sum(map(ord, full_name)))
        full = torch.randn(target.full_shape, generator=generator)
        target.destination.copy_(full[target.shard])
    return layer


def compute_mlp(tp):
    """Two parts of the same input, their product, and back. All have biases."""
    x = torch.linspace(-1, 1, 5 * HIDDEN_SIZE).view(5, HIDDEN_SIZE)
    parts = [("left", 24), ("right", 24)]
    wide = fill(ColumnParallelLinear(HIDDEN_SIZE, parts, True, torch.float32, tp))
    back = fill(RowParallelLinear(24, HIDDEN_SIZE, True, torch.float32, tp), "back")
    left, right = wide(x).chunk(2, dim=-1)
    assert left.shape == (5, 24 // tp.size)
    return back(left * right)


@pytest.mark.parametrize("scheme", [None, Scheme(8, 4)])
@pytest.mark.parametrize("has_bias", [False, True])
@torch.inference_mode()
def test_one_rank_has_a_linear_layer(scheme, has_bias):
    """Ranks are compared with one rank, so this is compared with the definition."""
    x = torch.linspace(-1, 1, 5 * HIDDEN_SIZE).view(5, HIDDEN_SIZE)
    for layer in (
        ColumnParallelLinear(HIDDEN_SIZE, [("left", 8), ("right", 4)], has_bias, torch.float32),
        RowParallelLinear(HIDDEN_SIZE, 8, has_bias, torch.float32),
    ):
        if scheme is not None:
            layer.quantize(scheme)
        fill(layer)
        weight = layer.weight if scheme is None else layer.weight.dequantize()
        torch.testing.assert_close(layer(x), F.linear(x, weight, layer.bias))


def test_a_layer_multiplies_with_the_method_that_kernels_replace():
    for layer in (
        ColumnParallelLinear(4, [("all", 4)], True, torch.float32),
        RowParallelLinear(4, 4, True, torch.float32),
    ):
        layer.multiply = lambda x, bias: x if bias is None else x + bias
        layer.weight.data.fill_(5.0)
        layer.bias.data.fill_(1.0)
        assert layer(torch.ones(1, 4)).tolist() == [[2.0] * 4]


def test_each_rank_loads_each_tensor():
    def name_targets(tp):
        layers = (
            ColumnParallelLinear(4, [("left", 4), ("right", 8)], True, torch.float32, tp),
            RowParallelLinear(4, 4, True, torch.float32, tp),
        )
        return [[name for name, _ in layer.targets("a.layer")] for layer in layers]

    expected = [
        ["a.left.weight", "a.left.bias", "a.right.weight", "a.right.bias"],
        ["a.layer.weight", "a.layer.bias"],
    ]
    assert run_ranks(2, name_targets) == [expected] * 2


def test_a_sum_over_ranks_replaces_the_parts():
    def add(tp):
        x = torch.full((3,), 1.0 + tp.rank, dtype=torch.bfloat16)
        result = tp.all_reduce(x)
        assert result is x
        return x

    for x in run_ranks(2, add):
        assert (x.dtype, x.tolist()) == (torch.bfloat16, [3.0] * 3)


def test_parts_are_gathered_side_by_side_on_rank_0():
    def gather(tp):
        return tp.gather(torch.full((2, 3), 1.0 + tp.rank, dtype=torch.bfloat16))

    whole, part = run_ranks(2, gather)
    assert (whole.dtype, whole.tolist()) == (torch.bfloat16, [[1.0] * 3 + [2.0] * 3] * 2)
    assert part.tolist() == [[2.0] * 3] * 2


@pytest.mark.parametrize("size", [2, 3])
def test_column_and_row_parallel_layers(size):
    (expected,) = run_ranks(1, compute_mlp)
    assert expected.shape == (5, HIDDEN_SIZE)
    for output in run_ranks(size, compute_mlp):  # every rank has the sum
        torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("scheme", [None, Scheme(8, 4)])
def test_embedding_and_logits(size, scheme):
    token_ids = torch.tensor([0, VOCAB_SIZE - 1, 11, 15, 16, 20, 21, 10])

    def compute(tp):
        layer = fill(Embedding(VOCAB_SIZE, HIDDEN_SIZE, torch.float32, tp))
        if scheme is not None:
            weight = QuantizedWeight.quantize(layer.weight.data, scheme)
            del layer.weight
            layer.weight = weight
        embedded = layer(token_ids)
        return embedded, layer.logits(embedded), layer.logits(embedded[:1])

    ((embedding, logits, _),) = run_ranks(1, compute)
    results = run_ranks(size, compute)
    for embedded, _, _ in results:
        assert torch.equal(embedded, embedding)
    torch.testing.assert_close(results[0][1], logits)  # on rank 0 only
    torch.testing.assert_close(results[0][2], logits[:1])
    assert logits.shape == (len(token_ids), VOCAB_SIZE)


def test_a_rank_can_have_no_token_ids():
    """Four tokens on three ranks are 2, 2 and 0. Padding is memory that was never written."""

    def compute(tp):
        layer = Embedding(4, HIDDEN_SIZE, torch.float32, tp)
        layer.weight.fill_(torch.nan)
        embedded = fill(layer)(torch.arange(4))
        return embedded, layer.logits(embedded)

    (expected,) = run_ranks(1, compute)
    results = run_ranks(3, compute)
    assert all(torch.equal(embedded, expected[0]) for embedded, _ in results)
    torch.testing.assert_close(results[0][1], expected[1])


def test_features_are_divided_in_whole_units():
    """With fewer units than ranks, neighboring ranks have the same one."""
    four = [TensorParallel(rank, 4) for rank in range(4)]
    assert [tp.divide(24) for tp in four] == [(6, 0), (6, 6), (6, 12), (6, 18)]
    assert [tp.divide(32, unit=16) for tp in four] == [(16, 0), (16, 0), (16, 16), (16, 16)]
    assert [tp.divide(16, unit=16) for tp in four] == [(16, 0)] * 4
