"""Kernels that span several layers compute the same as the layers one after the other."""

from copy import deepcopy

import pytest
import torch
from conftest import (
    DEVICE,
    Oracle,
    cover_pairs,
    greedy,
    make_checkpoint,
    random_prompt,
)
from kernel_helpers import (
    all_dtypes,
    make_layers,
    needs_triton,
    randomize,
    triton_layers,
)
from transformers import Qwen3Config, Qwen3MoeConfig

from nanovllm import LLM, SamplingParams, kernels
from nanovllm.kernels.cpu.fused_layers import FusedLayers
from nanovllm.kernels.cpu.library import has_gemm
from nanovllm.layers import attention as torch_backend
from nanovllm.layers.norm import RMSNorm
from nanovllm.models.decoder import MLP, Attention, DecoderLayers
from nanovllm.models.weights import load_checkpoint

needs_gemm = pytest.mark.skipif(
    not has_gemm(torch.bfloat16), reason="no compiler, or the system denies AMX"
)


@needs_gemm
@pytest.mark.parametrize(
    "dtype, shape",
    [
        (torch.float32, {"attention_bias": True, "num_key_value_heads": 1}),
        (torch.float32, {"head_dim": 10}),
        (torch.bfloat16, {}),
        (torch.bfloat16, {"attention_bias": True, "head_dim": 10}),
        (torch.float16, {"num_hidden_layers": 1, "num_key_value_heads": 1}),
    ],
    ids=str,
)
def test_one_call_for_all_layers_matches_plain_layers(tmp_path, monkeypatch, shape, dtype):
    """Hidden states and K/V, in all steps of an engine: prefills, chunks and decodes."""
    make_checkpoint(tmp_path, dtype=dtype, max_position_embeddings=1024, **shape)
    options = {"num_kvcache_blocks": 64, "kvcache_block_size": 16, "max_num_batched_tokens": 640}
    llm = LLM(str(tmp_path), device="cpu", **options)
    runner = llm.model_runner
    prepare_batch = runner.prepare_batch
    batches = []

    def record(seqs):
        batch = prepare_batch(seqs)
        batches.append(deepcopy(batch))
        return batch

    monkeypatch.setattr(runner, "prepare_batch", record)
    llm.generate([random_prompt(n, n) for n in (600, 3, 100, 40)], greedy(4), use_tqdm=False)
    assert {batch.max_seqlen_q for batch in batches} >= {1, 600}

    worker = runner.executor.worker
    fused = worker.model
    assert isinstance(fused.model.layers, FusedLayers)
    plain = worker.spec.make_model(torch_backend)
    load_checkpoint(plain, tmp_path)
    caches = [torch.full_like(cache, 3.0) for cache in worker.kv_caches]
    plain_caches = [torch.full_like(cache, 5.0) for cache in worker.kv_caches]
    limits = {"atol": 0.1, "rtol": 0.05}
    if dtype == torch.float32:
        limits = {"atol": 2e-4, "rtol": 2e-4}
    num_threads = torch.get_num_threads()
    with torch.inference_mode():
        for batch in batches:
            hidden = fused(batch, caches)
            torch.testing.assert_close(hidden, plain(batch, plain_caches), **limits)
            for cache, plain_cache in zip(caches, plain_caches):
                written = cache.flatten(1, 2)[:, batch.slot_mapping]
                expected = plain_cache.flatten(1, 2)[:, batch.slot_mapping]
                torch.testing.assert_close(written, expected, **limits)
            # The number of threads changes how work is divided, but not the result.
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                output = fused(batch, caches)
                torch.set_num_threads(num_threads)
                assert torch.equal(output, hidden)
    slots = torch.cat([batch.slot_mapping for batch in batches]).long()
    for cache in caches:
        cache.flatten(1, 2)[:, slots] = 3.0
        assert (cache == 3.0).all(), "written outside slot_mapping"


@needs_gemm
@all_dtypes
def test_other_requests_do_not_change_logits(make_llm, dtype):
    llm = make_llm(dtype=str(dtype).removeprefix("torch."), enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=5)
    prompts = [random_prompt(n, n) for n in (30, 1, 9, 17, 40)]
    together = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, together):
        (alone,) = llm.generate([prompt], params, use_tqdm=False)
        assert alone["token_ids"] == output["token_ids"]
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
    add_rms_norm = triton_layers().add_rms_norm
    total, normed = add_rms_norm(x, branch, weight, 1e-3)
    assert torch.equal(total, x + branch)
    assert torch.equal(normed, add_rms_norm(total, None, weight, 1e-3)[1])
    assert torch.equal(x, before)


@needs_triton
@pytest.mark.parametrize(
    "heads, has_norm, dtype",
    cover_pairs(
        [(5, 5, 20), (14, 2, 64), (3, 1, 128), (12, 4, 256)],
        [True, False],
        [torch.float32, torch.bfloat16],
    ),
    ids=str,
)
def test_rotate_and_store_matches_norm_rotation_and_store(heads, has_norm, dtype):
    num_heads, num_kv_heads, head_dim = heads
    attention = make_layers(dtype, DEVICE.type)["attention"]
    norms = [None, None]
    if has_norm:
        pair = torch.nn.ModuleList(RMSNorm(head_dim, 1e-3, dtype) for _ in "qk")
        norms = list(randomize(pair).to(DEVICE))
    torch.manual_seed(0)
    qkv = torch.randn(6, (num_heads + 2 * num_kv_heads) * head_dim).to(DEVICE, dtype)
    angles = torch.randn(6, 1, head_dim // 2).to(DEVICE)
    cos_sin = (angles.cos(), angles.sin())
    slots = torch.tensor([9, -1, 63, 0, -1, 17], dtype=torch.int32, device=DEVICE)
    # The KV cache lies behind memory that a write to slot -1 would hit.
    buffer_shape = (3, 4, 16, num_kv_heads, head_dim)
    buffer = torch.full(buffer_shape, 7.0, dtype=dtype, device=DEVICE)
    cache = buffer[1:]
    expected_cache = cache.clone()

    query = triton_layers().rotate_and_store(qkv, *norms, cos_sin, cache, slots)
    parts = qkv.unflatten(1, (-1, head_dim))
    parts = parts.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    expected_query = attention.norm_and_rotate(parts[0], norms[0], cos_sin)
    expected_key = attention.norm_and_rotate(parts[1], norms[1], cos_sin)
    torch_backend.store_kvcache(expected_key, parts[2], expected_cache, slots)

    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(query, expected_query, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(cache[0], expected_cache[0], atol=tolerance, rtol=tolerance)
    assert torch.equal(cache[1], expected_cache[1])
    assert (buffer[0] == 7.0).all()
    assert query.is_contiguous()


@needs_triton
@pytest.mark.parametrize(
    "family, shape",
    [
        (Qwen3Config, {"head_dim": 20}),
        (Qwen3MoeConfig, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    ],
    ids=["qwen3", "qwen3_moe"],
)
def test_engine_with_triton_kernels_matches_transformers(tmp_path, monkeypatch, family, shape):
    """With chunked prompts, prefix hits and preemptions."""
    oracle = Oracle(make_checkpoint(tmp_path, family=family, **shape))
    layers = triton_layers()
    monkeypatch.setattr(kernels, "find_optimized_layers", lambda *_: layers.OPTIMIZED_LAYERS)
    options = {"kvcache_block_size": 16, "num_kvcache_blocks": 4, "max_num_batched_tokens": 20}
    llm = LLM(str(tmp_path), device=DEVICE.type, attention_backend="triton", **options)
    kinds = {type(layer) for layer in llm.model_runner.executor.worker.model.modules()}
    assert kinds >= {layers.FusedLayers, layers.FusedAttention}
    assert not kinds & {Attention, DecoderLayers, RMSNorm, MLP}
    assert type(llm.model_runner.sampler) is layers.FastSampler
    prompts = [random_prompt(i, length) for i, length in enumerate((1, 15, 30))]
    expected = [oracle(prompt, 6) for prompt in prompts]
    for _ in range(2):
        outputs = llm.generate(prompts, greedy(6), use_tqdm=False)
        assert [output["token_ids"] for output in outputs] == expected
    assert llm.stats["num_cached_tokens"]
    assert llm.stats["num_preemptions"]
