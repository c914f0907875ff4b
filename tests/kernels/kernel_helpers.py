"""Random layers, batches and settings that the tests of this folder share."""

import functools
import os
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from shutil import which
from unittest.mock import patch

import pytest
import torch
from conftest import DEVICE, make_batch, make_shape
from torch import nn

from nanovllm.batch.packing import copy_to
from nanovllm.kernels import kernelize, replacement
from nanovllm.kernels.cpu import layers as cpu_layers
from nanovllm.kernels.cpu.gated_delta import FastGatedDeltaRule
from nanovllm.layers import attention as torch_backend
from nanovllm.layers.attention import AttentionShape
from nanovllm.layers.gated_delta import DeltaInputs, DeltaSizes, GatedDeltaRule
from nanovllm.layers.norm import OnceRoundedRMSNorm, RMSNorm, ZeroCenteredRMSNorm
from nanovllm.layers.quantized import QuantizableLayer
from nanovllm.layers.rotary import RopeSpec
from nanovllm.layers.tensor_parallel import ALONE
from nanovllm.models.decoder import MLP, Attention, DecoderSpec
from nanovllm.utils.helpers import cdiv

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCALE = 0.1  # of attention scores
# float32 in another order of summation, and values of about 1 rounded to 11 or 8 bits.
ATTENTION_TOLERANCE = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
BATCHES = {  # query lengths and context lengths
    "decodes": ([1] * 9, [1, 15, 16, 17, 32, 33, 3, 530, 129]),
    "prefills": ([1, 15, 16, 17, 70], [1, 15, 16, 17, 70]),
    "chunks behind prefixes": ([5, 1, 20, 3, 33], [37, 64, 100, 3, 133]),
    "decodes beside chunks": ([1, 40, 1, 2, 1], [530, 41, 1, 300, 16]),
}
DELTA_SHAPES = [  # key heads, value heads, key_dim and value_dim
    (2, 2, 16, 16),
    (2, 4, 64, 128),
    (1, 3, 128, 16),
    (2, 2, 128, 128),
    (3, 3, 10, 12),
]
DELTA_LENGTHS = [[1], [1] * 5, [1, 2, 1, 3, 65, 1], [200, 64]]
# A sum over 128 keys, normalized, in float32, and its rounding to the dtype.
DELTA_TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
GATES = [
    -1e4, -100.0, -89.0, -88.0, -87.0, -1.0, -0.0, 0.0, 1.0, 88.0, 89.0, 100.0, 1e4, 1e38,
    torch.inf, torch.nan,
] * 3  # fmt: skip

has_compiler = which(os.environ.get("CXX", "c++")) is not None
needs_compiler = pytest.mark.skipif(not has_compiler, reason="no C++ compiler")
needs_triton = pytest.mark.skipif(not find_spec("triton"), reason="no triton")
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# The kernels, and the device that has their tensors. Without a GPU, Triton's are interpreted.
all_kernels = pytest.mark.parametrize(
    "language, device",
    [
        pytest.param("cpp", "cpu", marks=needs_compiler, id="cpp"),
        pytest.param("triton", DEVICE.type, marks=needs_triton, id="triton"),
    ],
)


def interpret_faster():
    """Let Triton's interpreter patch triton.language once for a function, and for good.

    By default it does so in every call of a device function, which takes a quarter of the time.
    """
    from triton.runtime import interpreter

    if hasattr(interpreter, "_LangPatchScope"):  # other releases keep no record to restore from
        interpreter._patch_lang = functools.cache(interpreter._patch_lang)
        interpreter._LangPatchScope.restore = lambda scope: None


if find_spec("triton") and os.environ.get("TRITON_INTERPRET") == "1":
    interpret_faster()


@dataclass(frozen=True)
class ShapeWithNewField(AttentionShape):
    """The attention of a layer that has an option more."""

    new_field: float | None = None


def triton_layers():
    return import_module("nanovllm.kernels.cuda.layers")


def optimize(module, language, dtype=torch.float32):
    """kernelize `module` with the layers of kernels/cuda or kernels/cpu, on any device."""
    if language == "triton":
        layers = triton_layers().OPTIMIZED_LAYERS
    else:
        layers = cpu_layers.OPTIMIZED_LAYERS
    with patch.object(replacement, "find_optimized_layers", lambda device_type, dtype: layers):
        kernelize(module, DEVICE, dtype)
    return module


def make_spec(dtype, head_dim=16, **changes):
    settings = dict(
        vocab_size=80, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1,
        intermediate_size=40, norm_eps=1e-3, tie_embeddings=True, max_len=64,
        ropes=(RopeSpec.from_base(1e4, head_dim),), rope_indices=(0, 0), head_dim=head_dim,
        windows=(None, None), scale=head_dim**-0.5, dtype=dtype,
    )  # fmt: skip
    return DecoderSpec(**{**settings, **changes})


def make_layers(dtype, device):
    """Make a layer of each kind, always with the same weights. The MLP has no projections."""
    spec = make_spec(dtype, head_dim=20, hidden_size=100, num_heads=5, num_kv_heads=5, qk_norm=True)
    mlp = MLP(100, 40, False, dtype, ALONE)
    mlp.gate_up_proj = nn.Identity()
    mlp.down_proj = nn.Identity()
    layers = nn.ModuleDict(
        {
            "norm": RMSNorm(300, 1e-3, dtype),
            "attention": Attention(spec, 0, torch_backend, ALONE),
            "mlp": mlp,
            "zero_centered": ZeroCenteredRMSNorm(300, 1e-3, dtype),
            "once_rounded": OnceRoundedRMSNorm(300, 1e-3, dtype),
        }
    )
    return randomize(layers).to(device)


def randomize(module):
    """Fill all weights with the same random numbers in every call. Norms have weights around 1."""
    torch.manual_seed(0)
    for parameter in module.requires_grad_(False).parameters():
        nn.init.normal_(parameter, float(parameter.dim() == 1), 0.3)
    return module


def quantize(module, scheme):
    """Quantize all matrices of `module`."""
    for layer in list(module.modules()):
        if isinstance(layer, QuantizableLayer):
            layer.quantize(scheme)
    return module


def make_step(lengths, heads, block_size, dtype, device=CPU, window=None, fills_blocks=False):
    """Make a query, a KV cache and a batch whose blocks are in random order.

    `lengths` are those of queries and of contexts. `heads` are num_heads, num_kv_heads and
    head_dim. The slots that no query attends to hold NaN. With `fills_blocks`, a block in which a
    window begins has numbers in all slots before it. Equal arguments give equal numbers.
    """
    shape = make_shape(*heads, window=window)
    query_lens, context_lens = lengths
    num_heads, num_kv_heads, head_dim = heads
    torch.manual_seed(sum(context_lens) + head_dim)
    num_blocks = [cdiv(length, block_size) for length in context_lens]
    pool_size = sum(num_blocks) + 3
    block_ids = torch.randperm(pool_size).int().split([*num_blocks, 3])
    tables = torch.zeros(len(context_lens), max(num_blocks), dtype=torch.int32)
    cache_shape = (2, pool_size, block_size, num_kv_heads, head_dim)
    kv_cache = torch.full(cache_shape, torch.nan, dtype=dtype)
    for table, ids, length, query_len in zip(tables, block_ids, context_lens, query_lens):
        table[: len(ids)] = ids
        first = torch_backend.find_first_visible(length - query_len, shape.window)
        if fills_blocks:
            first -= first % block_size
        positions = torch.arange(first, length)
        kv = torch.randn(2, len(positions), num_kv_heads, head_dim).to(dtype)
        kv_cache[:, ids[positions // block_size], positions % block_size] = kv
    query = torch.randn(sum(query_lens), num_heads, head_dim).to(dtype)
    batch = make_batch(query_lens, context_lens, tables, device)
    return query.to(device), kv_cache.to(device), batch


def attend(backend, query, kv_cache, batch, window=None):
    """Attend as a layer of the shape that these tensors have."""
    shape = make_shape(query.shape[1], *kv_cache.shape[3:], SCALE, window)
    return backend.attend(query, kv_cache, batch, shape)


def compare_attention(backend, query, kv_cache, batch, window=None, tolerance=None):
    """Compare `backend` with the torch backend in float32, and return its output."""
    expected = attend(torch_backend, query.float(), kv_cache.float(), batch, window)
    output = attend(backend, query, kv_cache, batch, window)
    assert output.dtype == query.dtype
    limit = tolerance or ATTENTION_TOLERANCE[query.dtype]
    torch.testing.assert_close(output.float(), expected, atol=limit, rtol=limit)
    return output


def make_delta_rule(shape, dtype=torch.float32, conv_size=4):
    """Make a plain layer, always with the same weights. Its states forget slowly."""
    layer = randomize(GatedDeltaRule(DeltaSizes(*shape, conv_size), norm_eps=1e-6, dtype=dtype))
    layer.A_log -= 4
    return layer


def make_delta_step(layer, lengths, read_slots=None, write_slots=None):
    """Make the inputs of a step, which are parts of one projection, states, and a batch.

    They are on the device of the layer. Equal arguments give equal numbers. By default, sequences
    read the first slots and write the next ones.
    """
    torch.manual_seed(sum(lengths))
    num_seqs = len(lengths)
    num_tokens = sum(lengths)
    weight = layer.conv_weight
    widths = [
        sum(layer.qkv_sizes),
        layer.qkv_sizes[2],
        layer.num_value_heads,
        layer.num_value_heads,
    ]
    projection = torch.randn(num_tokens, sum(widths)).to(weight)
    inputs = DeltaInputs(*projection.split(widths, dim=1))
    window_size = (weight.shape[2] - 1) * sum(layer.qkv_sizes)
    states = torch.randn(max(2 * num_seqs, 9), layer.matrices_size + window_size)
    read_slots = range(num_seqs) if read_slots is None else read_slots
    write_slots = range(num_seqs, 2 * num_seqs) if write_slots is None else write_slots
    batch = replace(
        make_batch(lengths, lengths, torch.zeros(num_seqs, 1, dtype=torch.int32)),
        read_slots=torch.tensor([*read_slots], dtype=torch.int32),
        write_slots=torch.tensor([*write_slots], dtype=torch.int32),
    )
    return inputs, states.to(weight.device), copy_to(batch, weight.device)


def compare_delta_rules(lengths, shape, dtype):
    """Compare the C++ kernel with the plain layer."""
    plain = make_delta_rule(shape, dtype)
    fast = optimize(make_delta_rule(shape, dtype), "cpp", dtype)
    assert type(fast) is FastGatedDeltaRule
    inputs, states, batch = make_delta_step(plain, lengths)
    expected_states = states.clone()
    expected = plain(inputs, expected_states, batch)
    output = fast(inputs, states, batch)
    assert output.dtype == dtype
    limit = DELTA_TOLERANCE[dtype]
    torch.testing.assert_close(output, expected, atol=limit, rtol=limit)
    torch.testing.assert_close(states, expected_states, atol=1e-5, rtol=1e-5)


class LaunchRecorder:
    """Stands for a kernel. `launch` receives the kernel, the grid and the arguments."""

    def __init__(self, kernel, launch):
        self.kernel = kernel
        self.launch = launch

    def __getitem__(self, grid):
        return functools.partial(self.launch, self.kernel, grid)
