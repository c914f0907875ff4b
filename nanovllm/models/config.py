"""From a Hugging Face checkpoint's config to a ModelSpec: the one place that reads foreign field names.

A family that differs by values is a row of ARCHITECTURES; one that differs by structure has a reader here, and its spec in a
file of its own. A field is judged where it is read. What is not computed is refused by name, never ignored: a checkpoint that
loads is one that is computed right.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanovllm.checks import check_bool, check_choice, check_int, check_ints, check_number, naming
from nanovllm.config import MAX_SIZE
from nanovllm.layers.rotary import RopeSpec
from nanovllm.models.decoder import DecoderSpec, ModelSpec
from nanovllm.models.moe import MoESpec
from nanovllm.models.opt import OPTSpec


def read_spec(config: PretrainedConfig, dtype: torch.dtype, num_ranks: int) -> ModelSpec:
    """The model that `config`, as read_config returns it, describes.

    Raises ValueError for what cannot be computed, or not divided among that many ranks.
    """
    with naming(Path(config.name_or_path or "", "config.json"), AttributeError, TypeError, ValueError):
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


def _size(config: PretrainedConfig, name: str, minimum: int = 1) -> int:
    return check_int(name, getattr(config, name), minimum, MAX_SIZE)


def _switch(config: PretrainedConfig, name: str) -> bool:
    return check_bool(name, getattr(config, name, False))


def _read_decoder(
    config: PretrainedConfig, dtype: torch.dtype, make_spec: type[DecoderSpec] = DecoderSpec, **of_family: Any
) -> DecoderSpec:
    """A decoder. `of_family` is what its family decides, whatever config.json says."""
    size, max_len = partial(_size, config), _size(config, "max_position_embeddings")
    window = getattr(config, "sliding_window", None) or max_len
    kinds = getattr(config, "layer_types", None) or ["full_attention" if window >= max_len else "sliding"]
    if any(kind != "full_attention" for kind in kinds):
        raise ValueError("sliding-window attention (sliding_window, layer_types, use_sliding_window) is not supported")
    check_choice("hidden_act", config.hidden_act, ("silu",))
    num_heads, num_kv_heads, hidden_size = size("num_attention_heads"), size("num_key_value_heads"), size("hidden_size")
    if num_heads % num_kv_heads:
        raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
    head_dim = hidden_size // num_heads if getattr(config, "head_dim", None) is None else size("head_dim")
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim must be even, for RoPE turns pairs of dimensions, not {head_dim}")
    rope, max_len = _read_rope(config, head_dim, max_len)
    fields: dict[str, Any] = {
        "vocab_size": size("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": size("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": size("intermediate_size"),
        "norm_eps": check_number("rms_norm_eps", config.rms_norm_eps, low=0.0, open_low=True),
        "rope": rope,
        "qkv_bias": _switch(config, "attention_bias"),
        "o_bias": _switch(config, "attention_bias"),
        "mlp_bias": _switch(config, "mlp_bias"),
        "tie_embeddings": _switch(config, "tie_word_embeddings"),
        "max_len": max_len,
        "dtype": dtype,
    }
    return make_spec(**{**fields, **of_family})


def _read_qwen3_moe(config: PretrainedConfig, dtype: torch.dtype) -> DecoderSpec:
    num_layers, step = _size(config, "num_hidden_layers"), _size(config, "decoder_sparse_step")
    num_experts, num_chosen = _size(config, "num_experts", 0), _size(config, "num_experts_per_tok", 0)
    sparse_layers = {layer for layer in range(num_layers) if num_experts and (layer + 1) % step == 0}
    sparse_layers -= set(check_ints("mlp_only_layers", config.mlp_only_layers, minimum=0))
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
        expert_size=_size(config, "moe_intermediate_size"),
        normalize_weights=_switch(config, "norm_topk_prob"),
        dense_layers=frozenset(range(num_layers)) - sparse_layers,
    )


_ROPE_NEEDS = {  # types other than the original one -> what they cannot do without
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}


def _read_rope(config: PretrainedConfig, head_dim: int, max_len: int) -> tuple[RopeSpec, int]:
    """RoPE's frequencies, which transformers computes, and how many positions they serve."""
    rope = {name: value for name, value in config.rope_parameters.items() if value is not None}  # null: the default
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError("partial_rotary_factor and rope_parameters by layer type are not supported")
    rope_type = rope["rope_type"]
    if rope_type in ("default", "dynamic"):  # the second stretches only what is longer than max_len
        return RopeSpec.from_base(rope["rope_theta"], head_dim), max_len
    if rope_type not in _ROPE_NEEDS:
        raise ValueError(f"rope type {rope_type!r} is not supported; 'default', 'dynamic', {', '.join(_ROPE_NEEDS)} are")
    if missing := [name for name in _ROPE_NEEDS[rope_type] if name not in rope]:
        raise ValueError(f"rope type {rope_type!r} needs {', '.join(missing)}")
    if rope_type == "llama3" and not rope["low_freq_factor"] < rope["high_freq_factor"]:
        raise ValueError("low_freq_factor={low_freq_factor} must be below high_freq_factor={high_freq_factor}".format(**rope))
    with torch.device("cpu"):
        inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    if rope_type != "llama3":  # whose max_position_embeddings is the stretched one
        trained = rope.get("original_max_position_embeddings", max_len) if rope_type == "yarn" else max_len
        max_len = int(trained * rope["factor"])
    return RopeSpec(tuple(inv_freq.tolist()), attention_factor), max_len


def _read_opt(config: PretrainedConfig, dtype: torch.dtype) -> OPTSpec:
    check_choice("activation_function", config.activation_function, ("relu",))
    size, switch = partial(_size, config), partial(_switch, config)
    hidden_size, num_heads = size("hidden_size"), size("num_attention_heads")
    if hidden_size % num_heads:
        raise ValueError("hidden_size must be a multiple of num_attention_heads")
    return OPTSpec(
        vocab_size=size("vocab_size"),
        hidden_size=hidden_size,
        embedding_size=size("word_embed_proj_dim"),
        num_layers=size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=size("ffn_dim"),
        norm_first=switch("do_layer_norm_before"),
        final_norm=switch("do_layer_norm_before") and not switch("_remove_final_layer_norm"),
        norm_has_weights=switch("layer_norm_elementwise_affine"),
        bias=switch("enable_bias"),
        tie_embeddings=switch("tie_word_embeddings"),
        max_len=size("max_position_embeddings"),
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
