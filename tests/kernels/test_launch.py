"""A Launch gets the same kind of arguments in all calls, because Triton does not look at them.

The kernels run in the interpreter, or on a GPU.
"""

import pytest
import torch
from conftest import DEVICE
from kernel_helpers import (
    attend,
    make_delta_rule,
    make_delta_step,
    make_step,
    needs_triton,
    optimize,
    quantize,
    randomize,
)

from nanovllm.layers.gated_delta import DeltaInputs
from nanovllm.layers.linear import ColumnParallelLinear
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.quantized import Scheme

pytest.importorskip("triton", reason="triton is not installed")
from nanovllm.kernels.cuda import attention, decoder, launch, moe

DTYPES = [torch.float32, torch.float16]


def list_unspecialized(kernel, option):
    return getattr(kernel, option, None) or getattr(kernel, "kwargs", {}).get(option) or ()


def specialize(kernel, args):
    """Return what Triton specializes on, for each argument."""
    any_value = list_unspecialized(kernel, "do_not_specialize")
    any_alignment = list_unspecialized(kernel, "do_not_specialize_on_alignment")
    found = {}
    for name, arg in zip(kernel.arg_names, args):
        if isinstance(arg, torch.Tensor):
            is_aligned = name in any_alignment or arg.data_ptr() % 16 == 0
            found[name] = (arg.device, arg.dtype, is_aligned)
        elif isinstance(arg, int) and name not in any_value:
            found[name] = (arg == 1, arg % 16 == 0)
        else:
            found[name] = type(arg)
    return found


@pytest.fixture
def launched(monkeypatch):
    """Compare each call of a Launch with its first one. Return the names of what was launched."""
    first = {}
    names = set()
    call = launch.Launch.__call__

    def compare(self, grid, *args):
        kind = specialize(self.kernel, args)
        assert first.setdefault(self, kind) == kind, self.kernel
        names.add(self.kernel.__name__)
        call(self, grid, *args)

    monkeypatch.setattr(launch.Launch, "__call__", compare)
    return names


def make_views(shape, dtype):
    """Return a tensor that is aligned, and one that is not."""
    size = torch.Size(shape).numel()
    numbers = torch.randn(size + 1).to(DEVICE, dtype)
    return numbers[:size].view(shape), numbers[1:].view(shape)


def run_norms(dtype):
    for size in (64, 24):
        weight = torch.ones(size, dtype=dtype, device=DEVICE)
        for x in make_views((3, size), dtype):
            for branch in (None, *make_views((3, size), dtype)):
                decoder.add_rms_norm(x, branch, weight, 1e-6)


def run_attention(dtype):
    for heads in ((2, 1, 32), (1, 1, 16)):
        num_heads, num_kv_heads, head_dim = heads
        norm = randomize(RMSNorm(head_dim, 1e-6, dtype)).to(DEVICE)
        for lengths in (([1, 1], [40, 300]), ([1, 20], [40, 20])):
            query, kv_cache, batch = make_step(lengths, heads, 16, dtype, DEVICE)
            num_tokens = len(query)
            angles = torch.randn(num_tokens, 1, head_dim // 2, device=DEVICE)
            slots = torch.arange(num_tokens + 1, dtype=torch.int32, device=DEVICE)[1:]
            for each in make_views(query.shape, dtype):
                attend(attention, each, kv_cache, batch)
            width = (num_heads + 2 * num_kv_heads) * head_dim
            for qkv in make_views((num_tokens, width), dtype):
                for each in (None, norm):
                    decoder.rotate_and_store(qkv, each, each, (angles, angles), kv_cache, slots)
                key = qkv.unflatten(1, (-1, head_dim))[:, num_heads : num_heads + num_kv_heads]
                attention.store_kvcache(key, key.contiguous(), kv_cache, slots)


def run_quantized(dtype):
    for out_features, bias in ((70, True), (64, False)):
        layer = ColumnParallelLinear(96, [("", out_features)], bias, dtype)
        layer = optimize(quantize(randomize(layer), Scheme(4, 32)).to(DEVICE), "triton", dtype)
        for num_rows in (3, 40):
            for x in make_views((num_rows, 96), dtype):
                layer(x)


def run_gated_delta(dtype):
    long = 2 if dtype == torch.float32 else 40  # float32 has no chunks
    for shape in ((1, 1, 20, 24), (1, 1, 5, 7)):
        layer = optimize(make_delta_rule(shape, dtype), "triton", dtype).to(DEVICE)
        for lengths in ([1, 1], [long, 1]):
            inputs, states, batch = make_delta_step(layer, lengths)
            alone = [each.contiguous() for each in inputs]
            with_gaps = [torch.cat((each, each), dim=1)[:, : each.shape[1]] for each in inputs]
            for each in (inputs, alone, with_gaps):
                layer(DeltaInputs(*each), states, batch)


def run_experts(dtype):
    pairs = torch.arange(6, device=DEVICE)
    starts = torch.tensor([0, 2, 6], dtype=torch.int32, device=DEVICE)
    weight = torch.ones(2, 24, 16, dtype=dtype, device=DEVICE)
    scales = torch.ones(3, 2, device=DEVICE)
    for num_rows in (3, 6):
        for x in make_views((num_rows, 16), dtype):
            for each in (None, scales):
                moe._multiply(x, weight, each, pairs, starts, 16)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "run, kernels",
    [
        (run_norms, {"add_rms_norm_kernel"}),
        (
            run_attention,
            {
                "attend_kernel",
                "combine_splits_kernel",
                "rotate_and_store_kernel",
                "store_kvcache_kernel",
            },
        ),
        (run_quantized, {"multiply_kernel"}),
        (run_experts, {"multiply_experts_kernel"}),
        (run_gated_delta, {"prepare_chunks_kernel", "advance_states_kernel"}),
    ],
)
def test_calls_of_a_launch_have_arguments_of_one_kind(run, kernels, dtype, launched):
    run(dtype)
    assert launched == kernels
