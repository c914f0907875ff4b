"""Weights that C++ quantizes while they are loaded get the codes of layers/quantized.py."""

import subprocess
import sys

import pytest
import torch
from conftest import cover_pairs, make_checkpoint
from kernel_helpers import CPU, DTYPES, needs_compiler
from torch import nn
from transformers import Qwen3Config, Qwen3MoeConfig

from nanovllm.checkpoints.tensor_files import open_weights
from nanovllm.kernels import speed_up_loading
from nanovllm.kernels.cpu.loading import FastQuantizedWeight
from nanovllm.layers import attention
from nanovllm.layers.quantized import INT4, INT8, QuantizedWeight, Scheme
from nanovllm.layers.tensor_parallel import TensorParallel
from nanovllm.models import weights
from nanovllm.models.architectures import read_spec

pytestmark = needs_compiler


def allocate(shape, scheme, dtype):
    """An empty weight, as an attribute of a module. C++ quantizes what is copied into it."""
    module = nn.Module()
    module.weight = QuantizedWeight.empty_like(torch.empty(shape, dtype=dtype), scheme)
    for part in module.weight.buffers():
        part.fill_(77)
    speed_up_loading(module, CPU, dtype)
    assert type(module.weight) is FastQuantizedWeight
    return module.weight


def assert_same(weight, expected):
    """Compare to the bit."""
    for part, wanted in zip(weight.buffers(), expected.buffers(), strict=True):
        assert part.dtype == wanted.dtype
        assert torch.equal(part, wanted)


@pytest.mark.parametrize(
    "shape, scheme, stored, dtype",
    cover_pairs(
        [(70, 1), (300, 257), (40, 1024), (3, 50, 200)],
        [INT8, INT4, Scheme(8, 32), Scheme(4, 96)],
        DTYPES,
        DTYPES,
    ),
    ids=str,
)
def test_codes_are_those_of_the_plain_layer(shape, scheme, stored, dtype):
    torch.manual_seed(0)
    source = torch.randn(shape)
    source[..., 0, :] = 0
    source[..., 1, :] = source[..., 1, :].abs() + 1
    source[..., 2, :] -= 10
    source[..., 3, :] *= 1e-7  # subnormal numbers in float16
    largest_code = (1 << scheme.bits) - 1  # with a scale of 1, halves lie between two codes
    source[..., 4, :] = torch.randint(2 * largest_code, shape[-1:]) / 2
    source[..., 4, :: scheme.group_size] = largest_code
    source = source.to(stored)
    weight = allocate(shape, scheme, dtype)
    weight.copy_(source)
    assert_same(weight, QuantizedWeight.quantize(source, scheme))


@pytest.mark.parametrize("scheme", [INT8, INT4], ids=str)
def test_a_group_with_nan_is_nan(scheme):
    source = torch.randn(4, 256)
    source[2, 200] = torch.nan
    weight = allocate(source.shape, scheme, torch.float32)
    weight.copy_(source)
    expected = QuantizedWeight.quantize(source, scheme).dequantize()
    assert torch.equal(weight.dequantize().isnan(), expected.isnan())


def test_parts_of_a_weight_are_filled():
    """Rows of an expert are one part of its memory, and some inputs of all rows are not."""
    source = torch.randn(30, 256)
    weight = allocate((3, 60, 256), INT4, torch.bfloat16)
    weight[1][30:].copy_(source)
    weight[2][:30][:, 64:128].copy_(source[:, :64])
    weight[0].copy_(weight[1])
    expected = QuantizedWeight.quantize(source, INT4)
    assert_same(weight[1][30:], expected)
    assert_same(weight[0], weight[1])
    assert_same(weight[2][:30][:, 64:128], expected[:, :64])
    assert (weight.codes[1, :30] == 77).all() and (weight.zeros[2, 30:] == 77).all()


SHAPES = {
    "dense": dict(family=Qwen3Config, intermediate_size=768),
    "experts": dict(
        family=Qwen3MoeConfig, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=256
    ),
}


@pytest.mark.parametrize(
    "name, stored, place, option",
    cover_pairs(SHAPES, DTYPES, [(0, 1), (0, 2), (1, 2)], ["int8", "int4"]),
    ids=str,
)
def test_a_model_loads_the_same_codes(tmp_path, name, stored, place, option):
    """The vocabulary is padded on the second rank."""
    rank, num_ranks = place
    sizes = dict(vocab_size=101, hidden_size=256, head_dim=64, num_key_value_heads=4)
    make_checkpoint(tmp_path, dtype=stored, **sizes, **SHAPES[name])
    config = SHAPES[name]["family"].from_pretrained(tmp_path)
    spec = read_spec(config, torch.bfloat16, num_ranks, option, None)
    tp = TensorParallel(rank, num_ranks, None, None)
    buffers = []
    for is_fast in (False, True):
        files = open_weights(tmp_path, "auto")
        model = weights.make_model(spec, attention, files, tp)
        weights.allocate(model, CPU)
        for buffer in model.buffers():
            if not buffer.is_floating_point():
                buffer.zero_()  # also the padding
        if is_fast:
            speed_up_loading(model, CPU, spec.dtype)
        weights.load_checkpoint(model, files)
        buffers.append({name: buffer.nan_to_num(0.0) for name, buffer in model.named_buffers()})
        kinds = {type(each) for each in model.modules() if isinstance(each, QuantizedWeight)}
        assert kinds == {FastQuantizedWeight if is_fast else QuantizedWeight}
    plain, fast = buffers
    assert plain.keys() == fast.keys()
    for key, buffer in plain.items():
        if not key.endswith("embed_tokens.weight.scales"):  # whose padding is not initialized
            assert torch.equal(fast[key], buffer), key


START = """
import sys
from nanovllm import DEMO_MODEL, LLM
LLM(DEMO_MODEL, quantization="int4", kvcache_memory_bytes=1 << 20, device="cpu").exit()
slow = {"torch._dynamo", "sympy"} & sys.modules.keys()
assert not slow, slow
"""


def test_a_start_does_not_import_a_compiler():
    """Each of these takes as long as loading a small model."""
    subprocess.run([sys.executable, "-c", START], check=True)
