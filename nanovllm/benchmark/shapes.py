"""Built-in model shapes, run with random weights."""

from functools import partial
from typing import Any

from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

_COMMON: dict[str, Any] = {"tie_word_embeddings": True, "dtype": "bfloat16"}
_qwen3 = partial(Qwen3Config, architectures=["Qwen3ForCausalLM"], **_COMMON)
# By default, every sixth layer attends to the whole context, with a RoPE base of 1e6. The others
# attend to a window, with 1e4.
_gemma3 = partial(
    Gemma3TextConfig,
    architectures=["Gemma3ForCausalLM"],
    **_COMMON,
    vocab_size=262144,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=256,
    sliding_window=512,
    query_pre_attn_scalar=256,
    max_position_embeddings=32768,
)
_MOE_ATTENTION: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
# By default, every fourth layer has attention, and the others a recurrent state.
_QWEN3_5: dict[str, Any] = {
    "dtype": "bfloat16",
    "vocab_size": 248320,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
    },
}
SHAPES: dict[str, PretrainedConfig] = {
    "qwen3-0.6b": _qwen3(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
    ),
    "small": _qwen3(
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
    ),
    "llama-3.2-1b": LlamaConfig(
        architectures=["LlamaForCausalLM"],
        **_COMMON,
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "rope_theta": 5e5,
            "original_max_position_embeddings": 8192,
        },
    ),
    "opt-125m": OPTConfig(architectures=["OPTForCausalLM"], dtype="bfloat16"),
    # About 1/30 of Qwen3-30B-A3B: 1.0 billion parameters, 0.2 billion active per token.
    "qwen3-moe": Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        **_COMMON,
        **_MOE_ATTENTION,
        moe_intermediate_size=384,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    ),
    # The dense model of the active size: as wide as the eight experts of a token.
    "qwen3-0.2b": _qwen3(**_MOE_ATTENTION, head_dim=64, intermediate_size=8 * 384),
    "gemma-3-270m": _gemma3(hidden_size=640, intermediate_size=2048, num_hidden_layers=18),
    "gemma-3-1b": _gemma3(hidden_size=1152, intermediate_size=6912, num_hidden_layers=26),
    "qwen3.5-0.8b": Qwen3_5TextConfig(
        architectures=["Qwen3_5ForCausalLM"],
        **_QWEN3_5,
        tie_word_embeddings=True,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=24,
        num_attention_heads=8,
        linear_num_value_heads=16,
    ),
    # Four of the 40 layers of Qwen3.5-35B-A3B.
    "qwen3.5-35b-a3b-4l": Qwen3_5MoeTextConfig(
        architectures=["Qwen3_5MoeForCausalLM"],
        **_QWEN3_5,
        hidden_size=2048,
        num_hidden_layers=4,
        num_attention_heads=16,
        linear_num_value_heads=32,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
}
