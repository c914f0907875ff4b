"""What is wrong on a GPU is found at the start of an engine, and plain torch takes its place."""

from functools import partial
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from conftest import generate_ids, greedy, make_batch, make_checkpoint, random_prompt
from kernel_helpers import CPU, make_spec, needs_triton, randomize, triton_layers
from torch import nn
from transformers import Qwen3_5TextConfig

from nanovllm import LLM
from nanovllm.checkpoints.quantization import INT8
from nanovllm.engine.sequence import Sequence
from nanovllm.kernels import kernelize, replacement
from nanovllm.kernels.cuda import graphs
from nanovllm.kernels.optimized_layer import OptimizedLayer
from nanovllm.layers import attention as torch_backend
from nanovllm.layers.gated_delta import GatedDeltaRule
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.quantized import QuantizedWeight
from nanovllm.layers.sampler import Sampler
from nanovllm.models.decoder import MLP, Attention, DecoderLayers
from nanovllm.models.quantized_layers import QUANTIZABLE, quantize_layer
from nanovllm.worker.dummy_sampling import sample_test_rows
from nanovllm.worker.dummy_steps import make_dummy_batch, run_test_steps

LINEAR = {ColumnParallelLinear, RowParallelLinear}
LAYERS = {RMSNorm, MLP, Attention, DecoderLayers, *LINEAR}


def add_one(layer, *args):
    return layer.replaces.forward(layer, *args) + 1


def make_nan(layer, *args):
    return layer.replaces.forward(layer, *args) * torch.nan


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
        if isinstance(layer, QUANTIZABLE) and is_quantized(name):
            quantize_layer(layer, INT8)
    caches = [torch_backend.make_cache(1, 16, 1, 16, torch.float32, CPU) for _ in range(2)]
    batch = make_batch([9], [9], torch.zeros(1, 1, dtype=torch.int32))
    for tensor in (batch.input_ids, batch.positions, batch.slot_mapping):
        tensor.copy_(torch.arange(9))
    return model, lambda: model(batch, caches)


@pytest.mark.parametrize("wrong", [add_one, make_nan, fail])
@pytest.mark.parametrize("layer", sorted(LAYERS, key=str))
def test_a_wrong_layer_is_replaced(stand_ins, capfd, layer, wrong):
    model, run = make_model(torch_backend)
    expected = run()
    stand_ins[layer].forward = wrong
    names = kernelize(model, CPU, torch.float32, run)
    assert set(names) == {other.__name__ for other in LAYERS - {layer}}
    classes = {type(each) for each in model.modules()}
    assert classes & LAYERS == {layer}
    assert classes >= {stand_ins[other] for other in LAYERS - {layer}}
    torch.testing.assert_close(run(), expected)
    (message,) = capfd.readouterr().err.splitlines()
    assert f"{stand_ins[layer].__name__} is replaced by {layer.__name__}" in message
    assert "report" in message


@pytest.mark.parametrize("wrong_kind", [nn.Parameter, QuantizedWeight])
def test_layers_with_and_without_quantized_weights_are_tested(stand_ins, capfd, wrong_kind):
    def forward(layer, x):
        is_wrong = isinstance(layer.weight, wrong_kind)
        return ColumnParallelLinear.forward(layer, x) + (1.0 if is_wrong else 0.0)

    model, run = make_model(torch_backend, is_quantized=lambda name: "mlp" in name)
    stand_ins[ColumnParallelLinear].forward = forward
    kernelize(model, CPU, torch.float32, run)
    assert "FastColumnParallelLinear is replaced" in capfd.readouterr().err


def test_a_layer_that_does_not_store_keys_and_values_is_wrong(stand_ins, capfd, monkeypatch):
    def forget(layer, *args):
        monkeypatch.setattr(layer.backend, "store_kvcache", lambda *_: None)
        return Attention.forward(layer, *args)

    model, run = make_model(SimpleNamespace(**vars(torch_backend)))
    stand_ins[Attention].forward = forget
    kernelize(model, CPU, torch.float32, run)
    assert "FastAttention is replaced by Attention" in capfd.readouterr().err


@needs_triton
def test_the_kernels_for_gpus_pass(monkeypatch, capfd):
    layers = triton_layers()
    monkeypatch.setattr(replacement, "find_optimized_layers", lambda *_: layers.OPTIMIZED_LAYERS)
    model, run = make_model(import_module("nanovllm.kernels.cuda.attention"))
    kernelize(model, CPU, torch.float32, run)
    assert {type(each) for each in model.modules()}.isdisjoint(LAYERS)
    assert not capfd.readouterr().err


@pytest.mark.parametrize("wrong", [add_one, fail])
def test_an_engine_replaces_a_wrong_sampler(make_llm, stand_ins, capfd, wrong):
    """With the inputs that an engine has for its self-tests on a GPU."""
    llm = make_llm(device="cpu", enable_kernels=False)
    runner = llm.model_runner
    worker = runner.executor.worker
    expected = generate_ids(llm, random_prompt(0, 9), greedy(5))
    capfd.readouterr()
    kernelize(worker.model, CPU, torch.float32, partial(run_test_steps, worker))
    run = partial(sample_test_rows, runner.sampler, torch.float32, Sequence)
    kernelize(runner.sampler, CPU, torch.float32, run)
    assert isinstance(runner.sampler, stand_ins[Sampler])
    assert not capfd.readouterr().err
    runner.sampler.__class__ = Sampler
    stand_ins[Sampler].forward = wrong
    kernelize(runner.sampler, CPU, torch.float32, run)
    assert type(runner.sampler) is Sampler
    assert "FastSampler is replaced by Sampler" in capfd.readouterr().err
    assert generate_ids(llm, random_prompt(0, 9), greedy(5)) == expected


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """The path of a checkpoint with recurrent states."""
    directory = tmp_path_factory.mktemp("hybrid")
    make_checkpoint(
        directory,
        family=Qwen3_5TextConfig,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
    )
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
    names = kernelize(worker.model, CPU, torch.float32, partial(run_test_steps, worker))
    (message,) = capfd.readouterr().err.splitlines()
    assert f"Fast{layer.__name__} is replaced by {layer.__name__}" in message
    assert {"GatedDeltaRule", "RowParallelLinear"} - set(names) == {layer.__name__}


@pytest.mark.parametrize("fault", ["", "output", "K/V", "states"])
def test_wrong_graphs_are_not_used(hybrid, monkeypatch, capfd, fault):
    """A stand-in for a graph computes again, but does not write what `fault` says."""
    llm = LLM(hybrid, device="cpu", enable_kernels=False, num_kvcache_blocks=64)
    worker = llm.executor.worker
    decoder, caches = worker.model, worker.kv_caches

    def capture(step, *_):
        output = step()
        unwritten = [cache for cache in caches if cache.dim() == 2] if fault == "states" else []

        def replay():
            before = [cache.clone() for cache in unwritten]
            with monkeypatch.context() as patch:
                if fault == "K/V":
                    patch.setattr(torch_backend, "store_kvcache", lambda *_: None)
                result = step()
            if fault != "output":
                output.copy_(result)
            for cache, old in zip(unwritten, before):
                cache.copy_(old)

        return SimpleNamespace(replay=replay), output

    monkeypatch.setattr(graphs, "capture", capture)
    with torch.inference_mode():
        batch = make_dummy_batch(worker, [1])
        captured = graphs.CudaGraphs(decoder, caches, [1, 2], batch)
        assert graphs.can_replay(captured, decoder, caches, batch) == (not fault)
    assert ("replaced by eager steps" in capfd.readouterr().err) == bool(fault)
