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
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanovllm.checks import check_choice, check_int, check_number, naming
from nanovllm.config import DTYPES, MAX_HEAD_DIM, MAX_SIZE
from nanovllm.layers.rotary import RopeSpec
from nanovllm.models.decoder import DecoderSpec, ModelSpec
from nanovllm.models.moe import MoESpec
from nanovllm.models.opt import OPTSpec

Fields = dict[str, Any]


def read_spec(config: PretrainedConfig, dtype: torch.dtype, num_ranks: int) -> ModelSpec:
    """The model that `config`, as read_config returns it, describes.

    Raises ValueError for what cannot be computed, or not divided among that many ranks.
    """
    with naming(
        Path(config.name_or_path or "", "config.json"), Exception
    ):  # whatever a wrong value leads to
        architecture = check_choice(
            "architectures[0]", next(iter(config.architectures or ()), None), tuple(ARCHITECTURES)
        )
        if getattr(config, "quantization_config", None):
            raise ValueError("quantized checkpoints (quantization_config) are not supported")
        check_choice("dtype", str(dtype).removeprefix("torch."), DTYPES)
        common = {
            "vocab_size": _read_size(config, "vocab_size"),
            "hidden_size": _read_size(config, "hidden_size"),
            "num_layers": _read_size(config, "num_hidden_layers"),
            "num_heads": _read_size(config, "num_attention_heads"),
            "tie_embeddings": config.tie_word_embeddings,
            "max_len": _read_size(config, "max_position_embeddings"),
            "dtype": dtype,
        }
        spec = ARCHITECTURES[architecture](config, common)
        for name, num in spec.divided_sizes.items():
            if num % num_ranks:
                raise ValueError(f"tensor_parallel_size={num_ranks} does not divide {name}={num}")
        if max(heads := spec.num_kv_heads, num_ranks) % min(heads, num_ranks):
            raise ValueError(
                f"tensor_parallel_size={num_ranks} neither divides num_key_value_heads={heads} nor is its multiple"
            )
        return spec


def _read_size(config: PretrainedConfig, name: str) -> int:
    return check_int(name, getattr(config, name), 1, MAX_SIZE)


def _read_decoder(
    config: PretrainedConfig, common: Fields, make: type[DecoderSpec] = DecoderSpec, **family: Any
) -> DecoderSpec:
    """A decoder. `family` is what its family decides, whatever config.json says."""
    check_choice("hidden_act", config.hidden_act, ("silu",))
    window = getattr(config, "sliding_window", None) or common["max_len"]
    kinds = getattr(config, "layer_types", None) or [
        "full_attention" if window >= common["max_len"] else "sliding"
    ]
    if set(kinds) != {"full_attention"}:
        raise ValueError(
            "sliding-window attention (sliding_window, layer_types, use_sliding_window) is not supported"
        )
    num_heads, num_kv_heads = common["num_heads"], _read_size(config, "num_key_value_heads")
    if num_heads % num_kv_heads:
        raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
    head_dim = getattr(config, "head_dim", None) or common["hidden_size"] // num_heads
    check_int("head_dim (by default hidden_size / num_attention_heads)", head_dim, 1, MAX_HEAD_DIM)
    rope, max_len = _read_rope(config, head_dim)
    has_bias = getattr(config, "attention_bias", False)
    return make(
        **{**common, "max_len": max_len},
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=_read_size(config, "intermediate_size"),
        norm_eps=check_number("rms_norm_eps", config.rms_norm_eps, low=0.0, open_low=True),
        rope=rope,
        **{
            "qkv_bias": has_bias,
            "o_bias": has_bias,
            "mlp_bias": getattr(config, "mlp_bias", False),
            **family,
        },
    )


def _read_qwen3_moe(config: PretrainedConfig, common: Fields) -> DecoderSpec:
    num_experts, step = _read_size(config, "num_experts"), _read_size(config, "decoder_sparse_step")
    dense_layers = {
        layer
        for layer in range(common["num_layers"])
        if (layer + 1) % step or layer in config.mlp_only_layers
    }
    return _read_decoder(
        config,
        common,
        MoESpec,
        qk_norm=True,
        mlp_bias=False,
        num_experts=num_experts,
        num_experts_per_tok=check_int(
            "num_experts_per_tok", config.num_experts_per_tok, 1, num_experts
        ),
        expert_size=_read_size(config, "moe_intermediate_size"),
        normalize_weights=config.norm_topk_prob,
        dense_layers=frozenset(dense_layers),
    )


def _read_rope(config: PretrainedConfig, head_dim: int) -> tuple[RopeSpec, int]:
    """RoPE's frequencies, which transformers computes, and how many positions they serve."""
    rope = {
        name: value for name, value in config.rope_parameters.items() if value is not None
    }  # null: the default
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or any(
        isinstance(value, dict) for value in rope.values()
    ):
        raise ValueError(
            "partial_rotary_factor and rope_parameters by layer type are not supported"
        )
    rope_type, max_len = rope["rope_type"], config.max_position_embeddings
    check_choice("rope_type", rope_type, ("default", "dynamic", "linear", "yarn", "llama3"))
    if rope_type in ("default", "dynamic"):  # the second stretches only what is longer than max_len
        spec = RopeSpec.from_base(rope["rope_theta"], head_dim)
    else:
        with torch.device("cpu"):
            inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
        spec = RopeSpec(tuple(inv_freq.tolist()), attention_factor)
    if rope_type == "yarn":
        max_len = rope.get("original_max_position_embeddings", max_len)
    if rope_type in ("linear", "yarn"):  # max_position_embeddings of llama3 is the stretched one
        max_len = int(max_len * rope["factor"])
    if not all(
        0.0 < value < math.inf for value in (*spec.inv_freq, spec.attention_factor, max_len)
    ):
        raise ValueError(
            f"frequencies, attention_factor and positions must be positive and finite: rope_parameters={rope}"
        )
    return spec, max_len


def _read_opt(config: PretrainedConfig, common: Fields) -> OPTSpec:
    check_choice("activation_function", config.activation_function, ("relu",))
    if common["hidden_size"] % common["num_heads"]:
        raise ValueError("hidden_size must be a multiple of num_attention_heads")
    return OPTSpec(
        **common,
        embedding_size=_read_size(config, "word_embed_proj_dim"),
        num_kv_heads=common["num_heads"],
        head_dim=common["hidden_size"] // common["num_heads"],
        intermediate_size=_read_size(config, "ffn_dim"),
        norm_first=config.do_layer_norm_before,
        final_norm=config.do_layer_norm_before and not config._remove_final_layer_norm,
        norm_has_weights=config.layer_norm_elementwise_affine,
        bias=config.enable_bias,
    )


ARCHITECTURES: dict[str, Callable[[PretrainedConfig, Fields], ModelSpec]] = {
    "LlamaForCausalLM": _read_decoder,
    "MistralForCausalLM": partial(_read_decoder, qkv_bias=False, o_bias=False, mlp_bias=False),
    "MinistralForCausalLM": partial(_read_decoder, qkv_bias=False, o_bias=False, mlp_bias=False),
    "OPTForCausalLM": _read_opt,
    "Qwen2ForCausalLM": partial(_read_decoder, qkv_bias=True, o_bias=False, mlp_bias=False),
    "Qwen3ForCausalLM": partial(_read_decoder, qk_norm=True, mlp_bias=False),
    "Qwen3MoeForCausalLM": _read_qwen3_moe,
}
