"""Converts a Hugging Face config to a ModelSpec. The engine learns the shapes of models only here.

A family that differs by values is a row of ARCHITECTURES. A family that differs by structure has a
reader here, and its spec in a file of its own. An unsupported feature is rejected with an error
that names it, never ignored.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanovllm.checkpoints.quantization import read_quantization
from nanovllm.config import DTYPES, MAX_HEAD_DIM, MAX_LAYERS, MAX_SIZE
from nanovllm.layers.rotary import RopeSpec
from nanovllm.models.decoder import DecoderSpec
from nanovllm.models.moe import MoESpec
from nanovllm.models.opt import OPTSpec
from nanovllm.models.qwen3_5 import Qwen35Spec
from nanovllm.models.spec import ModelSpec
from nanovllm.utils.checks import check_choice, check_int, check_number, naming

Fields = dict[str, Any]
_ROPE_TYPES = ("default", "dynamic", "linear", "yarn", "llama3")


def read_spec(
    config: PretrainedConfig,
    dtype: torch.dtype,
    num_ranks: int,
    quantization: str | None = None,
) -> ModelSpec:
    """Convert a config from `read_config`.

    Raises ValueError if the model is not supported, or cannot be sharded over `num_ranks`.
    """
    path = Path(config.name_or_path or "", "config.json")
    with naming(path, Exception):  # an invalid value can raise anything
        name = next(iter(config.architectures or ()), None)
        architecture = check_choice("architectures[0]", name, tuple(ARCHITECTURES))
        check_choice("dtype", str(dtype).removeprefix("torch."), DTYPES)
        common = {
            "vocab_size": _read_size(config, "vocab_size"),
            "hidden_size": _read_size(config, "hidden_size"),
            "num_layers": check_int("num_hidden_layers", config.num_hidden_layers, 1, MAX_LAYERS),
            "num_heads": _read_size(config, "num_attention_heads"),
            "tie_embeddings": config.tie_word_embeddings,
            "max_len": _read_size(config, "max_position_embeddings"),
            "dtype": dtype,
            "quantization": read_quantization(config, quantization),
        }
        spec = ARCHITECTURES[architecture](config, common)
        _check_ranks(spec, num_ranks)
        return spec


def _check_ranks(spec: ModelSpec, num_ranks: int) -> None:
    for name, size in spec.divided_sizes.items():
        if size % num_ranks != 0:
            problem = f"tensor_parallel_size={num_ranks} does not divide {name}={size}"
            raise ValueError(f"{problem}: use a divisor of it")
    num_kv_heads = spec.num_kv_heads
    if num_kv_heads % num_ranks != 0 and num_ranks % num_kv_heads != 0:
        raise ValueError(
            f"tensor_parallel_size={num_ranks} must divide num_key_value_heads={num_kv_heads}"
            " or be a multiple of it"
        )


def _read_size(config: PretrainedConfig, name: str) -> int:
    return check_int(name, getattr(config, name), 1, MAX_SIZE)


def _read_decoder(
    config: PretrainedConfig,
    common: Fields,
    make: type[DecoderSpec] = DecoderSpec,
    is_hybrid: bool = False,
    **family: Any,
) -> DecoderSpec:
    """Read a decoder. `family` overrides fields that the model family fixes.

    A hybrid has other layers than attention, and RoPE can rotate a part of a head.
    """
    check_choice("hidden_act", config.hidden_act, ("silu",))
    num_heads = common["num_heads"]
    num_kv_heads = _read_size(config, "num_key_value_heads")
    if num_heads % num_kv_heads != 0:
        raise ValueError(
            f"num_attention_heads={num_heads} must be a multiple of"
            f" num_key_value_heads={num_kv_heads}"
        )
    head_dim = getattr(config, "head_dim", None) or common["hidden_size"] // num_heads
    check_int("head_dim (by default hidden_size / num_attention_heads)", head_dim, 1, MAX_HEAD_DIM)
    rope, max_len = _read_rope(config, head_dim, is_hybrid)
    if not is_hybrid:
        _check_full_attention(config, max_len)
    has_bias = getattr(config, "attention_bias", False)
    fields = {
        **common,
        "max_len": max_len,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": _read_size(config, "intermediate_size"),
        "norm_eps": check_number("rms_norm_eps", config.rms_norm_eps, low=0.0, open_low=True),
        "rope": rope,
        "qkv_bias": has_bias,
        "o_bias": has_bias,
        "mlp_bias": getattr(config, "mlp_bias", False),
    }
    return make(**{**fields, **family})


def _check_full_attention(config: PretrainedConfig, max_len: int) -> None:
    """Raise ValueError for sliding windows, unless the window covers every context."""
    # Without layer_types, a window is that of all layers.
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    window = getattr(config, "sliding_window", None) or max_len
    if window >= max_len:
        kinds.discard("sliding_attention")
    if not kinds <= {"full_attention"}:
        raise ValueError(
            "sliding-window attention (sliding_window, layer_types, use_sliding_window)"
            " is not supported"
        )


def _read_qwen3_moe(config: PretrainedConfig, common: Fields) -> DecoderSpec:
    num_experts = _read_size(config, "num_experts")
    sparse_step = _read_size(config, "decoder_sparse_step")
    dense_layers: set[int] = set()
    for layer in range(common["num_layers"]):
        if (layer + 1) % sparse_step != 0 or layer in config.mlp_only_layers:
            dense_layers.add(layer)
    num_chosen = check_int("num_experts_per_tok", config.num_experts_per_tok, 1, num_experts)
    return _read_decoder(
        config,
        common,
        MoESpec,
        qk_norm=True,
        mlp_bias=False,
        num_experts=num_experts,
        num_experts_per_tok=num_chosen,
        expert_size=_read_size(config, "moe_intermediate_size"),
        normalize_weights=config.norm_topk_prob,
        dense_layers=frozenset(dense_layers),
    )


def _read_qwen3_5(config: PretrainedConfig, common: Fields) -> DecoderSpec:
    for kind in config.layer_types:
        check_choice("layer_types", kind, ("linear_attention", "full_attention"))
    attention_layers = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    if not attention_layers:
        raise ValueError("layer_types without full_attention are not supported")
    num_key_heads = _read_size(config, "linear_num_key_heads")
    num_value_heads = _read_size(config, "linear_num_value_heads")
    if num_value_heads % num_key_heads != 0:
        raise ValueError(
            f"linear_num_value_heads={num_value_heads} must be a multiple of"
            f" linear_num_key_heads={num_key_heads}"
        )
    return _read_decoder(
        config,
        common,
        Qwen35Spec,
        is_hybrid=True,
        qk_norm=True,
        mlp_bias=False,
        attention_layers=frozenset(attention_layers),
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=_read_size(config, "linear_key_head_dim"),
        value_dim=_read_size(config, "linear_value_head_dim"),
        conv_size=_read_size(config, "linear_conv_kernel_dim"),
    )


def _read_rope(
    config: PretrainedConfig, head_dim: int, allow_partial: bool
) -> tuple[RopeSpec, int]:
    """Return the frequencies, which transformers computes, and the number of valid positions."""
    # null stands for the default.
    rope = {name: value for name, value in config.rope_parameters.items() if value is not None}
    share = rope.get("partial_rotary_factor", 1.0)
    is_unsupported = share != 1.0 and not allow_partial
    if is_unsupported or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(
            "partial_rotary_factor and rope_parameters per layer type are not supported"
        )
    rope_type = check_choice("rope_type", rope["rope_type"], _ROPE_TYPES)
    if rope_type in ("default", "dynamic"):  # "dynamic" changes only contexts above max_len
        spec = RopeSpec.from_base(rope["rope_theta"], int(head_dim * share))
    else:
        cpu = torch.device("cpu")
        with cpu:
            inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[rope_type](config, cpu)
        spec = RopeSpec(tuple(inv_freq.tolist()), attention_factor)
    max_len = config.max_position_embeddings  # llama3's includes the extension
    if rope_type == "yarn":
        max_len = rope.get("original_max_position_embeddings", max_len)
    if rope_type in ("linear", "yarn"):
        max_len = int(max_len * rope["factor"])
    values = [*spec.inv_freq, spec.attention_factor, max_len]
    if not all(0.0 < value < math.inf for value in values):
        raise ValueError(
            f"rope_parameters={rope} is invalid: frequencies, attention factor and length must be"
            " positive and finite"
        )
    return spec, max_len


def _read_opt(config: PretrainedConfig, common: Fields) -> OPTSpec:
    check_choice("activation_function", config.activation_function, ("relu",))
    hidden_size, num_heads = common["hidden_size"], common["num_heads"]
    if hidden_size % num_heads != 0:
        raise ValueError(
            f"hidden_size={hidden_size} must be a multiple of num_attention_heads={num_heads}"
        )
    return OPTSpec(
        **common,
        embedding_size=_read_size(config, "word_embed_proj_dim"),
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
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
    "Qwen3_5ForCausalLM": _read_qwen3_5,
    "Qwen3_5ForConditionalGeneration": _read_qwen3_5,
}
