"""Built-in model shapes, run with random weights.

Sizes that are not given are the defaults of transformers, which are those of a released model.
Bases of RoPE are defaults, too, because random weights do not depend on them.
"""

from functools import partial
from typing import Any

from transformers import (
    Gemma3TextConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

_COMMON: dict[str, Any] = {"tie_word_embeddings": True, "dtype": "bfloat16"}
_qwen3 = partial(Qwen3Config, architectures=["Qwen3ForCausalLM"], **_COMMON)
_MOE_ATTENTION: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
SHAPES: dict[str, PretrainedConfig] = {
    "qwen3-0.6b": _qwen3(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
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
    "opt-125m": OPTConfig(architectures=["OPTForCausalLM"], dtype="bfloat16"),
    # About 1/30 of Qwen3-30B-A3B: 1.0 billion parameters, 0.2 billion active per token.
    "qwen3-moe": Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        **_COMMON,
        **_MOE_ATTENTION,
        moe_intermediate_size=384,
        num_experts=64,
        norm_topk_prob=True,
    ),
    # The dense model of the active size: as wide as the eight experts of a token.
    "qwen3-0.2b": _qwen3(**_MOE_ATTENTION, head_dim=64, intermediate_size=8 * 384),
    # By default, every sixth layer attends to the whole context, with a RoPE base of 1e6. The
    # others attend to a window, with 1e4.
    "gemma-3-270m": Gemma3TextConfig(
        architectures=["Gemma3ForCausalLM"],
        **_COMMON,
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        sliding_window=512,
        max_position_embeddings=32768,
    ),
    # By default, every fourth layer has attention, and the others a recurrent state.
    "qwen3.5-0.8b": Qwen3_5TextConfig(
        architectures=["Qwen3_5ForCausalLM"],
        **_COMMON,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        linear_num_value_heads=16,
        max_position_embeddings=262144,
    ),
    # Four of the 40 layers of Qwen3.5-35B-A3B.
    "qwen3.5-35b-a3b-4l": Qwen3_5MoeTextConfig(
        architectures=["Qwen3_5MoeForCausalLM"],
        dtype="bfloat16",
        num_hidden_layers=4,
        max_position_embeddings=262144,
    ),
}
