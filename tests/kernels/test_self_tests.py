"""What is wrong on a GPU is found at the start of an engine, and plain torch takes its place."""

from copy import deepcopy
from functools import partial
from importlib import import_module
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from conftest import DEVICE, ON_GPU, make_batch
from families import make_family
from graph_helpers import make_graphs, repeat_steps
from kernel_helpers import CPU, make_spec, needs_triton, randomize, triton_layers

from nanovllm import LLM
from nanovllm.kernels import kernelize, replacement
from nanovllm.kernels.cuda import graphs
from nanovllm.kernels.optimized_layer import OptimizedLayer
from nanovllm.kernels.self_tests import RecordedCall, catch_failure, check_call
from nanovllm.layers import attention as torch_backend
from nanovllm.layers.gated_delta import GatedDeltaRule
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.quantized import INT8, QuantizableLayer
from nanovllm.layers.sampler import Sampler
from nanovllm.models.decoder import MLP, Attention, DecoderLayers
from nanovllm.worker.dummy_steps import make_dummy_batch, run_test_steps, sample_test_rows

LINEAR = {ColumnParallelLinear, RowParallelLinear}
LAYERS = {RMSNorm, MLP, Attention, DecoderLayers, *LINEAR}


def add_one(layer, *args):
    return layer.replaces.forward(layer, *args) + 1


def fail(layer, *args):
    raise RuntimeError("an illegal memory access was encountered")


@pytest.fixture
def stand_ins(monkeypatch):
    """An optimized subclass for each layer, which computes what the layer does."""
    found = {}
    for layer in (*LAYERS, Sampler):
        members = {"replaces": layer, "forward": layer.forward}
        found[layer] = type(f"Fast{layer.__name__}", (OptimizedLayer, layer), members)
    monkeypatch.setattr(replacement, "find_optimized_layers", lambda *_: list(found.values()))
    yield found


def make_model(backend, is_quantized=lambda name: True):
    """A model with quantized layers, and a function that computes a prompt."""
    model = randomize(make_spec(torch.float32, qk_norm=True).make_model(backend))
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizableLayer) and is_quantized(name):
            layer.quantize(INT8)
    caches = [torch_backend.make_cache(1, 16, 1, 16, torch.float32, CPU) for _ in range(2)]
    batch = make_batch([9], [9], torch.zeros(1, 1, dtype=torch.int32))
    for tensor in (batch.input_ids, batch.positions, batch.slot_mapping):
        tensor.copy_(torch.arange(9))
    return model, lambda: model(batch, caches)


@pytest.mark.parametrize("wrong", [add_one, fail])
@pytest.mark.parametrize("layer", sorted(LAYERS, key=str))
def test_a_wrong_layer_is_replaced(stand_ins, capfd, layer, wrong):
    model, run = make_model(torch_backend)
    expected = run()
    stand_ins[layer].forward = wrong
    names = kernelize(model, CPU, torch.float32, run)
    assert set(names) == {other.__name__ for other in LAYERS - {layer}}
    assert {type(each) for each in model.modules()} & LAYERS == {layer}
    torch.testing.assert_close(run(), expected)
    (message,) = capfd.readouterr().err.splitlines()
    assert f"{stand_ins[layer].__name__} is replaced by {layer.__name__}" in message
    assert "report" in message


@pytest.mark.parametrize(
    "quantized, find_kind", [("layers.0", type), ("no layer", lambda weight: weight.shape)]
)
def test_each_kind_and_each_shape_of_a_weight_is_tested(stand_ins, capfd, quantized, find_kind):
    """Only layers with weights of another kind than the first one are wrong."""
    kinds = []

    def forward(layer, x):
        kinds.append(find_kind(layer.weight))
        return ColumnParallelLinear.forward(layer, x) + (kinds[-1] != kinds[0])

    model, run = make_model(torch_backend, is_quantized=lambda name: quantized in name)
    stand_ins[ColumnParallelLinear].forward = forward
    kernelize(model, CPU, torch.float32, run)
    assert "FastColumnParallelLinear is replaced" in capfd.readouterr().err


# Each kind of decoder, of norms and of states, with windows and quantized weights.
TWO_LAYERS = {"num_hidden_layers": 2}
TWO_DELTA_LAYERS = {**TWO_LAYERS, "layer_types": ["linear_attention", "full_attention"]}
REAL_MODELS = {
    "qwen2": {},
    "qwen3": {},
    "ministral-windows": {},
    "smollm3": TWO_LAYERS,
    "qwen3-moe": {},
    "qwen3.5-moe": TWO_DELTA_LAYERS,
}
# The interpreter multiplies bfloat16 incorrectly.
REAL_DTYPES = ["float32", "bfloat16" if ON_GPU else "float16"]
REAL_CASES = [
    *product(REAL_MODELS, [None], REAL_DTYPES[1:]),
    *product(["qwen3"], [None, "int8"], REAL_DTYPES[:1]),
]


@pytest.fixture
def use_triton(monkeypatch):
    """A function that lets kernelize replace layers by those for GPUs from now on."""
    kinds = []
    monkeypatch.setattr(replacement, "find_optimized_layers", lambda *_: kinds)
    return lambda: kinds.extend(triton_layers().OPTIMIZED_LAYERS)


@needs_triton
@pytest.mark.parametrize("name, quantization, dtype", REAL_CASES)
def test_no_right_layer_is_replaced(
    tmp_path, monkeypatch, use_triton, capfd, name, quantization, dtype
):
    """In the whole self-test of an engine, but for attention, which has a check of its own."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    make_family(tmp_path, name, **sizes, **REAL_MODELS[name])
    triton_backend = import_module("nanovllm.kernels.cuda.attention")
    monkeypatch.setattr(triton_backend, "attend", torch_backend.attend)  # faster if interpreted
    llm = LLM(
        str(tmp_path), device=DEVICE.type, dtype=dtype, attention_backend="triton",
        num_kvcache_blocks=64, enforce_eager=True, quantization=quantization,
    )  # fmt: skip
    worker = llm.executor.worker
    use_triton()
    capfd.readouterr()
    assert kernelize(
        worker.model, DEVICE, worker.spec.dtype, partial(run_test_steps, worker, worker.model)
    )
    assert not capfd.readouterr().err


@needs_triton
@pytest.mark.parametrize("dtype", REAL_DTYPES)
def test_a_right_sampler_is_not_replaced(use_triton, capfd, dtype):
    sampler = Sampler(97).to(DEVICE)
    use_triton()
    run = partial(sample_test_rows, sampler, getattr(torch, dtype))
    assert kernelize(sampler, DEVICE, getattr(torch, dtype), run) == ["Sampler"]
    assert not capfd.readouterr().err


def write(output, *written):
    """A layer that returns `output` and writes each of `written` to one of its arguments."""

    def run(*args):
        for arg, values in zip(args, written, strict=True):
            arg.copy_(values)
        return output

    return run


def test_errors_are_relative_to_a_change_or_to_what_is_written_again():
    ones = torch.ones(4)
    ulp = torch.finfo(torch.float32).eps
    cases = [
        # Before, expected, written, whether that is right.
        (ones, ones, ones + ulp, True),
        (ones, ones + ulp, ones, True),
        (ones, ones + ulp, ones - 3 * ulp, True),
        (ones, ones, ones + 0.001, False),
        (ones, ones + 0.001, ones, False),  # a state that changes little, and is not written
        (ones, ones + 0.001, ones + 0.001001, True),
        (0 * ones, 0 * ones, ulp * ones, False),
        (ones, 0 * ones, 0 * ones, True),
        (ones, ones, torch.nan * ones, False),
    ]
    # Most of a cache is not written, and must not hide errors.
    others = torch.full((10**6,), 9.0)
    for before, expected, written, is_right in cases:
        args = [torch.cat((others, part)) for part in (before, expected, written)]
        call = RecordedCall(write(ones, args[2]), (args[0],), ones, (args[1],))
        failure = catch_failure(check_call, call)
        assert (failure is None) == is_right, (before, expected, written)
    almost_zeros = RecordedCall(write(1e-9 * ones), (), 0 * ones, ())
    assert catch_failure(check_call, almost_zeros)


@pytest.mark.parametrize("wrong", [add_one, fail])
def test_a_wrong_sampler_is_replaced(stand_ins, capfd, wrong):
    """With the inputs that an engine has for its self-tests on a GPU."""
    sampler = Sampler(97)
    run = partial(sample_test_rows, sampler, torch.float32)
    stand_ins[Sampler].forward = wrong
    kernelize(sampler, CPU, torch.float32, run)
    assert type(sampler) is Sampler
    assert "FastSampler is replaced by Sampler" in capfd.readouterr().err


@pytest.mark.parametrize("layer", [Attention, DecoderLayers])
def test_a_decode_that_does_not_store_keys_and_values_is_wrong(make_llm, stand_ins, capfd, layer):
    """The steps for self-tests must not write what is there already."""

    def forget_decodes(layer, x, cos_sins, kv_caches, batch):
        if batch.max_seqlen_q == 1:
            kv_caches = deepcopy(kv_caches)
        return layer.replaces.forward(layer, x, cos_sins, kv_caches, batch)

    worker = make_llm(device="cpu", enable_kernels=False).executor.worker
    stand_ins[layer].forward = forget_decodes
    capfd.readouterr()
    kernelize(worker.model, CPU, torch.float32, partial(run_test_steps, worker, worker.model))
    assert f"{stand_ins[layer].__name__} is replaced by" in capfd.readouterr().err


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """The path of a checkpoint with recurrent states."""
    directory = tmp_path_factory.mktemp("hybrid")
    make_family(directory, "qwen3.5", **TWO_DELTA_LAYERS)
    return str(directory)


def forget_states(layer, *args):
    inputs, states, batch = args
    return layer.replaces.forward(layer, inputs, states.clone(), batch)


def start_from_zeros(layer, *args):
    *_, states, batch = args
    if batch.max_seqlen_q > 1:
        states[batch.read_slots] = 0.0
    return layer.replaces.forward(layer, *args)


def write_elsewhere(layer, *args):
    *_, states, batch = args
    output = layer.replaces.forward(layer, *args)
    states[batch.write_slots] = states[batch.write_slots.flip(0)]
    return output


def fail_in_second_chunk(layer, *args):
    output = layer.replaces.forward(layer, *args)
    output[32:] = 0.0
    return output


def fail_in_large_tiles(layer, x):
    output = layer.replaces.forward(layer, x)
    return output if len(x) <= 16 else 2 * output


def fail_in_decodes(layer, *args):
    output = layer.replaces.forward(layer, *args)
    return output if args[-1].max_seqlen_q > 1 else 2 * output


@pytest.mark.parametrize(
    "layer, wrong",
    [
        (GatedDeltaRule, forget_states),
        (GatedDeltaRule, start_from_zeros),
        (GatedDeltaRule, write_elsewhere),
        (GatedDeltaRule, fail_in_decodes),
        (GatedDeltaRule, fail_in_second_chunk),
        (RowParallelLinear, fail_in_large_tiles),
    ],
)
@pytest.mark.parametrize("options", [{}, {"kvcache_block_size": 2, "max_num_batched_tokens": 1}])
def test_states_and_several_chunks_are_tested(hybrid, stand_ins, capfd, options, layer, wrong):
    """With the steps that an engine computes for its self-tests on a GPU."""
    llm = LLM(hybrid, device="cpu", enable_kernels=False, num_kvcache_blocks=64, **options)
    worker = llm.executor.worker
    for each in (GatedDeltaRule, RowParallelLinear):
        members = {"replaces": each, "forward": each.forward}
        stand_ins[each] = type(f"Fast{each.__name__}", (OptimizedLayer, each), members)
    stand_ins[layer].forward = wrong
    capfd.readouterr()
    names = kernelize(
        worker.model, CPU, torch.float32, partial(run_test_steps, worker, worker.model)
    )
    (message,) = capfd.readouterr().err.splitlines()
    assert f"Fast{layer.__name__} is replaced by {layer.__name__}" in message
    assert {"GatedDeltaRule", "RowParallelLinear"} - set(names) == {layer.__name__}


@needs_triton
@pytest.mark.parametrize(
    "query_lens, fault",
    [
        *product([[1], [2]], ["", "output", "K/V", "states"]),
        # The decode and the prompt of the self-test have the same slots.
        *product([[2, 1]], ["", "output", "K/V"]),
    ],
)
def test_wrong_graphs_are_not_used(hybrid, monkeypatch, capfd, query_lens, fault):
    """A stand-in for a graph computes again, but does not write what `fault` says."""
    llm = LLM(hybrid, device="cpu", enable_kernels=False, num_kvcache_blocks=64)
    worker = llm.executor.worker
    repeat_steps(monkeypatch)
    unwritten = [cache for cache in worker.kv_caches if cache.dim() == 2 and fault == "states"]

    def capture(step, *_):
        def replay():
            unchanged = [*unwritten, captured.hidden] if fault == "output" else unwritten
            before = [tensor.clone() for tensor in unchanged]
            with monkeypatch.context() as patch:
                if fault == "K/V":
                    patch.setattr(torch_backend, "store_kvcache", lambda *_: None)
                step()
            for tensor, old in zip(unchanged, before):
                tensor.copy_(old)

        return SimpleNamespace(replay=replay)

    monkeypatch.setattr(graphs, "capture", capture)
    captured = make_graphs(worker, 16)
    with torch.inference_mode():
        batch = make_dummy_batch(worker, query_lens)
        assert graphs.can_replay(captured, batch) == (not fault)
    assert ("replaced by eager steps" in capfd.readouterr().err) == bool(fault)
