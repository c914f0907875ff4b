"""From a Hugging Face checkpoint's config to a DecoderSpec: the one place that reads foreign field names.

A model family that fits the decoder is one more entry of ARCHITECTURES. What the decoder does not do is refused by name,
never ignored: a checkpoint that loads is one that is computed right.
"""

import math
from typing import Any

import torch
from transformers import PretrainedConfig

from nanovllm.layers.rotary import RopeSpec
from nanovllm.models.decoder import DecoderSpec

# What the family decides, whatever config.json says.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {"qk_norm": True},
}


def read_spec(config: PretrainedConfig, dtype: torch.dtype) -> DecoderSpec:
    """The decoder that `config` describes. Raises ValueError for what nanovllm cannot compute."""
    architecture = (config.architectures or ["(none)"])[0]
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture {architecture} is not supported; supported are {', '.join(ARCHITECTURES)}")
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act {config.hidden_act!r} is not supported; 'silu' is")
    if getattr(config, "quantization_config", None):
        raise ValueError("quantized checkpoints (quantization_config) are not supported")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        raise ValueError("sliding-window attention (layer_types, use_sliding_window) is not supported")
    rope, max_len = _read_rope(config)
    bias = bool(getattr(config, "attention_bias", False))
    fields: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
        "norm_eps": config.rms_norm_eps,
        "rope": rope,
        "qkv_bias": bias,
        "o_bias": bias,
        "tie_embeddings": config.tie_word_embeddings,
        "max_len": max_len,
        "dtype": dtype,
    }
    return DecoderSpec(**{**fields, **ARCHITECTURES[architecture]})


def _read_rope(config: PretrainedConfig) -> tuple[RopeSpec, int]:
    """RoPE's settings and how many positions they serve. Older configs have rope_theta and rope_scaling instead."""
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    theta = scaling.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    max_len = config.max_position_embeddings
    if scaling.get("partial_rotary_factor", 1.0) != 1.0 or any(isinstance(value, dict) for value in scaling.values()):
        raise ValueError("partial_rotary_factor and rope_parameters by layer type are not supported")
    if rope_type == "default":
        return RopeSpec(theta), max_len
    if rope_type == "linear":
        factor = scaling.get("factor") or 1.0
        return RopeSpec(theta, "linear", factor), int(max_len * factor)
    if rope_type != "yarn":
        raise ValueError(f"rope type {rope_type!r} is not supported; 'default', 'linear' and 'yarn' are")
    original = scaling.get("original_max_position_embeddings") or max_len
    factor = scaling.get("factor") or max_len / original
    spec = RopeSpec(
        theta,
        "yarn",
        factor,
        original,
        attention_factor=_yarn_attention_factor(factor, scaling),
        beta_fast=scaling.get("beta_fast") or 32.0,
        beta_slow=scaling.get("beta_slow") or 1.0,
        truncate=scaling.get("truncate", True),
    )
    return spec, int(original * factor)


def _yarn_attention_factor(factor: float, scaling: dict[str, Any]) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if (given := scaling.get("attention_factor")) is not None:
        return given
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)
