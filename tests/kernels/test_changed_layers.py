"""A layer that a reader changes keeps its effect, although optimized layers replace others."""

import gc
from copy import deepcopy
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import FunctionType, SimpleNamespace
from weakref import ref

import pytest
import torch
from conftest import DEVICE, make_batch
from kernel_helpers import CPU, make_spec, needs_compiler, needs_triton, optimize, randomize
from torch import nn

from nanovllm.batch.batch import Batch
from nanovllm.kernels.cpu import attention as cpp_backend
from nanovllm.layers import attention as torch_backend
from nanovllm.layers.attention import AttentionShape
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import RopeSpec
from nanovllm.layers.tensor_parallel import ALONE, TensorParallel
from nanovllm.models.gemma3 import Gemma3Spec
from nanovllm.models.moe import MoESpec
from nanovllm.models.qwen3_5 import Qwen35Spec
from nanovllm.worker.worker import Worker


def make_decoder_spec(kind, **changes):
    return kind(**vars(make_spec(torch.float32)) | changes)


SPECS = {
    "norms": make_spec(torch.float32, qk_norm=True),
    "ropes": make_spec(
        torch.float32,
        qk_norm=True,
        ropes=(RopeSpec.from_base(1e4, 16), RopeSpec.from_base(1e2, 16)),
        rope_indices=(0, 1),
    ),
    "biases": make_spec(torch.float32, qkv_bias=True, o_bias=True, mlp_bias=True),
    "experts": make_decoder_spec(
        MoESpec,
        mlp_only_layers=[0],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
    ),
    "delta": make_decoder_spec(
        Qwen35Spec,
        qk_norm=True,
        ropes=(RopeSpec.from_base(1e4, 8),),
        layer_types=["full_attention", "linear_attention"],
        num_key_heads=2,
        num_value_heads=4,
        key_dim=16,
        value_dim=24,
        conv_size=4,
    ),
    "gemma3": make_decoder_spec(
        Gemma3Spec,
        norm_eps=0.5,  # norms after the branches would hide small changes of those before them
        qk_norm=True,
        windows=(None, 3),
        ropes=(RopeSpec.from_base(1e4, 16), RopeSpec.from_base(1e2, 16)),
        rope_indices=(0, 1),
    ),
}
# Attributes that the walk leaves out, and why.
EXCLUDED = {
    "alone it contradicts the shapes of the weights": [
        *["num_vectors", "key_dim", "value_dim", "num_key_heads"],
        *["num_value_heads", "qkv_sizes", "matrices_size", "shard_sizes", "sources", "full_sizes"],
        "num_ids",
    ],
    "it belongs to the tokenizer": ["vocab_size", "first_id"],
    "it does not affect the forward pass": ["training", "is_stacked"],
    "most of these models have one RoPE": ["rope_index"],
    "one rank reduces nothing there": [
        "ColumnParallelLinear.tp",
        "Experts.tp",
        "GatedDeltaRule.tp",
    ],
}
LOADING = {"targets", "name_targets", "check_loaded", "quantize"}  # methods
# Parts of which more than a call is used, so that they cannot be wrapped.
NOT_ONLY_CALLED = {"embed_tokens", "lm_head", "layers", "rotaries", "in_proj_qkvz"}


def change_result(result):
    """The numbers in another order. RMSNorm would undo a factor."""
    if isinstance(result, tuple):
        return tuple(map(change_result, result))
    if isinstance(result, Batch):
        return replace(result, block_tables=change_result(result.block_tables))
    return result.roll(1, -1) if result.shape[-1] > 1 else -result


def wrap(function):
    return lambda *args: change_result(function(*args))


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return change_result(self.inner(*args))


def override(name, part):
    original = getattr(type(part), name)
    part.__class__ = type("Changed", (type(part),), {name: wrap(original)})


def replace_attribute(name, make, part):
    setattr(part, name, make(getattr(part, name)))


def add_hook(part):
    part.register_forward_hook(lambda part, args, result: change_result(result))


def add_pre_hook(part):
    part.register_forward_pre_hook(lambda part, args: (change_result(args[0]), *args[1:]))


def list_methods(part):
    """What computes in a class of this project, and in its bases."""
    names = []
    for kind in type(part).__mro__:
        if kind.__module__.startswith("nanovllm"):
            names += [name for name, each in vars(kind).items() if type(each) is FunctionType]
    return sorted({name for name in names if name not in LOADING and name[0] != "_"})


def find_new_values(part, name, value):
    """Other values of an attribute. Raises KeyError for a kind that this test does not know."""
    if isinstance(value, torch.Tensor):
        random = torch.Generator().manual_seed(3)
        other = value + 0.3 * torch.rand(value.shape, generator=random)
        if not isinstance(value, nn.Parameter):
            return [other]
        parameter = nn.Parameter(other, requires_grad=False)
        return [parameter, None] if name == "bias" else [parameter]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, float):
        return [3 * value + 0.1]
    if isinstance(value, TensorParallel):
        methods = dict.fromkeys(["all_reduce", "gather"], lambda tp, x: change_result(x))
        changed = type("Changed", (TensorParallel,), methods)
        second = TensorParallel(rank=1, size=2)
        return [changed()] + ([second] if getattr(part, "bias", None) is not None else [])
    if value is torch_backend or value is cpp_backend:
        return [SimpleNamespace(**vars(value) | {"attend": wrap(value.attend)})]
    if isinstance(value, AttentionShape):
        return [replace(value, scale=3 * value.scale), replace(value, window=2)]
    if name == "num_experts_per_tok":
        return [1]
    if name in ("q_norm", "k_norm"):
        return [randomize(RMSNorm(16, 0.5, torch.float32))]
    if name == "bias":
        return [nn.Parameter(torch.linspace(-1, 1, len(part.weight)), requires_grad=False)]
    if name == "lm_head":
        head = deepcopy(part.model.embed_tokens)
        head.weight += 0.3
        return [head]
    raise KeyError(f"another value of {name} = {value!r}")


def list_changes(model):
    """Yield changes of one method, attribute or part: a path, a name, and what to do with it."""
    excluded = {name for names in EXCLUDED.values() for name in names}
    for path, part in model.named_modules():
        for method in list_methods(part):
            yield path, f"override {method}", partial(override, method)
            yield path, f"replace {method}", partial(replace_attribute, method, wrap)
        attributes = {**vars(part), **part._parameters, **part._buffers}
        for name, value in attributes.items():
            if name[0] == "_" or {name, f"{type(part).__name__}.{name}"} & excluded:
                continue
            for i, new in enumerate(find_new_values(part, name, value)):
                change = partial(replace_attribute, name, lambda old, new=new: new)
                yield path, f"{name} = value {i}", change
        for name, _ in part.named_children():
            if path and name not in NOT_ONLY_CALLED and type(part) is not nn.ModuleList:
                yield path, f"wrap {name}", partial(replace_attribute, name, Wrapper)


def list_hooks(model):
    for path, part in model.named_modules():
        if path != "lm_head" and type(part) is not nn.ModuleList:
            yield path, "hook", add_hook
            if path not in ("", "model"):  # which take a Batch
                yield path, "pre-hook", add_pre_hook


def compute(model, spec, backend):
    """Logits of a chunk behind a prefix and a decode."""
    random = torch.Generator().manual_seed(1)
    worker = SimpleNamespace(
        spec=spec, backend=backend, block_size=16, tp=ALONE, has_mtp_head=False
    )
    caches = Worker.make_caches(worker, CPU, 4, 0, 4)
    for cache in caches:
        cache.copy_(torch.randn(cache.shape, generator=random))
    tables = torch.arange(4, dtype=torch.int32).view(2, 2)
    tokens = torch.arange(6, dtype=torch.int32)
    batch = replace(
        make_batch([5, 1], [9, 20], tables),
        input_ids=7 * tokens,
        positions=torch.tensor([4, 5, 6, 7, 8, 19], dtype=torch.int32),
        slot_mapping=torch.tensor([4, 5, 6, 7, 8, 51], dtype=torch.int32),
        read_slots=tokens[:2],
        write_slots=tokens[2:4],
    )
    with torch.inference_mode():
        return model.compute_logits(model(batch, caches))


def check(list_all, family, language):
    """Apply each change alone, before layers are optimized, or to optimized layers if it is a hook.

    Each must have the effect that it has without optimized layers.
    """
    spec = SPECS[family]
    backend = cpp_backend
    if language == "triton":
        backend = import_module("nanovllm.kernels.cuda.attention")
    model = randomize(spec.make_model(torch_backend))
    unchanged = compute(model, spec, torch_backend)
    ignored = []
    for path, name, change in list_all(model):
        # The first layer is as the second, except with deltas. Triton's interpreter is slow.
        is_first = path.startswith("model.layers.0") and "delta" not in family
        is_rare = name.startswith(("pre-hook", "replace", "wrap"))
        is_slow = language == "triton" and (is_rare or "_proj" in path or "layers" not in path)
        if is_first or is_slow:
            continue
        plain = randomize(spec.make_model(torch_backend))
        change(plain.get_submodule(path))
        expected = compute(plain, spec, torch_backend)
        assert (expected - unchanged).abs().max() > 1e-3, f"{path}: {name} is no change"
        optimized = randomize(spec.make_model(backend))
        if list_all is list_changes:
            change(optimized.get_submodule(path))
            optimize(optimized, language)
        else:
            optimize(optimized, language)
            compute(optimized, spec, backend)
            try:
                change(optimized.get_submodule(path))
            except AttributeError:
                continue  # the part has been merged into another one
        output = compute(optimized, spec, backend)
        if not torch.allclose(output, expected, atol=1e-4, rtol=1e-4):
            ignored.append(f"{path}: {name}")
    assert not ignored, "\n".join(ignored)


@needs_compiler
@pytest.mark.parametrize("list_all", [list_changes, list_hooks])
@pytest.mark.parametrize("family", SPECS)
def test_no_change_and_no_hook_is_ignored(family, list_all):
    check(list_all, family, "cpp")


@needs_triton
@pytest.mark.skipif(DEVICE.type == "cuda", reason="the plain model is on the CPU")
@pytest.mark.parametrize(
    "list_all", [list_changes, pytest.param(list_hooks, marks=pytest.mark.sweep)]
)
def test_no_change_is_ignored_by_triton_layers(list_all):
    check(list_all, "ropes", "triton")


@needs_compiler
@pytest.mark.parametrize("family", ["norms", "delta"])
def test_hidden_states_that_hooks_keep_do_not_change(family):
    """Layers that compute in place must not write to what they were given."""
    spec = SPECS[family]
    kept = []
    model = optimize(randomize(spec.make_model(cpp_backend)), "cpp")
    part = model.get_submodule("model.embed_tokens" if family == "norms" else "model.layers.0")
    part.register_forward_hook(lambda part, args, result: kept.extend([result, result.clone()]))
    compute(model, spec, cpp_backend)
    assert torch.equal(kept[0], kept[1])


@needs_compiler
@pytest.mark.parametrize("family", ["norms", "delta"])
def test_parts_that_are_replaced_later_stay_in_memory(family):
    """The C++ code has pointers to their tensors."""
    spec = SPECS[family]
    model = optimize(randomize(spec.make_model(cpp_backend)), "cpp")
    compute(model, spec, cpp_backend)
    layer = model.model.layers[-1]
    tensors = [ref(layer.input_layernorm.weight), ref(layer.mlp.gate_up.panels)]
    layer.input_layernorm.weight = nn.Parameter(torch.ones_like(tensors[0]()))
    layer.mlp = nn.Identity()
    gc.collect()
    assert None not in [tensor() for tensor in tensors]
