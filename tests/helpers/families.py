"""The supported families, and how to make a random checkpoint of one."""

from typing import Any

import torch
from conftest import (
    Oracle,
    check_invariants,
    generate_ids,
    greedy,
    make_checkpoint,
    random_prompt,
)
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
)

from nanovllm import LLM

POOL = {"num_kvcache_blocks": 40, "kvcache_block_size": 4}
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=8.0,
    original_max_position_embeddings=64,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
YARN_SCALES = dict(beta_fast=16.0, truncate=False, mscale=0.7, mscale_all_dim=0.3)
LONGROPE = dict(
    rope_type="longrope",
    rope_theta=1e4,
    original_max_position_embeddings=64,
    short_factor=[1.0, 1.1, 1.3],
    long_factor=[1.5, 3.0, 5.0],
)
DYNAMIC = dict(rope_type="dynamic", rope_theta=100.0, factor=2.0)
UNUSED_WINDOW = dict(use_sliding_window=False, sliding_window=8, max_window_layers=1)
ALL_WINDOWS = dict(use_sliding_window=True, sliding_window=8, max_window_layers=0)
LATE_WINDOWS = dict(ALL_WINDOWS, num_hidden_layers=4, max_window_layers=2)
MIXED_WINDOWS = ["sliding_attention", "full_attention"]
GEMMA3_ROPES = {
    "full_attention": dict(rope_type="linear", rope_theta=1e5, factor=8.0),
    "sliding_attention": dict(rope_type="default", rope_theta=100.0),
}
GEMMA3 = dict(
    num_hidden_layers=4,
    sliding_window_pattern=3,  # layer 2 attends to the whole context
    sliding_window=8,
    query_pre_attn_scalar=10,
    initializer_range=0.1,  # with large tied embeddings, tokens would repeat
    rope_parameters=GEMMA3_ROPES,
)
GEMMA3_UNTIED = dict(
    GEMMA3,
    layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    sliding_window=2,
    num_key_value_heads=1,
    attention_bias=True,
    tie_word_embeddings=False,
)
PHI4 = dict(head_dim=8, tie_word_embeddings=False)
PHI4_MINI = dict(
    head_dim=8,
    original_max_position_embeddings=256,
    rope_parameters=dict(LONGROPE, partial_rotary_factor=0.75),
)
SMOLLM3 = dict(num_hidden_layers=4, no_rope_layer_interval=2)
SMOLLM3_WINDOWS = dict(SMOLLM3, use_sliding_window=True, sliding_window=8)
EXPERTS = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24)
MIXED = dict(EXPERTS, num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3])
DELTA = dict(
    num_hidden_layers=4,
    layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
)
HYBRID_EXPERTS = dict(DELTA, **EXPERTS, shared_expert_intermediate_size=16)
TIED_EXPERTS = dict(HYBRID_EXPERTS, shared_expert_intermediate_size=20, attention_bias=True)
NEXT_MIXED = dict(mlp_only_layers=[2], decoder_sparse_step=2, norm_topk_prob=False)
FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "qwen2": (Qwen2Config, dict(tie_word_embeddings=False)),
    "qwen2.5-tied": (Qwen2Config, UNUSED_WINDOW),
    "qwen2-windows": (Qwen2Config, LATE_WINDOWS),
    "qwen3": (Qwen3Config, {}),
    "qwen3-windows": (Qwen3Config, dict(LATE_WINDOWS, sliding_window=2, max_window_layers=3)),
    "llama-2": (LlamaConfig, dict(num_key_value_heads=4, tie_word_embeddings=False, head_dim=None)),
    "llama-3.1": (LlamaConfig, dict(rope_parameters=LLAMA3)),
    "llama-biases": (LlamaConfig, dict(attention_bias=True, mlp_bias=True)),
    "llama-dynamic": (LlamaConfig, dict(rope_parameters=DYNAMIC)),
    "llama-longrope": (
        LlamaConfig,
        dict(head_dim=6, rope_parameters=dict(LONGROPE, original_max_position_embeddings=256)),
    ),
    "llama-yarn-scales": (LlamaConfig, dict(rope_parameters=YARN | YARN_SCALES)),
    "mistral": (MistralConfig, dict(sliding_window=None)),
    "mistral-window": (MistralConfig, dict(sliding_window=8)),
    "ministral-windows": (MinistralConfig, dict(sliding_window=13, layer_types=MIXED_WINDOWS)),
    "gemma3": (Gemma3TextConfig, GEMMA3),
    "gemma3-untied": (Gemma3TextConfig, GEMMA3_UNTIED),
    "phi3-window": (Phi3Config, dict(PHI4, sliding_window=8, num_key_value_heads=1)),
    "phi4": (Phi3Config, PHI4),
    "phi4-mini": (Phi3Config, PHI4_MINI),
    "smollm3": (SmolLM3Config, SMOLLM3),
    "smollm3-windows": (SmolLM3Config, dict(SMOLLM3_WINDOWS, tie_word_embeddings=False)),
    "qwen3-moe": (Qwen3MoeConfig, dict(EXPERTS, norm_topk_prob=True)),
    "qwen3-moe-window": (Qwen3MoeConfig, dict(EXPERTS, **ALL_WINDOWS, norm_topk_prob=True)),
    "qwen3-moe-mixed": (Qwen3MoeConfig, dict(MIXED, tie_word_embeddings=False)),
    "qwen3.5": (Qwen3_5TextConfig, DELTA),
    "qwen3.5-moe": (Qwen3_5MoeTextConfig, dict(HYBRID_EXPERTS, tie_word_embeddings=False)),
    "qwen3.5-moe-tied": (Qwen3_5MoeTextConfig, TIED_EXPERTS),
    "qwen3-next": (Qwen3NextConfig, dict(HYBRID_EXPERTS, tie_word_embeddings=False)),
    "qwen3-next-mixed": (Qwen3NextConfig, dict(HYBRID_EXPERTS, **NEXT_MIXED)),
}


def check_tokens(directory, oracle, **options):
    """Serve a checkpoint cold and from a warm cache, in chunks, after preemptions.

    The default device of torch must have no effect.
    """
    prompts = [random_prompt(length, length) for length in (1, 4, 5, 33, 70)]
    prompts.append(prompts[-1][:50] + random_prompt(0, 10))
    expected = [oracle(prompt, 12) for prompt in prompts]
    options = {**POOL, "max_num_batched_tokens": 24, **options}
    with torch.device("meta"), LLM(directory, **options) as llm:
        for _ in range(2):
            assert generate_ids(llm, prompts, greedy(12)) == expected
            check_invariants(llm)
        assert llm.stats["num_preemptions"] > 0
        assert llm.stats["num_cached_tokens"] > 0


def make_family(directory, name, **changes):
    """Save a random checkpoint of a family, and return its oracle."""
    family, settings = FAMILIES[name]
    return Oracle(make_checkpoint(directory, family=family, **{**settings, **changes}))


def stack_experts(weights):
    """Store the experts as on the Hub: gate and up projections, one after the other, and down."""
    layers = {name.partition(".experts.")[0] for name in weights if ".experts." in name}
    for layer in sorted(layers):
        stacked = {}
        for part in ("gate", "up", "down"):
            names = [f"{layer}.experts.{expert}.{part}_proj.weight" for expert in range(8)]
            stacked[part] = torch.stack([weights.pop(name) for name in names])
        gate_up = torch.cat((stacked["gate"], stacked["up"]), dim=1)
        weights[f"{layer}.experts.gate_up_proj"] = gate_up
        weights[f"{layer}.experts.down_proj"] = stacked["down"]
