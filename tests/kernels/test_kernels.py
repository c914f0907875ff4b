"""Layers with and without kernelize: the same weights, the same results. And life without a compiler."""

import errno
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    DEVICE,
    Oracle,
    cover_pairs,
    make_batch,
    make_checkpoint,
    make_sampling_batch,
    random_prompt,
)
from test_attention import check_attends
from torch import nn
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from nanovllm import LLM, SamplingParams, kernels
from nanovllm.backends import BACKENDS
from nanovllm.batch import Batch, SamplingBatch
from nanovllm.kernels import OptimizedLayer, kernelize
from nanovllm.kernels.check import check_backend
from nanovllm.kernels.cpu import attention as cpp_backend
from nanovllm.kernels.cpu import layers as cpu_layers
from nanovllm.kernels.cpu import library as cpu_library
from nanovllm.kernels.cpu.fused_layers import FusedLayers
from nanovllm.kernels.cpu.prepacked import PrepackedWeight
from nanovllm.layers import attention as torch_backend
from nanovllm.layers.attention import Backend
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import RopeSpec, RotaryEmbedding
from nanovllm.layers.sampler import Sampler
from nanovllm.layers.tensor_parallel import ALONE
from nanovllm.models.decoder import MLP, Attention, DecoderLayer, DecoderLayers, DecoderSpec
from nanovllm.models.opt import OPTLayer, OPTSpec
from nanovllm.models.weights import load_checkpoint

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(
    which(os.environ.get("CXX", "c++")) is None, reason="no C++ compiler"
)
needs_products = pytest.mark.skipif(
    not cpu_library.has_gemm(torch.bfloat16), reason="no compiler, or AMX that is not allowed"
)
all_dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
# For this machine's processor, and for lesser ones whose instructions it has too.
PROCESSORS = {"AVX512": ["x86-64-v4", "x86-64-v3", "x86-64"], "AVX2": ["x86-64-v3", "x86-64"]}
needs_triton = pytest.mark.skipif(not find_spec("triton"), reason="no triton")
all_kernels = pytest.mark.parametrize(
    "functions, device",
    [
        pytest.param("cpu", "cpu", marks=needs_compiler),
        pytest.param("cuda", DEVICE.type, marks=needs_triton),
    ],
)


def exchange(
    module: nn.Module, optimized: list[type[OptimizedLayer]], dtype: torch.dtype = torch.float32
) -> nn.Module:
    """kernelize, with these optimized layers."""
    with patch.object(kernels, "find_optimized_layers", lambda device_type, dtype: optimized):
        kernelize(module, DEVICE, dtype)
        return module


def with_kernels(module: nn.Module, functions: str) -> nn.Module:
    """`module`, its layers replaced by those of kernels/cuda/layers.py, or of kernels/cpu/layers.py without GEMM."""
    optimized = (
        cuda_layers().OPTIMIZED_LAYERS if functions == "cuda" else cpu_layers.LAYERS_WITHOUT_GEMM
    )
    fast = exchange(module, optimized)
    left = {base for layer in optimized for base in layer.__bases__} & {
        type(layer) for layer in fast.modules()
    }
    assert left <= ({Attention} if functions == "cuda" else set()), (
        "on a GPU, it has a twin only where Triton stores K/V"
    )
    return fast


def cuda_layers() -> ModuleType:
    return import_module("nanovllm.kernels.cuda.layers")


@contextmanager
def threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_layers(dtype: torch.dtype, device: str) -> nn.ModuleDict:
    """A layer of each kind that has a twin on any device, always of the same weights; the MLP's projections are taken out."""
    torch.manual_seed(0)
    spec = DecoderSpec(
        vocab_size=80, hidden_size=100, num_layers=1, num_heads=5, num_kv_heads=5, head_dim=20, intermediate_size=150,
        norm_eps=1e-3, rope=RopeSpec.from_base(1e4, 20), qk_norm=True, qkv_bias=False, o_bias=False, tie_embeddings=True,
        max_len=16, dtype=dtype,
    )  # fmt: skip
    norm, attention, mlp = (
        RMSNorm(300, 1e-3, dtype),
        Attention(spec, torch_backend, ALONE),
        MLP(spec, ALONE),
    )
    mlp.gate_up_proj, mlp.down_proj = nn.Identity(), nn.Identity()
    layers = nn.ModuleDict(
        {"norm": norm, "attention": attention, "mlp": mlp, "sampler": Sampler(80)}
    )
    for parameter in layers.parameters():
        nn.init.normal_(parameter)
    return layers.requires_grad_(False).to(device)


@pytest.fixture
def no_kernels_known() -> Iterator[None]:
    """Forget which kernels are loaded, before and after."""
    cached = (
        kernels.find_optimized_layers,
        cpu_library.reason_unavailable,
        cpu_library.load,
        cpu_library.has_gemm,
    )
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.fixture(params=["native", *PROCESSORS.get(torch.backends.cpu.get_cpu_capability(), [])])
def processor(
    request: pytest.FixtureRequest, no_kernels_known: None, monkeypatch: pytest.MonkeyPatch
) -> str:
    """The kernels are compiled for it."""
    if request.param != "native":
        monkeypatch.setattr(cpu_library, "FLAGS", [*cpu_library.FLAGS, f"-march={request.param}"])
    return request.param


@all_kernels
@pytest.mark.parametrize(
    "dtype, tolerance",
    [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)],
    ids=str,
)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 200])
def test_layers(
    num_tokens: int, dtype: torch.dtype, tolerance: float, functions: str, device: str
) -> None:
    torch.manual_seed(0)
    wide = torch.randn(num_tokens, 3 * 5 * 20).to(device, dtype)
    heads = wide.split(100, dim=-1)[1].unflatten(
        -1, (5, 20)
    )  # as from a fused projection: tokens lie apart
    angles = torch.randn(num_tokens, 1, 10).to(device)

    def compute(layers: nn.ModuleDict) -> list[torch.Tensor]:
        attention, cos_sin = layers["attention"], (angles.cos(), angles.sin())
        rotated = [
            attention.norm_and_rotate(heads, norm, cos_sin) for norm in (None, attention.q_norm)
        ]
        return [layers["norm"](wide), *rotated, layers["mlp"](wide * 5)]

    outputs = compute(with_kernels(make_layers(dtype, device), functions))
    for output, expected in zip(outputs, compute(make_layers(dtype, device))):
        assert output.dtype == dtype and output.is_contiguous()
        torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)


@needs_compiler
@pytest.mark.parametrize(
    "dtype, tolerance",
    [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)],
    ids=str,
)
@pytest.mark.parametrize("has_weights", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 200])
def test_layers_of_opt(
    num_tokens: int, has_weights: bool, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    spec = OPTSpec(
        vocab_size=80, hidden_size=100, embedding_size=100, num_layers=1, num_heads=5, num_kv_heads=5, head_dim=20,
        intermediate_size=150, norm_first=True, final_norm=True, norm_has_weights=has_weights, bias=True, tie_embeddings=True,
        max_len=16, dtype=dtype,
    )  # fmt: skip
    layer = OPTLayer(spec, torch_backend, ALONE).requires_grad_(False)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(num_tokens, 100).to(dtype) * 3 + 1
    x[:1, 1] = torch.nan
    x[1:2] *= 1e-3  # so that eps counts
    expected = layer.final_layer_norm(x), layer.mlp(x)
    fast = with_kernels(layer, "cpu")
    assert type(fast) is cpu_layers.FastOPTLayer
    for output, exact in zip((fast.final_layer_norm(x), fast.mlp(x)), expected):
        torch.testing.assert_close(output, exact, atol=tolerance, rtol=tolerance, equal_nan=True)


@all_kernels
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 2e-6), (torch.float16, 2e-3)], ids=str
)
def test_norms_of_any_shape(
    dtype: torch.dtype, tolerance: float, functions: str, device: str
) -> None:
    """As the layers that they replace: heads, one row without a batch, rows that lie apart."""
    torch.manual_seed(0)
    norms = [RMSNorm(20, 1e-3, dtype)]
    if functions == "cpu":
        options = [{}, {"bias": False}, {"elementwise_affine": False}]
        norms += [nn.LayerNorm(20, dtype=dtype, **each) for each in options]
    layers = nn.ModuleList(norms).requires_grad_(False).to(device)
    for parameter in layers.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(7, 3, 40).to(device, dtype)
    inputs = [
        x[:, :, :20],
        x[:, 0, 20:],
        x[0, 0, :20],
        x[:, :, ::2],
        x[:0, :, :20],
        x[:20, 0].expand(7, 40)[:, :20],
    ]
    inputs += [x.transpose(0, 1)[..., :20], x.reshape(7, 3, 2, 20)]
    expected = [[layer(each) for each in inputs] for layer in layers]
    for layer, outputs in zip(with_kernels(layers, functions), expected):
        for each, output in zip(inputs, outputs):
            torch.testing.assert_close(layer(each), output, atol=tolerance, rtol=tolerance)


@all_kernels
@pytest.mark.parametrize("num_tokens", [0, 1, 200])
def test_angles(num_tokens: int, functions: str, device: str) -> None:
    positions = torch.randint(40_000, (num_tokens,), generator=torch.Generator().manual_seed(0)).to(
        device, torch.int32
    )
    rotary = RotaryEmbedding(replace(RopeSpec.from_base(1e4, 20), attention_factor=1.5)).to(device)
    expected = rotary(positions)
    for output, exact in zip(with_kernels(rotary, functions)(positions), expected):
        assert output.dtype == torch.float32 and output.is_contiguous()
        torch.testing.assert_close(output, exact, atol=2e-6, rtol=2e-6)


GATES = [
    -1e4,
    -100.0,
    -89.0,
    -88.0,
    -87.0,
    -1.0,
    -0.0,
    0.0,
    1.0,
    88.0,
    89.0,
    100.0,
    1e4,
    1e38,
    torch.inf,
    torch.nan,
] * 3


@all_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_extreme_numbers(dtype: torch.dtype, functions: str, device: str) -> None:
    """Infinite where torch's numbers are, and NaN where they are and nowhere else."""
    gates = torch.tensor(GATES, dtype=dtype, device=device)
    gate_up = torch.cat((gates, torch.ones_like(gates)))[None]
    pairs = torch.tensor(
        [[0.0, 0.0], [1e30, -2e30], [1e38, 1.0], [1e-30, 0.0], [torch.inf, 1.0], [torch.nan, 1.0]]
    )
    rows = pairs.to(device, dtype)
    angles = torch.ones(len(rows), 1, 10, dtype=torch.float32, device=device)

    def compute(layers: nn.ModuleDict) -> list[torch.Tensor]:
        attention, norm = layers["attention"], layers["norm"]
        for each in (norm, attention.q_norm):
            nn.init.ones_(each.weight)
            each.eps = 1e-6
        rotated = attention.norm_and_rotate(
            rows.repeat(1, 10)[:, None], attention.q_norm, (angles, angles * 0.5)
        )
        return [layers["mlp"](gate_up), norm(rows.repeat(1, 150)), rotated]

    outputs = compute(with_kernels(make_layers(dtype, device), functions))
    torch.testing.assert_close(outputs, compute(make_layers(dtype, device)), equal_nan=True)


@all_kernels
def test_silu_to_the_last_digits(functions: str, device: str) -> None:
    gates = torch.linspace(-86.0, 90.0, 100_001, dtype=torch.float32, device=device)
    mlp = with_kernels(make_layers(torch.float32, device)["mlp"], functions)
    output = mlp(torch.cat((gates, torch.ones_like(gates)))[None])[0]
    torch.testing.assert_close(
        output.double(), F.silu(gates.double()), rtol=5e-7 if functions == "cpu" else 1e-5, atol=0
    )


@needs_products
@all_dtypes
def test_extreme_gates(dtype: torch.dtype, processor: str) -> None:
    gates = torch.tensor(GATES, dtype=dtype)
    weight = torch.stack(
        (torch.cat((gates, torch.ones_like(gates))), gates.new_zeros(2 * len(gates))), dim=-1
    )
    x = torch.tensor([[1.0, 0.0]] * 40, dtype=dtype)
    expected = F.silu(gates).expand(40, -1)
    torch.testing.assert_close(
        PrepackedWeight(weight, gated=True).multiply(x), expected, equal_nan=True
    )


@all_kernels
@pytest.mark.parametrize("has_kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_surroundings_change_nothing(
    dtype: torch.dtype, has_kernels: bool, functions: str, device: str
) -> None:
    """Neither torch's default device and dtype nor its deterministic algorithms."""
    torch.manual_seed(0)
    wide = torch.randn(4, 300).to(device, dtype)
    heads, logits = wide[:, :80].unflatten(1, (4, 20)), wide[:, :80].contiguous()
    angles = torch.randn(2, 4, 1, 10).to(device)
    params = [SamplingParams(temperature=t, top_p=p) for t in (0.0, 1.0) for p in (0.5, 1.0)]
    layers = make_layers(dtype, device)
    layers = with_kernels(layers, functions) if has_kernels else layers
    new_sampler = type(layers["sampler"])

    def compute() -> list[torch.Tensor]:
        batch = make_sampling_batch(params, [1, 2, 3, 4], [5, 6, 7, 8], 80, device)
        tokens = [
            new_sampler(80).to(device)(logits, batch),
            layers["sampler"](logits, SamplingBatch()),
        ]
        rotated = layers["attention"].norm_and_rotate(heads, layers["attention"].q_norm, angles)
        outputs = [layers["norm"](wide), rotated, layers["mlp"](wide), *tokens]
        if PrepackedWeight.can_prepack(logits):
            weight = PrepackedWeight(logits)
            outputs += [
                weight.multiply(logits),
                weight.rows(torch.zeros_like(tokens[0], dtype=torch.int32)),
            ]
        return outputs

    expected = compute()
    try:
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(device == "cpu")  # on a GPU, torch refuses cumsum
        outputs = compute()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    for one, other in zip(outputs, expected):
        assert one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)


@needs_products
@all_dtypes
@pytest.mark.parametrize(
    "in_features, out_features", [(2, 1), (30, 64), (31, 40), (64, 100), (320, 16), (4096, 130)]
)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
def test_packed_weight(
    in_features: int, out_features: int, has_bias: bool, dtype: torch.dtype, processor: str
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(out_features, in_features).to(dtype)
    assert PrepackedWeight.can_prepack(weight) == (dtype == torch.float32 or in_features % 2 == 0)
    if not PrepackedWeight.can_prepack(weight):
        return
    packed_weight = PrepackedWeight(weight)
    bias = torch.randn(out_features).to(dtype) if has_bias else None
    for num_rows in (0, 1, 2, 5, 12, 13, 17, 32, 150):  # 4096 inputs: more rows than one pass takes
        x = torch.randn(num_rows, in_features).to(dtype)
        expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        atol = (2e-6 if dtype == torch.float32 else 1e-3) * in_features**0.5
        output = packed_weight.multiply(x, bias)
        torch.testing.assert_close(
            output.double(), expected, atol=atol, rtol=torch.finfo(dtype).eps
        )
        wide = torch.cat((x, x), dim=-1)[
            :, None, :in_features
        ]  # rows that lie apart, in another shape
        assert torch.equal(packed_weight.multiply(wide, bias), output[:, None])
        assert torch.equal(packed_weight.multiply(x[:1], bias), output[:1]), (
            "a row's company changes it"
        )
    ids = torch.tensor([out_features - 1, 0, out_features // 2], dtype=torch.int32)
    assert torch.equal(packed_weight.rows(ids), weight[ids])


@needs_products
@all_dtypes
@pytest.mark.parametrize("in_features, out_features", [(2, 1), (30, 16), (64, 100), (1030, 48)])
def test_gated_weight(
    in_features: int, out_features: int, dtype: torch.dtype, processor: str
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(2 * out_features, in_features).to(dtype)
    for num_rows in (0, 1, 12, 33, 150):
        x = torch.randn(num_rows, in_features).to(dtype) / in_features**0.5
        gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
        output = PrepackedWeight(weight, gated=True).multiply(x)
        tolerance = (
            {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-3, "rtol": 8e-3}
        )
        torch.testing.assert_close(output.double(), F.silu(gate) * up, **tolerance)


@needs_products
@pytest.mark.parametrize("bits", range(0, 1 << 16, 1 << 14))
def test_every_float16(bits: int, processor: str) -> None:
    """Read as torch reads it, and written back the same, as one of many rows and as a single one."""
    numbers = (
        torch.arange(bits, bits + (1 << 14), dtype=torch.int32).to(torch.uint16).view(torch.float16)
    )
    rows = torch.stack((numbers, torch.zeros_like(numbers)), dim=-1)
    x = torch.tensor([[1.0, 0.0]] * 7, dtype=torch.float16)
    for num_rows in (1, 7):
        output = PrepackedWeight(rows).multiply(x[:num_rows])
        torch.testing.assert_close(
            output, numbers.expand(num_rows, -1), rtol=0, atol=0, equal_nan=True
        )
    mlp = with_kernels(make_layers(torch.float16, "cpu")["mlp"], "cpu")
    output = mlp(torch.cat((torch.full_like(numbers, 20.0), numbers))[None])
    torch.testing.assert_close(
        output[0],
        (F.silu(torch.tensor(20.0)) * numbers.float()).half(),
        rtol=0,
        atol=0,
        equal_nan=True,
    )


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "lengths", [([1] * 3, [3, 700, 129]), ([70, 1, 9], [133, 40, 9])], ids=["decode", "prefill"]
)
@pytest.mark.parametrize("heads", [(4, 2, 80), (14, 2, 128), (3, 1, 10)], ids=str)
def test_attention_on_any_processor(
    lengths: tuple[list[int], list[int]],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    processor: str,
) -> None:
    check_attends(cpp_backend, lengths, heads, 16, dtype)


@needs_products
@all_dtypes
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"attention_bias": True},
        {"num_key_value_heads": 1},
        {"head_dim": 10},
        {"num_hidden_layers": 1},
    ],
    ids=str,
)
def test_fused_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any], dtype: torch.dtype
) -> None:
    """The same hidden states and K/V as without kernelize, and as with optimized layers, layer by layer: in long steps and short ones, of
    prefills, pieces and decodes."""
    make_checkpoint(tmp_path, dtype=dtype, max_position_embeddings=1024, **shape)
    llm = LLM(
        str(tmp_path),
        device="cpu",
        num_kvcache_blocks=64,
        kvcache_block_size=16,
        max_num_batched_tokens=640,
    )
    runner, batches = llm.model_runner, []
    prepare_batch = runner.prepare_batch
    monkeypatch.setattr(
        runner,
        "prepare_batch",
        lambda seqs: batches.append(deepcopy(prepare_batch(seqs))) or batches[-1],
    )
    prompts = [random_prompt(n, n) for n in (600, 3, 100, 40)]
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
    assert {batch.max_seqlen_q for batch in batches} >= {1, 600} and any(
        len(b.context_lens) > 1 for b in batches
    )

    executor = runner.executor.worker
    plain, layerwise = (executor.spec.make_model(torch_backend) for _ in range(2))
    for model in (plain, layerwise):
        load_checkpoint(model, tmp_path)
    kernelize(layerwise, CPU, dtype)  # not fused: it attends with torch
    models = [executor.model, plain, layerwise]
    assert [isinstance(model.model.layers, FusedLayers) for model in models] == [True, False, False]
    kv_caches = [
        [torch.full_like(cache, poison) for cache in executor.kv_caches]
        for poison in (3.0, 5.0, 7.0)
    ]
    tolerance = (
        {"atol": 2e-4, "rtol": 2e-4} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.05}
    )
    with torch.inference_mode():
        for batch in batches:
            hidden = [model(batch, caches) for model, caches in zip(models, kv_caches)]
            written = [
                [cache.flatten(1, 2)[:, batch.slot_mapping] for cache in caches]
                for caches in kv_caches
            ]
            for other in (1, 2):
                torch.testing.assert_close(hidden[0], hidden[other], **tolerance)
                torch.testing.assert_close(written[0], written[other], **tolerance)
            for num_threads in (
                1,
                2,
                3,
            ):  # a piece for each thread, or, with three, pieces that they share: the same bits
                with threads(num_threads):
                    assert torch.equal(models[0](batch, kv_caches[0]), hidden[0])
    assert all(
        (cache.flatten(1, 2) == 3.0).all((-2, -1)).any() for cache in kv_caches[0]
    )  # and no other slots


@needs_products
@all_dtypes
def test_other_requests_change_no_logits(make_llm: Callable[..., LLM], dtype: torch.dtype) -> None:
    """To the bit: a prompt and its decodes, alone and in a batch."""
    llm = make_llm(dtype=str(dtype).removeprefix("torch."), enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=5)
    prompts = [random_prompt(n, n) for n in (30, 1, 9, 17, 40)]
    together = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, together):
        (alone,) = llm.generate([prompt], params, use_tqdm=False)
        assert (alone["token_ids"], alone["logprobs"]) == (output["token_ids"], output["logprobs"])


@all_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [5, 1024, 5001])
def test_sample(vocab_size: int, dtype: torch.dtype, functions: str, device: str) -> None:
    """The same tokens as with torch, greedy rows and filtered rows among them; of equal logits the first."""
    torch.manual_seed(0)
    logits = torch.randn(32, vocab_size).to(device, dtype)
    logits[0] = 1.0
    params = [
        SamplingParams(temperature=t, top_k=k) for t in (0.0, 0.7, 1.3, 1e-3) for k in (-1, 3)
    ] * 4
    batch = make_sampling_batch(params, list(range(32)), list(range(100, 132)), vocab_size, device)
    sampler = Sampler(vocab_size).to(device)
    expected = sampler(logits, batch)
    sampler = with_kernels(sampler, functions)
    tokens = sampler(logits, batch)
    assert torch.equal(sampler(logits, SamplingBatch()), logits.float().argmax(-1))
    assert sampler(logits[:0], SamplingBatch()).shape == (0,)
    assert torch.equal(tokens, expected) and tokens[0] == 0


@all_kernels
@pytest.mark.parametrize("has_kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [3, 5001])
def test_sample_from_extreme_logits(
    vocab_size: int, dtype: torch.dtype, has_kernels: bool, functions: str, device: str
) -> None:
    """-1 for a row with a NaN, and for no other; a token that can be drawn for all others."""
    kinds = [{"temperature": t} for t in (0.0, 1e-6, 1.0, 1e6)] + [
        {"top_k": 2},
        {"top_p": 0.5},
        {"min_p": 0.1},
    ]
    kinds += [
        {"top_k": 2, "top_p": 0.5, "min_p": 0.1},
        {"top_p": 1e-50},
        {"top_p": 0.9, "temperature": 1e-6},
    ]
    sampler, last = Sampler(vocab_size).to(device), vocab_size - 1
    sampler = with_kernels(sampler, functions) if has_kernels else sampler
    noise = torch.randn(vocab_size, generator=torch.Generator().manual_seed(0))
    all_low, one_left, one_high, two_high = (noise.clone() for _ in range(4))
    all_low[:] = -torch.inf
    one_left[:last] = -torch.inf
    one_high[last], two_high[1:] = torch.inf, torch.inf
    rows, expected = [all_low, one_left, one_high, two_high], [0, last, last, 1]
    everywhere = slice(vocab_size)
    for where, others in (
        (0, noise),
        (last, noise),
        (last // 2, all_low),
        (last // 2, two_high),
        (everywhere, noise),
    ):
        for nan in (torch.nan, -torch.tensor(torch.nan)):  # its sign bit is set
            rows.append(others.clone())
            rows[-1][where] = nan
            expected.append(-1)
    logits = torch.stack(rows).to(device, dtype)
    for kind in kinds:
        params = [SamplingParams(**kind)] * len(rows)
        batch = make_sampling_batch(
            params, list(range(len(rows))), [3] * len(rows), vocab_size, device
        )
        assert sampler(logits, batch).tolist() == expected, kind


# --- Kernels in Triton for several layers at once


@needs_triton
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16], ids=str
)  # the interpreter truncates to bfloat16
@pytest.mark.parametrize("size", [5, 100, 2048])
def test_add_and_norm(size: int, dtype: torch.dtype) -> None:
    """Every bit as torch's sum and the kernel of the norm alone; what is added to is left as it was."""
    torch.manual_seed(0)
    x, branch, weight = (
        torch.randn(2, 7, size).to(DEVICE, dtype) * 3,
        torch.randn(7, size).to(DEVICE, dtype),
        torch.randn(size),
    )
    x, before, weight = x[0], x[0].clone(), weight.to(DEVICE, dtype)
    add_rms_norm = cuda_layers().add_rms_norm
    total, normed = add_rms_norm(x, branch, weight, 1e-3)
    assert torch.equal(total, x + branch) and torch.equal(
        normed, add_rms_norm(total, None, weight, 1e-3)[1]
    )
    assert torch.equal(x, before)


@needs_triton
@pytest.mark.parametrize(
    "heads, has_norm, dtype",
    cover_pairs(
        [(5, 5, 20), (4, 2, 16), (14, 2, 64), (3, 1, 128), (12, 4, 256)],
        [True, False],
        [torch.float32, torch.bfloat16],
    ),
    ids=str,
)
def test_rotate_and_store(heads: tuple[int, int, int], has_norm: bool, dtype: torch.dtype) -> None:
    """What the layer and the torch backend compute of the same projections, and nothing written but the slots."""
    num_heads, num_kv_heads, head_dim = heads
    torch.manual_seed(0)
    qkv = torch.randn(6, (num_heads + 2 * num_kv_heads) * head_dim).to(DEVICE, dtype)
    angles = torch.randn(6, 1, head_dim // 2).to(DEVICE)
    attention = make_layers(dtype, DEVICE.type)["attention"]
    norms = [RMSNorm(head_dim, 1e-3, dtype).to(DEVICE) if has_norm else None for _ in "qk"]
    for norm in filter(None, norms):
        nn.init.normal_(norm.weight)
    slots = torch.tensor([9, -1, 63, 0, -1, 17], dtype=torch.int32, device=DEVICE)
    caches = [
        torch.full((2, 4, 16, num_kv_heads, head_dim), 7.0, dtype=dtype, device=DEVICE)
        for _ in range(2)
    ]

    with torch.inference_mode():
        query = cuda_layers().rotate_and_store(
            qkv, *norms, (angles.cos(), angles.sin()), caches[0], slots
        )
        parts = qkv.unflatten(1, (-1, head_dim)).split(
            [num_heads, num_kv_heads, num_kv_heads], dim=1
        )
        rotated = [
            attention.norm_and_rotate(part, norm, (angles.cos(), angles.sin()))
            for part, norm in zip(parts, norms)
        ]
        torch_backend.store_kvcache(rotated[1], parts[2], caches[1], slots)
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(query, rotated[0], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(caches[0][0], caches[1][0], atol=tolerance, rtol=tolerance)
    assert torch.equal(caches[0][1], caches[1][1])
    assert query.is_contiguous() and (caches[0].flatten(1, 2) == 7.0).all(-1).all(-1).sum() == 2 * (
        64 - 4
    )


@all_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [3, 97, 5_000])
def test_filter(vocab_size: int, dtype: torch.dtype, functions: str, device: str) -> None:
    """What the specification keeps, with equal logits at the cuts; where there are many, seldom those of one value less."""
    torch.manual_seed(0)
    logits = (torch.randn(24, vocab_size) * 3).to(device, dtype)
    logits[::2] = logits[::2].round()
    logits[3], logits[4, : vocab_size // 2], logits[4, vocab_size // 2 :] = 1.0, 0.0, -0.0
    logits[5, ::3] = -torch.inf
    before = logits.clone()
    names, rows = ("temperature", "top_k", "top_p", "min_p"), len(logits)
    settings = cover_pairs(
        (0.6, 1.0, 7.0), (-1, 1, 2, 40), (1.0, 0.53, 0.97, 1e-6, 1e-50), (0.0, 0.03)
    )
    kinds = [SamplingParams(**dict(zip(names, values))) for values in settings]
    sampler = Sampler(vocab_size).to(device)
    fast = with_kernels(deepcopy(sampler), functions)
    for shift in (0, 7):  # other settings for the same row
        params = [kinds[(row + shift) % len(kinds)] for row in range(rows)]
        batch = make_sampling_batch(params, [1] * rows, [2] * rows, vocab_size, device)
        filtered, expected = fast.filter(logits, batch), sampler.filter(logits, batch)
        different = logits[filtered != expected].unique()
        assert filtered.dtype == torch.float32 and len(different) <= (vocab_size > 1000), params
    assert torch.equal(logits, before)


@needs_triton
def test_which_layers_are_fused() -> None:
    """A stack of decoder layers and nothing else; attention with Triton's way of storing K/V and no other."""
    layers_module = cuda_layers()

    class OtherLayer(DecoderLayer):
        pass

    spec = DecoderSpec(
        vocab_size=80, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=40,
        norm_eps=1e-3, rope=RopeSpec.from_base(1e4, 16), tie_embeddings=True, max_len=16, dtype=torch.float32,
    )  # fmt: skip
    triton_backend = import_module("nanovllm.kernels.cuda.attention")
    for backend, kinds, expected in (
        (
            triton_backend,
            (DecoderLayer, DecoderLayer),
            (layers_module.FusedLayers, layers_module.FusedAttention),
        ),
        (torch_backend, (DecoderLayer, DecoderLayer), (layers_module.FusedLayers, Attention)),
        (triton_backend, (DecoderLayer, OtherLayer), (DecoderLayers, layers_module.FusedAttention)),
    ):
        layers = exchange(
            DecoderLayers(kind(spec, 0, backend, ALONE) for kind in kinds),
            layers_module.OPTIMIZED_LAYERS,
        )
        assert (type(layers), type(layers[0].self_attn)) == expected


def double(module: nn.Module, method: str = "forward") -> None:
    """Let `module` be of a subclass whose `method` returns twice as much."""
    kind, original = type(module), getattr(type(module), method)
    module.__class__ = type("Other", (kind,), {method: lambda *args: 2 * original(*args)})


def assign_double(module: nn.Module, method: str = "forward") -> None:
    original = getattr(module, method)
    setattr(module, method, lambda *args: 2 * original(*args))


CHANGES: dict[str, Callable[[DecoderLayer], object]] = {
    "nothing": lambda layer: None,
    "subclass of DecoderLayer": double,
    "subclass of Attention": lambda layer: double(layer.self_attn),
    "norm_and_rotate of a subclass": lambda layer: double(layer.self_attn, "norm_and_rotate"),
    "subclass of MLP": lambda layer: double(layer.mlp),
    "subclass of the first RMSNorm": lambda layer: double(layer.input_layernorm),
    "subclass of the second RMSNorm": lambda layer: double(layer.post_attention_layernorm),
    "subclass of the query's RMSNorm": lambda layer: double(layer.self_attn.q_norm),
    "subclass of the key's RMSNorm": lambda layer: double(layer.self_attn.k_norm),
    "subclass of ColumnParallelLinear": lambda layer: double(layer.self_attn.qkv_proj),
    "subclass of RowParallelLinear": lambda layer: double(layer.mlp.down_proj),
    "hook on a layer": lambda layer: layer.register_forward_hook(
        lambda module, args, output: 2 * output
    ),
    "hook on a key's norm": lambda layer: layer.self_attn.k_norm.register_forward_hook(
        lambda module, args, output: 2 * output
    ),
    "hook before a projection": lambda layer: layer.mlp.down_proj.register_forward_pre_hook(
        lambda module, args: 2 * args[0]
    ),
    "assigned forward": lambda layer: assign_double(layer.self_attn.o_proj),
    "assigned forward of a norm": lambda layer: assign_double(layer.input_layernorm),
    "eps of the second norm": lambda layer: setattr(layer.post_attention_layernorm, "eps", 3.0),
    "eps of the key's norm": lambda layer: setattr(layer.self_attn.k_norm, "eps", 3.0),
    "no norm of the query": lambda layer: setattr(layer.self_attn, "q_norm", None),
    "bias of the gates": lambda layer: setattr(
        layer.mlp.gate_up_proj,
        "bias",
        nn.Parameter(layer.self_attn.k_norm.weight.new_ones(2 * 40), requires_grad=False),
    ),
}


@all_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_layer_is_heard(
    change: str, dtype: torch.dtype, functions: str, device: str
) -> None:
    """Whatever is changed in a layer before kernelize has the effect that it has without."""
    spec = DecoderSpec(
        vocab_size=80, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=40,
        norm_eps=1e-3, rope=RopeSpec.from_base(1e4, 16), qk_norm=True, tie_embeddings=True, max_len=64, dtype=dtype,
    )  # fmt: skip
    torch.manual_seed(0)
    backends = {
        "cpu": cpp_backend,
        "cuda": import_module("nanovllm.kernels.cuda.attention") if functions == "cuda" else None,
    }
    lengths, tables = [9, 1], torch.arange(4, dtype=torch.int32).view(2, 2)
    slots = torch.tensor([*range(9), 51], dtype=torch.int32, device=device)
    batch = replace(make_batch(lengths, [9, 20], tables, device), slot_mapping=slots)
    x, angles = torch.randn(10, 32).to(device, dtype), torch.randn(10, 1, 8).to(device)

    def make(change: str, backend: Backend) -> DecoderLayers:
        torch.manual_seed(0)
        layers = DecoderLayers(
            DecoderLayer(spec, i, backend, ALONE) for i in range(2)
        ).requires_grad_(False)
        for parameter in layers.parameters():
            nn.init.normal_(parameter, float(parameter.dim() == 1), 0.3)
        CHANGES[change](layers[1])
        return layers.to(device)

    def compute(layers: DecoderLayers) -> torch.Tensor:
        caches = [
            torch.randn(2, 4, 16, 1, 16, generator=torch.Generator().manual_seed(1)).to(
                device, dtype
            )
            for _ in range(2)
        ]
        with torch.inference_mode():
            return layers(x.clone(), (angles.cos(), angles.sin()), caches, batch)[
                batch.logits_indices
            ]

    layers = make(change, backends[functions])
    exchange(
        layers,
        cuda_layers().OPTIMIZED_LAYERS
        if functions == "cuda"
        else cpu_layers.find_optimized_layers(dtype),
        dtype,
    )
    tolerance = 2e-5 if dtype == torch.float32 else 4e-2
    expected, unchanged = (
        compute(make(change, torch_backend)),
        compute(make("nothing", torch_backend)),
    )
    torch.testing.assert_close(compute(layers), expected, atol=tolerance, rtol=tolerance)
    assert change == "nothing" or (expected - unchanged).abs().max() > 4 * tolerance


@needs_triton
@pytest.mark.parametrize(
    "family, shape",
    [
        (Qwen3Config, {"head_dim": 20}),
        (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
        (Qwen3MoeConfig, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_engine_with_kernels_of_a_gpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: type[PretrainedConfig],
    shape: dict[str, Any],
) -> None:
    """transformers' tokens: prompts in chunks, decodes, prefix hits and preemptions."""
    oracle, layers_module = Oracle(make_checkpoint(tmp_path, family=family, **shape)), cuda_layers()
    if DEVICE.type == "cpu":
        monkeypatch.setattr(
            kernels,
            "find_optimized_layers",
            lambda device_type, dtype: layers_module.OPTIMIZED_LAYERS,
        )
    options = {"kvcache_block_size": 16, "num_kvcache_blocks": 4, "max_num_batched_tokens": 20}
    llm = LLM(str(tmp_path), device=DEVICE.type, attention_backend="triton", **options)
    kinds = {type(layer) for layer in llm.model_runner.executor.worker.model.modules()}
    assert kinds >= {layers_module.FusedLayers, layers_module.FusedAttention} and not kinds & {
        Attention,
        DecoderLayers,
        RMSNorm,
        MLP,
    }
    assert type(llm.model_runner.sampler) is layers_module.FastSampler
    prompts = [random_prompt(i, length) for i, length in enumerate((1, 15, 30))]
    for _ in range(2):
        outputs = llm.generate(
            prompts, SamplingParams(temperature=0.0, max_tokens=6), use_tqdm=False
        )
        assert [output["token_ids"] for output in outputs] == [
            oracle(prompt, 6) for prompt in prompts
        ]
    assert llm.stats["num_cached_tokens"] and llm.stats["num_preemptions"]


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_trials_of_a_start(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """They pass where the kernels are right, whatever the caller's default device is, and a wrong kernel is found: also one that
    is wrong from a context's second piece on, or joins splits wrongly. They leave the caller's random numbers alone."""
    backend, state = import_module("nanovllm.kernels.cuda.attention"), torch.get_rng_state()
    trial = partial(check_backend, backend, DEVICE, dtype, 64, 16)
    with torch.device("meta"):
        trial()
    assert torch.equal(torch.get_rng_state(), state)

    def attend_to_64(
        query: torch.Tensor, kv_cache: torch.Tensor, batch: Batch, scale: float
    ) -> torch.Tensor:
        return torch_backend.attend(
            query, kv_cache, replace(batch, context_lens=batch.context_lens.clamp(max=64)), scale
        )

    wrong: list[tuple[str, object]] = [
        ("attend", lambda query, *_: torch.zeros_like(query)),
        ("combine_splits_kernel", MagicMock(arg_names=[])),
    ]
    for name, function in (*wrong, ("attend", attend_to_64)):
        with monkeypatch.context() as patch:
            patch.setattr(backend, name, function)
            backend._prepare.cache_clear()
            with pytest.raises(RuntimeError, match="has an error of"):
                trial()
    backend._prepare.cache_clear()


@pytest.mark.parametrize("name", ["triton", "flash_attn"])
def test_a_backend_that_fails_its_trial(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Such as a wheel of flash-attn that was not built for this GPU: auto takes the next, and who asks for it is told."""

    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("no kernel image is available for execution on the device")

    gpu = torch.device("cuda")
    backend = SimpleNamespace(
        NAME=name, PREFERRED_BLOCK_SIZE=256, reason_unavailable=lambda *_: None, store_kvcache=fail
    )
    modules = {BACKENDS[name].module: backend, BACKENDS["torch"].module: torch_backend}
    monkeypatch.setattr(kernels, "import_module", modules.__getitem__)
    monkeypatch.setattr(kernels, "BACKENDS", {each: BACKENDS[each] for each in (name, "torch")})
    monkeypatch.setattr(
        kernels, "check_backend", lambda backend, device, *rest: check_backend(backend, CPU, *rest)
    )
    assert kernels.select_backend("auto", gpu, torch.bfloat16, 64, None) == (torch_backend, 16)
    assert (
        f"{name!r} cannot run here: the kernels fail on this GPU: RuntimeError('no kernel image"
        in capfd.readouterr().err
    )
    with pytest.raises(ValueError, match="no kernel image"):
        kernels.select_backend(name, gpu, torch.bfloat16, 64, None)


@needs_triton
@pytest.mark.skipif(DEVICE.type == "cuda", reason="there it works")
def test_where_triton_does_not_work(
    no_kernels_known: None, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        kernels.find_optimized_layers("cuda", torch.float32) == []
        and "plain torch layers, which are slow:" in capfd.readouterr().err
    )


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler(
    tiny: tuple[str, Oracle],
    make_llm: Callable[..., LLM],
    no_kernels_known: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    compiler: str,
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(ValueError, match="compiler"):
        make_llm(device="cpu", attention_backend="cpp")
    llm = make_llm(device="cpu")
    assert llm.model_runner.executor.worker.backend is torch_backend
    messages = capfd.readouterr().err
    assert (
        "plain torch attention, which is slow:" in messages
        and "plain torch layers, which are slow:" in messages
        and "compiler" in messages
    )
    (output,) = llm.generate(
        [random_prompt(0, 9)], SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False
    )
    assert output["token_ids"] == tiny[1](random_prompt(0, 9), 8)


# --- The compiled library


@pytest.fixture
def tiny_build(tmp_path: Path, no_kernels_known: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Kernels that compile in no time, and a home of their own: the folder in which the library belongs."""
    for name in ("sources", "home", "scratch", "here"):
        (tmp_path / name).mkdir()
    source = tmp_path / "sources" / "kernels.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setattr(cpu_library, "SOURCE", source)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home" / ".cache" / "nanovllm"


def load() -> int:
    cpu_library.load.cache_clear()
    return cpu_library.load(torch.float32).answer()


@needs_compiler
def test_compiled_once(tiny_build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load() == 42 and tiny_build.stat().st_mode & 0o777 == 0o700
    (library,) = tiny_build.iterdir()
    calls: list[tuple[str, ...]] = []
    run = subprocess.run
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda command, **options: calls.append(command) or run(command, **options),
    )
    assert load() == 42 and len(calls) == 1 and "-E" in calls[0] and library.exists()


def load_elsewhere(num_processes: int) -> None:
    """In several processes at once: one that has loaded a library would not look at its file again."""
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=lambda: sys.exit(load() != 42)) for _ in range(num_processes)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * num_processes


@needs_compiler
@pytest.mark.parametrize("share", [0, 0.01], ids=["empty", "without its end"])
def test_a_broken_library_is_built_again(tiny_build: Path, share: float) -> None:
    load_elsewhere(1)
    (library,) = tiny_build.iterdir()
    whole = library.read_bytes()
    library.write_bytes(whole[: int(share * len(whole))])
    load_elsewhere(1)
    assert [path.read_bytes() for path in tiny_build.iterdir()] == [whole]


@needs_compiler
def test_where_it_is_kept(
    tiny_build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert load() == 42 and list((tmp_path / "elsewhere" / "nanovllm").iterdir())
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert load() == 42 and list(tiny_build.iterdir()) and not list(Path.cwd().iterdir())


def fill_disk(tiny_build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copy", copy)


def lose_home(tiny_build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "HOME", str(tiny_build.parents[2] / "sources" / "kernels.cpp")
    )  # no directory


@needs_compiler
@pytest.mark.parametrize("obstruct", [fill_disk, lose_home])
def test_without_a_place_of_its_own(
    tiny_build: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    obstruct: Callable[..., None],
) -> None:
    """The library is used and not kept, and nothing is left behind."""
    obstruct(tiny_build, monkeypatch)
    assert load() == 42 and load() == 42 and "every start compiles them" in capfd.readouterr().err
    assert not list(Path(tempfile.gettempdir()).iterdir()) and not list(Path.cwd().iterdir())
    assert not tiny_build.exists() or not list(tiny_build.iterdir())


@needs_compiler
def test_built_by_many_at_once(tiny_build: Path) -> None:
    load_elsewhere(6)
    assert len(list(tiny_build.iterdir())) == 1


@needs_compiler
def test_a_compiler_of_several_words(tiny_build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"env {os.environ.get('CXX', 'c++')}")
    assert load() == 42


@pytest.mark.parametrize(
    "command, reason",
    [
        ("'c++", "'c++"),
        ("no-such-compiler", "no-such-compiler"),
        (r"sh -c 'printf \\351 >&2; false'", "code 1: \ufffd"),
    ],
)
def test_why_there_is_no_library(
    tiny_build: Path, monkeypatch: pytest.MonkeyPatch, command: str, reason: str
) -> None:
    monkeypatch.setenv("CXX", command)
    assert reason in cpu_library.reason_unavailable(torch.float32)
