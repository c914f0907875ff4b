"""Kernels that span several layers compute the same as the layers one after the other."""

from dataclasses import replace

import pytest
import torch
from conftest import (
    DEVICE,
    Oracle,
    cover_pairs,
    generate_ids,
    greedy,
    make_checkpoint,
    random_prompt,
)
from kernel_helpers import (
    CPU,
    all_dtypes,
    make_layers,
    make_spec,
    needs_compiler,
    needs_triton,
    optimize,
    randomize,
    triton_layers,
)
from torch import nn
from torch.testing import assert_close
from transformers import Qwen3MoeConfig

from nanovllm import LLM, SamplingParams
from nanovllm.batch import batch as batches
from nanovllm.batch.packing import copy_to
from nanovllm.kernels import replacement
from nanovllm.kernels.cpu import attention as cpp_backend
from nanovllm.layers import attention as torch_backend
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import RopeSpec
from nanovllm.models.decoder import MLP, Attention, DecoderLayers, DecoderSpec
from nanovllm.models.gemma3 import Gemma3Spec


@needs_compiler
@all_dtypes
@pytest.mark.parametrize("kind", [DecoderSpec, Gemma3Spec])
def test_one_call_for_layers_with_different_windows_and_ropes(layer_calls, kind, dtype):
    """The first RoPE rotates whole heads, the second one 12 of 16 dimensions."""
    limit = {torch.float32: 1e-5, torch.float16: 0.03, torch.bfloat16: 0.2}[dtype]

    def check_close(output, expected):
        assert (output - expected).norm() < limit * expected.norm()

    ropes = (RopeSpec.from_base(1e4, 16), RopeSpec.from_base(30.0, 12))
    spec = make_spec(
        dtype,
        num_layers=5,
        num_heads=4,
        num_kv_heads=2,
        qk_norm=kind is Gemma3Spec,
        qkv_bias=kind is DecoderSpec,
        windows=(20, None, 3, 300, 20),
        ropes=ropes,
        rope_indices=(0, 1, 0, 1, 1),
    )
    spec = kind(**vars(spec))
    plain = randomize(spec.make_model(torch_backend))
    fused = optimize(randomize(spec.make_model(cpp_backend)), "cpp", dtype)
    caches = []
    for window in spec.windows:
        num_blocks = 150 if window is None else 240
        caches.append(torch_backend.make_cache(num_blocks, 16, 2, 16, dtype, CPU))
    plain_caches = [cache.clone() for cache in caches]
    tables = torch.randperm(150, dtype=torch.int32).view(3, 50)
    window_tables = torch.randperm(240, dtype=torch.int32).view(3, 80)
    num_threads = torch.get_num_threads()
    with torch.inference_mode():
        for query_lens, context_lens in [
            ([70, 600, 9], [70, 600, 9]),
            ([1, 100, 7], [71, 700, 16]),
            ([1, 1, 1], [72, 701, 17]),
        ]:
            batch = copy_to(batches.make_batch(query_lens, context_lens, tables.numpy(), 16), CPU)
            ids = torch.randint(80, batch.input_ids.shape, dtype=torch.int32)
            in_windows = batches.make_batch(query_lens, context_lens, window_tables.numpy(), 16)
            batch = replace(
                batch,
                input_ids=ids,
                window_slots=torch.from_numpy(in_windows.slot_mapping),
                window_tables=window_tables,
            )
            hidden = fused(batch, caches)
            check_close(hidden, plain(batch, plain_caches))
            # The number of threads changes how work is divided, but not the result.
            torch.set_num_threads(3)
            assert torch.equal(fused(batch, caches), hidden)
            torch.set_num_threads(num_threads)
    for cache, plain_cache in zip(caches, plain_caches):
        check_close(cache, plain_cache)
    # More than 512 tokens are computed layer by layer, and the last layer's K/V separately if not
    # all tokens have logits.
    assert layer_calls == 2 * ([1] * 6) + 2 * [4, 1, 1] + 2 * [5]


@needs_compiler
@all_dtypes
def test_other_requests_do_not_change_logits(make_llm, dtype):
    llm = make_llm(dtype=str(dtype).removeprefix("torch."), enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=5)
    prompts = [random_prompt(n, n) for n in (30, 1, 9, 17, 40)]
    together = llm.generate(prompts, params)
    for prompt, output in zip(prompts, together):
        (alone,) = llm.generate([prompt], params)
        assert alone["logprobs"] == output["logprobs"]


# Triton's interpreter truncates to bfloat16, so the bits of that dtype differ.
@needs_triton
@pytest.mark.parametrize(
    "dtype, size", [(torch.float32, 5), (torch.float16, 100), (torch.float32, 2048)], ids=str
)
def test_residual_add_and_norm_round_like_two_operations(dtype, size):
    torch.manual_seed(0)
    x, branch = (torch.randn(2, 7, size) * 3).to(DEVICE, dtype)
    weight = torch.randn(size).to(DEVICE, dtype)
    before = x.clone()
    add_rms_norm = triton_layers().decoder.add_rms_norm
    total, normed = add_rms_norm(x, branch, weight, 1e-3)
    assert torch.equal(total, x + branch)
    assert torch.equal(normed, add_rms_norm(total, None, weight, 1e-3)[1])
    assert torch.equal(x, before)


@needs_triton
@pytest.mark.parametrize(
    "heads, has_norm, dtype, rotated",
    cover_pairs(
        [(5, 5, 20), (14, 2, 64), (3, 1, 128), (12, 4, 256)],
        [True, False],
        [torch.float32, torch.bfloat16],
        [1.0, 0.75, 0.25],  # parts of each head
    ),
    ids=str,
)
def test_rotate_and_store_matches_norm_rotation_and_store(heads, has_norm, dtype, rotated):
    num_heads, num_kv_heads, head_dim = heads
    norms = [None, None]
    if has_norm:
        pair = nn.ModuleList(RMSNorm(head_dim, eps, dtype) for eps in (1e-3, 0.5))
        norms = list(randomize(pair).to(DEVICE))
    torch.manual_seed(0)
    qkv = torch.randn(6, (num_heads + 2 * num_kv_heads) * head_dim).to(DEVICE, dtype)
    angles = torch.randn(6, 1, int(rotated * head_dim) // 2).to(DEVICE)
    cos_sin = (angles.cos(), angles.sin())
    slots = torch.tensor([9, -1, 63, 0, -1, 17], dtype=torch.int32, device=DEVICE)
    # The KV cache lies behind memory that a write to slot -1 would hit.
    buffer_shape = (3, 4, 16, num_kv_heads, head_dim)
    buffer = torch.full(buffer_shape, 7.0, dtype=dtype, device=DEVICE)
    expected = buffer.clone()

    query = triton_layers().decoder.rotate_and_store(qkv, *norms, cos_sin, buffer[1:], slots)
    parts = qkv.unflatten(1, (-1, head_dim))
    parts = parts.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    norm_and_rotate = make_layers(dtype, DEVICE.type)["attention"].norm_and_rotate
    expected_query = norm_and_rotate(parts[0], norms[0], cos_sin)
    expected_key = norm_and_rotate(parts[1], norms[1], cos_sin)
    torch_backend.store_kvcache(expected_key, parts[2], expected[1:], slots)

    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    assert_close([query, buffer], [expected_query, expected], atol=tolerance, rtol=tolerance)
    assert torch.equal(buffer[2], expected[2])  # values
    assert query.is_contiguous()


@needs_triton
def test_engine_with_triton_kernels_matches_transformers(tmp_path, monkeypatch):
    """With chunked prompts, prefix hits and preemptions. One of the MLPs has experts."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    shape = {"head_dim": 20, "mlp_only_layers": [0], **experts}
    oracle = Oracle(make_checkpoint(tmp_path, family=Qwen3MoeConfig, **shape))
    layers = triton_layers()
    monkeypatch.setattr(replacement, "find_optimized_layers", lambda *_: layers.OPTIMIZED_LAYERS)
    options = {"kvcache_block_size": 16, "num_kvcache_blocks": 4, "max_num_batched_tokens": 24}
    llm = LLM(str(tmp_path), device=DEVICE.type, attention_backend="triton", **options)
    kinds = {type(layer) for layer in llm.executor.worker.model.modules()}
    assert kinds >= {layers.decoder.FastDecoderLayers, layers.decoder.FastAttention}
    assert not kinds & {Attention, DecoderLayers, RMSNorm, MLP}
    assert type(llm.model_runner.sampler) is layers.sampler.FastSampler
    long = random_prompt(0, 30)
    prompts = [long, long[:17], random_prompt(1, 15)]
    assert generate_ids(llm, prompts, greedy(4)) == [oracle(prompt, 4) for prompt in prompts]
    assert llm.stats["num_cached_tokens"]
    assert llm.stats["num_preemptions"]
