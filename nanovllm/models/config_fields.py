"""Reads fields of config.json: the size of heads, windows, RoPE, and the maximum length.

A row of ARCHITECTURES (architectures.py) names the function that computes the fields of its spec.
Those of families with a file of their own are there.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanovllm.config import MAX_SIZE
from nanovllm.layers.rotary import RopeSpec
from nanovllm.utils.checks import (
    check_choice,
    check_fraction,
    check_int,
    check_number,
)

ATTENTION_TYPES = ("full_attention", "sliding_attention")  # of layer_types
Fields = Mapping[str, Any]  # of a spec, by their names
MAX_HEAD_DIM = 2**16  # far above real models, and small enough for RoPE's tables
_ROPE_TYPES = ("default", "dynamic", "linear", "yarn", "llama3")


def check_multiple(name: str, size: int, unit_name: str, unit: int) -> None:
    if size % unit != 0:
        raise ValueError(f"{name}={size} must be a multiple of {unit_name}={unit}")


def read_head_dim(config: PretrainedConfig) -> int:
    num_heads = config.num_attention_heads
    num_kv_heads = config.num_key_value_heads
    check_multiple("num_attention_heads", num_heads, "num_key_value_heads", num_kv_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    name = "head_dim (by default hidden_size / num_attention_heads)"
    return check_int(name, head_dim, 1, MAX_HEAD_DIM)


def read_windows(
    config: PretrainedConfig, max_len: int, supported: tuple[str, ...] = ATTENTION_TYPES
) -> tuple[int | None, ...]:
    """Read the window of each layer. `supported` are the valid layer_types.

    A window that covers `max_len` tokens becomes None, because full attention is faster. A window
    is rejected if the config class of transformers does not declare its fields, because
    transformers would ignore it.
    """
    declared = type(config).__dataclass_fields__
    for name in ("sliding_window", "layer_types"):
        if name not in declared and getattr(config, name, None) is not None:
            raise ValueError(
                f"{name} is no field of {type(config).__name__}, and transformers would ignore it:"
                " remove it"
            )
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:  # a window is then that of all layers
        default = "full_attention" if window is None else "sliding_attention"
        layer_types = [default] * config.num_hidden_layers
    for layer_type in layer_types:
        check_choice("layer_types", layer_type, supported)
    is_windowed = "sliding_attention" in layer_types
    if not is_windowed or check_int("sliding_window", window, 1, MAX_SIZE) >= max_len:
        return (None,) * len(layer_types)
    return tuple(window if each == "sliding_attention" else None for each in layer_types)


def read_rope(
    config: PretrainedConfig,
    head_dim: int,
    max_len: int,
    layer_type: str | None,
    allow_partial: bool,
) -> RopeSpec:
    """Return the frequencies, which transformers computes. They can differ by `layer_type`.

    Those of longrope depend on `max_len`. They are supported only if all layers have one RoPE.
    """
    rope = _read_parameters(config, layer_type)
    share = check_fraction("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))
    if share != 1.0 and not allow_partial:
        raise ValueError(f"partial_rotary_factor={share} is not supported")
    supported = (*_ROPE_TYPES, "longrope") if layer_type is None else _ROPE_TYPES
    rope_type = check_choice("rope_type", rope["rope_type"], supported)
    if rope_type in ("default", "dynamic"):  # "dynamic" changes only contexts above max_len
        spec = RopeSpec.from_base(rope["rope_theta"], int(head_dim * share))
    else:
        compute = ROPE_INIT_FUNCTIONS[rope_type]
        with torch.device("cpu"):
            inv_freq, attention_factor = compute(config, seq_len=max_len, layer_type=layer_type)
        spec = RopeSpec(tuple(inv_freq.tolist()), attention_factor)
    if not all(0.0 < value < math.inf for value in (*spec.inv_freq, spec.attention_factor)):
        raise ValueError(
            f"rope_parameters={rope} is invalid: frequencies and attention factor must be positive"
            " and finite"
        )
    return spec


def read_max_len(config: PretrainedConfig, max_model_len: int | None) -> int:
    """Return the number of valid positions. Some RoPE types extend max_position_embeddings.

    longrope divides frequencies by short factors up to the original length, and by long ones in
    longer contexts. Cached keys were rotated with one set, and cannot be compared with queries of
    the other. The option max_model_len therefore decides for all positions, as in vLLM. By default,
    the limit is the original length.
    """
    rope = _read_parameters(config, None)
    rope_type = rope.get("rope_type")  # None: each type of layer has its own
    # That of llama3 and longrope, and of different RoPEs, includes the extension.
    max_len = config.max_position_embeddings
    if rope_type in ("longrope", "yarn"):
        name = "original_max_position_embeddings"
        original = check_int(name, rope.get(name, max_len), 1, MAX_SIZE)
        if rope_type == "yarn":
            max_len = original
        elif max_model_len is None or max_model_len <= original:
            max_len = min(max_len, original)
    if rope_type in ("linear", "yarn"):
        max_len = int(max_len * check_number("factor", rope.get("factor"), low=0.0, open_low=True))
    return check_int("max_position_embeddings, extended by factor,", max_len, 1, MAX_SIZE)


def _read_parameters(config: PretrainedConfig, layer_type: str | None) -> dict[str, Any]:
    """Return the rope_parameters that are set. null stands for the default."""
    given = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    return {name: value for name, value in given.items() if value is not None}


def compute_decoder(
    config: PretrainedConfig,
    given: Fields,
    layer_types: tuple[str, ...] = ATTENTION_TYPES,
    allow_partial_rope: bool = False,
) -> dict[str, Any]:
    """Compute what all decoders have. `layer_types` are those that the spec can make."""
    head_dim = read_head_dim(config)
    max_len = read_max_len(config, given["max_model_len"])
    windows = read_windows(config, max_len, layer_types)
    # The type of each layer if rope_parameters has a RoPE for each type.
    types: list[str | None] = [None] * len(windows)
    if any(isinstance(each, dict) for each in config.rope_parameters.values()):
        types = config.layer_types
    distinct = list(dict.fromkeys(types))
    return {
        "head_dim": head_dim,
        "ropes": tuple(
            read_rope(config, head_dim, max_len, each, allow_partial_rope) for each in distinct
        ),
        "rope_indices": tuple(map(distinct.index, types)),
        "windows": windows,
        "scale": head_dim**-0.5,
        "max_len": max_len,
    }


def compute_smollm3(config: PretrainedConfig, given: Fields) -> Fields:
    """Compute a second RoPE, which rotates by 0, for layers without positions (NoPE).

    no_rope_layers is 1 for a layer with RoPE.
    """
    computed = compute_decoder(config, given)
    (rope,) = computed["ropes"]
    no_rope = RopeSpec((0.0,) * len(rope.inv_freq))
    indices = tuple(0 if has_rope else 1 for has_rope in config.no_rope_layers)
    if len(indices) < given["num_layers"]:
        raise ValueError(f"no_rope_layers={config.no_rope_layers} must have a value for each layer")
    return {**computed, "ropes": (rope, no_rope), "rope_indices": indices}
