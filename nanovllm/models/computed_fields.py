"""Computes the fields of a spec that config.json does not state as they are.

A row of ARCHITECTURES (architectures.py) names one of these functions.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from nanovllm.config import MAX_SIZE
from nanovllm.layers.rotary import RopeSpec
from nanovllm.models.attention_fields import (
    ATTENTION_TYPES,
    check_multiple,
    read_head_dim,
    read_max_len,
    read_rope,
    read_windows,
)
from nanovllm.utils.checks import check_int, check_number

Fields = Mapping[str, Any]  # of a spec, by their names


def compute_decoder(
    config: PretrainedConfig,
    given: Fields,
    layer_types: tuple[str, ...] = ATTENTION_TYPES,
    allow_partial_rope: bool = False,
) -> dict[str, Any]:
    """Compute what all decoders have. `layer_types` are those that the spec can make."""
    head_dim = read_head_dim(config)
    max_len = read_max_len(config, given["max_model_len"])
    rope = read_rope(config, head_dim, allow_partial=allow_partial_rope, length=max_len)
    return {
        "head_dim": head_dim,
        "ropes": (rope,),
        "rope_indices": (0,) * given["num_layers"],
        "windows": read_windows(config, max_len, layer_types),
        "scale": head_dim**-0.5,
        "max_len": max_len,
    }


def compute_by_layer_type(config: PretrainedConfig, given: Fields) -> dict[str, Any]:
    """Compute a RoPE for each type of layer. max_position_embeddings includes the extension."""
    head_dim = read_head_dim(config)
    windows = read_windows(config, given["max_len"])
    types = list(dict.fromkeys(config.layer_types))
    unknown = sorted(set(config.rope_parameters).difference(ATTENTION_TYPES))
    if unknown:
        raise ValueError(
            f"rope_parameters has {unknown[0]} outside of a layer type, and transformers would"
            " ignore it: move it into each layer type"
        )
    return {
        "head_dim": head_dim,
        "ropes": tuple(read_rope(config, head_dim, layer_type) for layer_type in types),
        "rope_indices": tuple(map(types.index, config.layer_types)),
        "windows": windows,
        "scale": head_dim**-0.5,
    }


def compute_moe(config: PretrainedConfig, given: Fields) -> Fields:
    dense_layers = _find_dense_layers(config, given)
    _check_experts(given)
    return {**compute_decoder(config, given), "dense_layers": dense_layers}


def _find_dense_layers(config: PretrainedConfig, given: Fields) -> frozenset[int]:
    sparse_step = check_int("decoder_sparse_step", config.decoder_sparse_step, 1, MAX_SIZE)
    return frozenset(
        layer
        for layer in range(given["num_layers"])
        if (layer + 1) % sparse_step != 0 or layer in config.mlp_only_layers
    )


def _check_experts(given: Fields) -> None:
    num_chosen = given["num_experts_per_tok"]
    check_int("num_experts_per_tok", num_chosen, 1, given["num_experts"])


def compute_qwen3_5(config: PretrainedConfig, given: Fields) -> Fields:
    types = ("linear_attention", "full_attention")
    computed = compute_decoder(config, given, types, allow_partial_rope=True)
    layers = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    if not layers:
        raise ValueError("layer_types without full_attention are not supported")
    num_value_heads, num_key_heads = given["num_value_heads"], given["num_key_heads"]
    check_multiple("linear_num_value_heads", num_value_heads, "linear_num_key_heads", num_key_heads)
    return {**computed, "attention_layers": frozenset(layers)}


def compute_qwen3_5_moe(config: PretrainedConfig, given: Fields) -> Fields:
    _check_experts(given)
    return compute_qwen3_5(config, given)


def compute_qwen3_next(config: PretrainedConfig, given: Fields) -> Fields:
    dense_layers = _find_dense_layers(config, given)
    return {**compute_qwen3_5_moe(config, given), "dense_layers": dense_layers}


def compute_gemma3(config: PretrainedConfig, given: Fields) -> Fields:
    scalar = config.query_pre_attn_scalar
    check_number("query_pre_attn_scalar", scalar, low=0.0, open_low=True)
    return {**compute_by_layer_type(config, given), "scale": scalar**-0.5}


def compute_granite(config: PretrainedConfig, given: Fields) -> Fields:
    return {**compute_decoder(config, given), "scale": given["scale"]}


def compute_smollm3(config: PretrainedConfig, given: Fields) -> Fields:
    """Compute a second RoPE, which rotates by 0, for layers without positions (NoPE).

    no_rope_layers is 1 for a layer with RoPE. Windows without use_sliding_window are rejected,
    because only some attention functions of transformers apply them.
    """
    types = ATTENTION_TYPES if config.use_sliding_window else ("full_attention",)
    computed = compute_decoder(config, given, types)
    (rope,) = computed["ropes"]
    no_rope = RopeSpec((0.0,) * len(rope.inv_freq))
    indices = tuple(0 if has_rope else 1 for has_rope in config.no_rope_layers)
    if len(indices) < given["num_layers"]:
        raise ValueError(f"no_rope_layers={config.no_rope_layers} must have a value for each layer")
    return {**computed, "ropes": (rope, no_rope), "rope_indices": indices}


def compute_opt(config: PretrainedConfig, given: Fields) -> Fields:
    hidden_size, num_heads = given["hidden_size"], given["num_heads"]
    check_multiple("hidden_size", hidden_size, "num_attention_heads", num_heads)
    return {
        "num_kv_heads": num_heads,
        "head_dim": hidden_size // num_heads,
        "final_norm": given["norm_first"] and not config._remove_final_layer_norm,
    }
