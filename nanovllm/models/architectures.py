"""Converts a Hugging Face config to a ModelSpec. The engine learns the shapes of models only here.

A family is a row of ARCHITECTURES. If it differs by structure, it also has a spec in a file of its
own. An unsupported feature is rejected with an error that names it, never ignored.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig

from nanovllm.checkpoints.quantization import read_quantization
from nanovllm.config import DTYPES, MAX_SIZE
from nanovllm.models.config_fields import Fields, compute_decoder, compute_smollm3
from nanovllm.models.decoder import DecoderSpec
from nanovllm.models.gemma3 import Gemma3Spec, compute_gemma3
from nanovllm.models.moe import MoESpec
from nanovllm.models.qwen3_5 import (
    Qwen3NextSpec,
    Qwen35MoESpec,
    Qwen35Spec,
    compute_qwen3_5,
)
from nanovllm.models.spec import ModelSpec
from nanovllm.utils.checks import check_choice, check_int, check_number, check_supported, naming

# Fields of specs whose names in config.json are others. A field is read if a spec has it and the
# class of a config declares it.
NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "tie_embeddings": "tie_word_embeddings",
    "max_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "qkv_bias": "attention_bias",
    "o_bias": "attention_bias",
    # Gated DeltaNet
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "conv_size": "linear_conv_kernel_dim",
}
# Sizes that the number of ranks must divide, in the specs that have them.
SHARDED = (
    "num_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "num_key_heads",
)


class Family(NamedTuple):
    """How the config.json of a family becomes a spec.

    A field of the spec is one of config.json, in `fixed`, or in what `compute` returns.
    """

    spec: type[ModelSpec]
    fixed: Mapping[str, Any] = {}  # fields that are the same in all models of the family
    # The other fields, from config.json, the fields so far, and max_model_len.
    compute: Callable[[PretrainedConfig, Fields], Fields] = compute_decoder
    # Fields of config.json that must have one of these values.
    supported: Mapping[str, tuple[object, ...]] = {"hidden_act": ("silu",)}
    names: Mapping[str, str] = {}  # where they differ from NAMES


_HEAD = "ForCausalLM"  # in the names of classes that have one
_NORMED = {"qk_norm": True}
_FUSED = {"qkv_names": ("qkv_proj",) * 3, "gate_up_names": ("gate_up_proj",) * 2}
_GEMMA3 = Family(
    Gemma3Spec,
    _NORMED,
    compute_gemma3,
    {
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "use_bidirectional_attention": (False, None),
    },
)
_QWEN3_5 = Family(Qwen35Spec, _NORMED, compute_qwen3_5)
_QWEN3_5_MOE = Family(Qwen35MoESpec, _NORMED, compute_qwen3_5)

ARCHITECTURES = {
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "LlamaForCausalLM": Family(DecoderSpec),
    "MistralForCausalLM": Family(DecoderSpec),
    "MinistralForCausalLM": Family(DecoderSpec),
    "Phi3ForCausalLM": Family(
        DecoderSpec, _FUSED, partial(compute_decoder, allow_partial_rope=True)
    ),
    "Qwen2ForCausalLM": Family(DecoderSpec, {"qkv_bias": True}),
    "Qwen3ForCausalLM": Family(DecoderSpec, _NORMED),
    "Qwen3MoeForCausalLM": Family(MoESpec, _NORMED),
    "Qwen3NextForCausalLM": Family(Qwen3NextSpec, _NORMED, compute_qwen3_5),
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5_MOE,
    "SmolLM3ForCausalLM": Family(DecoderSpec, compute=compute_smollm3),
}


def read_spec(
    config: PretrainedConfig,
    dtype: torch.dtype,
    num_ranks: int,
    quantization: str | None = None,
    max_model_len: int | None = None,
    model_impl: str = "auto",
) -> ModelSpec:
    """Convert a config from `read_config`. The last three are options of the engine.

    Raises ValueError if the model is not supported, or cannot be sharded over `num_ranks`.
    """
    path = Path(config.name_or_path or "", "config.json")
    with naming(path, Exception):  # an invalid value can raise anything
        name = next(iter(config.architectures or ()), None)
        with_head = str(name).removesuffix("Model") + _HEAD
        has_head = name in ARCHITECTURES or with_head not in ARCHITECTURES
        if not has_head:
            name = with_head
        check_choice("dtype", str(dtype).removeprefix("torch."), DTYPES)
        quantized = read_quantization(config, quantization)
        if model_impl == "transformers" or (model_impl == "auto" and name not in ARCHITECTURES):
            # takes a second to import
            from nanovllm.models.any_decoder import VERSIONS, read_any_spec

            with naming(f"{name} ({VERSIONS}) cannot be served", Exception):
                return read_any_spec(config, dtype, num_ranks, quantized, max_model_len)
        if name not in ARCHITECTURES:
            raise ValueError(
                f"model_impl='nanovllm' has no class for {name}: use model_impl='transformers'"
            )
        family = ARCHITECTURES[name]
        check_supported(vars(config), is_causal=(True, None), **family.supported)
        names = {**NAMES, **family.names}
        read = {**_read_fields(config, family.spec, names), **family.fixed}
        computed = family.compute(config, {**read, "max_model_len": max_model_len})
        own = {"dtype": dtype, "quantization": quantized, "has_head": has_head}
        if not has_head:
            own["tie_embeddings"] = True  # so that no head is loaded
        spec = family.spec(**{**read, **computed, **own})
        _check_ranks(spec, names, num_ranks)
        return spec


def _check_ranks(spec: ModelSpec, names: Mapping[str, str], num_ranks: int) -> None:
    for field in SHARDED:
        size = getattr(spec, field, 0)
        if size % num_ranks != 0:
            raise ValueError(
                f"tensor_parallel_size={num_ranks} does not divide"
                f" {names.get(field, field)}={size}: use a divisor of it"
            )
    num_kv_heads = spec.num_kv_heads
    if num_kv_heads % num_ranks != 0 and num_ranks % num_kv_heads != 0:
        raise ValueError(
            f"tensor_parallel_size={num_ranks} must divide num_key_value_heads={num_kv_heads}"
            " or be a multiple of it"
        )


def _read_fields(
    config: PretrainedConfig, spec: type[ModelSpec], names: Mapping[str, str]
) -> dict[str, Any]:
    """Read fields of `spec`. Counts and sizes are positive ints, other numbers are positive."""
    found: dict[str, Any] = {}
    for field in fields(spec):
        name = names.get(field.name, field.name)
        # transformers ignores what the class of a config does not declare.
        if name not in type(config).__dataclass_fields__:
            continue
        value = getattr(config, name)
        if field.type is int and field.name != "head_dim":  # which `compute` reads
            value = check_int(name, value, 1, MAX_SIZE)
        elif field.type is float:
            value = check_number(name, value, low=0.0, open_low=True)
        found[field.name] = value
    return found
