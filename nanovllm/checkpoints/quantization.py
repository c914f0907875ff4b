"""Which weights of a model are quantized: by quantization_config and by the option `quantization`.

A checkpoint's own codes are kept. Weights that it stores as floats, or that are read as floats, are
quantized while they are loaded, if the option asks for it. checkpoints/formats.py reads the codes.
"""

from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from transformers import PretrainedConfig

from nanovllm.checkpoints.formats import (
    AWQ,
    COMPRESSED,
    FP8,
    FP8_BLOCK,
    GPTQ,
    Format,
    PackedFormat,
)
from nanovllm.layers.quantized import Scheme
from nanovllm.utils.checks import check_choice, check_int, check_supported, naming

INT8 = Scheme(bits=8, group_size=128)
INT4 = Scheme(bits=4, group_size=64)
Settings = dict[str, Any]


@dataclass(frozen=True)
class Quantization:
    """How the weights of a model are quantized."""

    linear: Scheme | None = None  # for projections that are read as floats
    head: Scheme | None = None  # for embeddings and output head that are read as floats
    format: Format | None = None  # how the checkpoint stores codes


NOT_QUANTIZED = Quantization()
# Embeddings and the output head keep 8 bits, because tokens are most sensitive to their errors.
_OPTIONS = {
    None: NOT_QUANTIZED,
    "int8": Quantization(INT8, INT8),
    "int4": Quantization(INT4, INT8),
}


def read_quantization(config: PretrainedConfig, option: str | None) -> Quantization:
    """Read the quantization_config of a config from `read_config`.

    Raises ValueError that names an unsupported format or value.
    """
    settings = getattr(config, "quantization_config", None)
    if not settings:
        return _OPTIONS[option]
    with naming("quantization_config", Exception):  # an invalid value can raise anything
        settings = dict(settings)
        method = check_choice("quant_method", settings.get("quant_method"), tuple(_READERS))
        return replace(_OPTIONS[option], format=_READERS[method](settings))


def _read_gptq(settings: Settings) -> Format:
    if any(not pattern.startswith("-:") for pattern in settings.get("dynamic") or ()):
        raise ValueError("dynamic gives some layers other bits, which is not supported")
    versions = (None, "gptq", "gptq_v2")
    check_supported(settings, format=versions, checkpoint_format=versions, adapter=(None, {}))
    version = settings.get("checkpoint_format") or settings.get("format")
    format = _make_packed(
        GPTQ,
        settings.get("bits"),
        settings.get("group_size"),
        settings.get("sym", True),
        zero_offset=0 if version == "gptq_v2" else 1,
    )
    return replace(format, scheme=None) if settings.get("desc_act") else format


def _read_awq(settings: Settings) -> Format:
    check_supported(settings, version=(None, "gemm"), bits=(4,), zero_point=(None, True))
    return _make_packed(AWQ, settings["bits"], settings.get("group_size"), is_symmetric=False)


def _read_compressed(settings: Settings) -> Format:
    check_supported(settings, format=("pack-quantized",), transform_config=(None, {}))
    check_supported(settings.get("sparsity_config") or {}, format=(None, "dense"))
    groups = settings.get("config_groups") or {}
    if len(groups) != 1:
        raise ValueError(f"config_groups must have one group, not {', '.join(groups) or 0}")
    (group,) = groups.values()
    check_supported(group, input_activations=(None,), output_activations=(None,))
    weights = group.get("weights") or {}
    check_supported(
        weights,
        type=(None, "int"),
        strategy=(None, "group", "channel"),
        actorder=(None, False, "static", "weight"),
    )
    is_symmetric = weights.get("symmetric", True)
    group_size = weights.get("group_size") or -1
    return _make_packed(COMPRESSED, weights.get("num_bits"), group_size, is_symmetric)


def _read_fp8(settings: Settings) -> Format:
    block = [FP8_BLOCK, FP8_BLOCK]
    check_supported(settings, weight_block_size=(block,), activation_scheme=(None, "dynamic"))
    return FP8()


_READERS = {
    "gptq": _read_gptq,
    "awq": _read_awq,
    "compressed-tensors": _read_compressed,
    "fp8": _read_fp8,
}


def _make_packed(
    tensors: dict[str, Any],
    bits: Any,
    group_size: object,
    is_symmetric: bool,
    zero_offset: int = 0,
) -> PackedFormat:
    check_supported({"bits": bits}, bits=(4, 8))
    size = max(0, check_int("group_size", group_size, minimum=-1))
    if size % 32 != 0:
        raise ValueError(f"group_size={size} must be -1 or a multiple of 32")
    return PackedFormat(
        **tensors,
        scheme=Scheme(bits, gcd(size, 128)),  # groups of up to 128, as kernels take them
        bits=bits,
        group_size=size,
        is_symmetric=is_symmetric,
        zero_offset=zero_offset,
    )
