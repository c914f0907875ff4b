"""From a Hugging Face checkpoint's config to a DecoderSpec: the one place that reads foreign field names.

A model family that fits the decoder is one more entry of ARCHITECTURES. What the decoder does not do is refused by name,
never ignored: a checkpoint that loads is one that is computed right.
"""

import math
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from nanovllm.checks import check_choice, naming
from nanovllm.layers.rotary import RopeSpec
from nanovllm.models.decoder import DecoderSpec

# What the family decides, whatever config.json says.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {"qk_norm": True},
}


def read_spec(config: PretrainedConfig, dtype: torch.dtype, num_ranks: int) -> DecoderSpec:
    """The decoder that `config`, as read_config returns it, describes.

    Raises ValueError for what cannot be computed, or not divided among that many ranks.
    """
    with naming(Path(config.name_or_path, "config.json"), AttributeError, TypeError, ValueError):
        spec = _read_spec(config, dtype)
        for name, num in (("num_attention_heads", spec.num_heads), ("intermediate_size", spec.intermediate_size)):
            if num % num_ranks:
                raise ValueError(f"tensor_parallel_size={num_ranks} does not divide {name}={num}")
        if max(spec.num_kv_heads, num_ranks) % min(spec.num_kv_heads, num_ranks):
            raise ValueError(
                f"tensor_parallel_size={num_ranks} neither divides num_key_value_heads={spec.num_kv_heads} nor is a multiple of it"
            )
        return spec


def _read_spec(config: PretrainedConfig, dtype: torch.dtype) -> DecoderSpec:
    architecture = next(iter(config.architectures or ()), "(none)")
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture {architecture} is not supported; supported are {', '.join(ARCHITECTURES)}")
    if getattr(config, "quantization_config", None):
        raise ValueError("quantized checkpoints (quantization_config) are not supported")
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        raise ValueError("sliding-window attention (layer_types, use_sliding_window) is not supported")
    check_choice("hidden_act", config.hidden_act, ("silu",))
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim must be even, for RoPE turns pairs of dimensions, not {head_dim}")
    rope, max_len = _read_rope(config)
    fields: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "intermediate_size": config.intermediate_size,
        "norm_eps": config.rms_norm_eps,
        "rope": rope,
        "qkv_bias": getattr(config, "attention_bias", False),
        "o_bias": getattr(config, "attention_bias", False),
        "tie_embeddings": config.tie_word_embeddings,
        "max_len": max_len,
        "dtype": dtype,
    }
    return DecoderSpec(**{**fields, **ARCHITECTURES[architecture]})


def _read_rope(config: PretrainedConfig) -> tuple[RopeSpec, int]:
    """RoPE's settings and how many positions they serve. Older configs have rope_theta and rope_scaling instead."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    rope: dict[str, Any] = {"rope_theta": getattr(config, "rope_theta", None), **given}
    rope = {name: value for name, value in rope.items() if value is not None}  # null stands for the default
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError("partial_rotary_factor and rope_parameters by layer type are not supported")
    theta, rope_type = rope.get("rope_theta", 10000.0), rope.get("rope_type", rope.get("type", "default"))
    max_len = config.max_position_embeddings
    if rope_type == "default":
        return RopeSpec(theta), max_len
    if rope_type == "linear":
        factor = rope.get("factor", 1.0)
        return RopeSpec(theta, "linear", factor), int(max_len * factor)
    if rope_type != "yarn":
        raise ValueError(f"rope type {rope_type!r} is not supported; 'default', 'linear' and 'yarn' are")
    original = rope.get("original_max_position_embeddings", max_len)
    factor = rope.get("factor", max_len / original)
    ramp = {name: rope[name] for name in ("beta_fast", "beta_slow", "truncate") if name in rope}
    return RopeSpec(theta, "yarn", factor, original, _yarn_attention_factor(factor, rope), **ramp), int(original * factor)


def _yarn_attention_factor(factor: float, rope: dict[str, Any]) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if "attention_factor" in rope:
        return rope["attention_factor"]
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return mscale(rope["mscale"]) / mscale(rope["mscale_all_dim"])
    return mscale(1.0)
