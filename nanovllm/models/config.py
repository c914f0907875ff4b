"""From a Hugging Face checkpoint's config to a ModelSpec: the one place that reads foreign field names.

A family that differs by values is a row of ARCHITECTURES; one that differs by structure has a reader here, and its spec in a
file of its own. What is not computed is refused by name, never ignored: a checkpoint that loads is one that is computed right.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from nanovllm.checks import check_choice, naming
from nanovllm.layers.rotary import RopeSpec
from nanovllm.models.decoder import DecoderSpec, ModelSpec
from nanovllm.models.moe import MoESpec
from nanovllm.models.opt import OPTSpec


def read_spec(config: PretrainedConfig, dtype: torch.dtype, num_ranks: int) -> ModelSpec:
    """The model that `config`, as read_config returns it, describes.

    Raises ValueError for what cannot be computed, or not divided among that many ranks.
    """
    with naming(Path(config.name_or_path, "config.json"), AttributeError, TypeError, ValueError):
        architecture = next(iter(config.architectures or ()), "(none)")
        if architecture not in ARCHITECTURES:
            raise ValueError(f"architecture {architecture} is not supported; supported are {', '.join(ARCHITECTURES)}")
        if getattr(config, "quantization_config", None):
            raise ValueError("quantized checkpoints (quantization_config) are not supported")
        spec = ARCHITECTURES[architecture](config, dtype)
        for name, num in spec.divided_sizes.items():
            if num % num_ranks:
                raise ValueError(f"tensor_parallel_size={num_ranks} does not divide {name}={num}")
        if max(spec.num_kv_heads, num_ranks) % min(spec.num_kv_heads, num_ranks):
            raise ValueError(
                f"tensor_parallel_size={num_ranks} neither divides num_key_value_heads={spec.num_kv_heads}"
                " nor is a multiple of it"
            )
        return spec


def _read_decoder(
    config: PretrainedConfig, dtype: torch.dtype, make_spec: type[DecoderSpec] = DecoderSpec, **of_family: Any
) -> DecoderSpec:
    """A decoder. `of_family` is what its family decides, whatever config.json says."""
    window = getattr(config, "sliding_window", None) or config.max_position_embeddings
    kinds = getattr(config, "layer_types", None) or ["full_attention" if window >= config.max_position_embeddings else "sliding"]
    if any(kind != "full_attention" for kind in kinds):
        raise ValueError("sliding-window attention (sliding_window, layer_types, use_sliding_window) is not supported")
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
        "mlp_bias": getattr(config, "mlp_bias", False),
        "tie_embeddings": config.tie_word_embeddings,
        "max_len": max_len,
        "dtype": dtype,
    }
    return make_spec(**{**fields, **of_family})


def _read_qwen3_moe(config: PretrainedConfig, dtype: torch.dtype) -> MoESpec:
    num_experts, num_chosen, step = config.num_experts, config.num_experts_per_tok, config.decoder_sparse_step
    sparse_layers = {layer for layer in range(config.num_hidden_layers) if num_experts and (layer + 1) % step == 0}
    sparse_layers -= set(config.mlp_only_layers)
    if sparse_layers and not 1 <= num_chosen <= num_experts:
        raise ValueError(f"num_experts_per_tok={num_chosen} must be at least 1 and at most num_experts={num_experts}")
    return _read_decoder(
        config,
        dtype,
        MoESpec,
        qk_norm=True,
        mlp_bias=False,
        num_experts=num_experts,
        num_experts_per_tok=num_chosen,
        expert_size=config.moe_intermediate_size,
        normalize_weights=config.norm_topk_prob,
        dense_layers=frozenset(range(config.num_hidden_layers)) - sparse_layers,
    )


def _read_rope(config: PretrainedConfig) -> tuple[RopeSpec, int]:
    """RoPE's settings and how many positions they serve. Older configs have rope_theta and rope_scaling instead."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    rope: dict[str, Any] = {"rope_theta": getattr(config, "rope_theta", None), **given}
    rope = {name: value for name, value in rope.items() if value is not None}  # null stands for the default
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError("partial_rotary_factor and rope_parameters by layer type are not supported")
    theta, rope_type = rope.get("rope_theta", 10000.0), rope.get("rope_type", rope.get("type", "default"))
    max_len = config.max_position_embeddings
    if rope_type in ("default", "dynamic"):  # the second stretches only what is longer than max_len
        return RopeSpec(theta), max_len
    if rope_type == "linear":
        factor = rope.get("factor", 1.0)
        return RopeSpec(theta, "linear", factor), int(max_len * factor)
    if rope_type == "llama3":
        names = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        if missing := [name for name in names if name not in rope]:
            raise ValueError(f"rope type 'llama3' needs {', '.join(missing)}")
        factor, original, low, high = (rope[name] for name in names)
        if not low < high:
            raise ValueError(f"low_freq_factor={low} must be below high_freq_factor={high}")
        return RopeSpec(theta, "llama3", factor, original, low_freq_factor=low, high_freq_factor=high), max_len
    if rope_type != "yarn":
        raise ValueError(f"rope type {rope_type!r} is not supported; 'default', 'linear', 'dynamic', 'llama3' and 'yarn' are")
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


def _read_opt(config: PretrainedConfig, dtype: torch.dtype) -> OPTSpec:
    check_choice("activation_function", config.activation_function, ("relu",))
    if config.hidden_size % config.num_attention_heads:
        raise ValueError("hidden_size must be a multiple of num_attention_heads")
    return OPTSpec(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        embedding_size=config.word_embed_proj_dim,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_attention_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        intermediate_size=config.ffn_dim,
        norm_first=config.do_layer_norm_before,
        final_norm=config.do_layer_norm_before and not config._remove_final_layer_norm,
        norm_has_weights=config.layer_norm_elementwise_affine,
        bias=config.enable_bias,
        tie_embeddings=config.tie_word_embeddings,
        max_len=config.max_position_embeddings,
        dtype=dtype,
    )


ARCHITECTURES: dict[str, Callable[[PretrainedConfig, torch.dtype], ModelSpec]] = {
    "LlamaForCausalLM": _read_decoder,
    "MistralForCausalLM": partial(_read_decoder, qkv_bias=False, o_bias=False, mlp_bias=False),
    "MinistralForCausalLM": partial(_read_decoder, qkv_bias=False, o_bias=False, mlp_bias=False),
    "OPTForCausalLM": _read_opt,
    "Qwen2ForCausalLM": partial(_read_decoder, qkv_bias=True, o_bias=False, mlp_bias=False),
    "Qwen3ForCausalLM": partial(_read_decoder, qk_norm=True, mlp_bias=False),
    "Qwen3MoeForCausalLM": _read_qwen3_moe,
}
