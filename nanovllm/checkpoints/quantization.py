"""Which weights of a model are quantized, how, and where their codes come from.

quantization_config in config.json names the format of a checkpoint:

    quant_method         tensors of a weight [out, in], here with 4 bits        read as
    gptq                 qweight [in / 8, out], qzeros [groups, out / 8],       the same codes
                         scales [groups, out], (g_idx [in])
    gptq with desc_act   the same, groups of scattered inputs                   floats
    awq, version gemm    qweight [in, out / 8], qzeros [groups, out / 8],       the same codes
                         scales [groups, out]
    compressed-tensors   weight_packed [out, in / 8], weight_shape [2],         the same codes
                         weight_zero_point [out / 8, groups],
                         weight_scale [out, groups]
    fp8                  weight [out, in] in float8_e4m3fn,                     floats
                         weight_scale_inv [out / 128, in / 128]

Codes that a QuantizedWeight (layers/quantized.py) can hold are kept as they are. Other weights
become floats, because new codes would lose precision. Weights that are floats in the checkpoint, or
become floats, are quantized while they are loaded, if the option `quantization` asks for it.

Whether a weight has codes is read from the names of the stored tensors, since every format has its
own rules for exceptions in config.json.

References: AutoGPTQ, AutoAWQ and compressed-tensors, which define the formats.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from nanovllm.checkpoints.tensor_files import FLOATS, TensorFiles, summarize
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.quantized import (
    INT4,
    INT8,
    QuantizableLayer,
    QuantizedWeight,
    Scheme,
    unpack,
)
from nanovllm.layers.tensor_parallel import TensorParallel
from nanovllm.utils.checks import check_choice, check_int, check_supported, naming
from nanovllm.utils.helpers import cdiv

Settings = dict[str, Any]

# --- The formats of checkpoints


@dataclass(frozen=True)
class Format:
    """How a checkpoint stores quantized weights."""

    marker: ClassVar[str]  # the key of a tensor that every quantized weight has, and no other

    @property
    def scheme(self) -> Scheme | None:
        """The scheme of the codes. None: the weights are read as floats."""
        return None

    def is_stored(self, files: TensorFiles, layer: str) -> bool:
        """Return whether the checkpoint has the weight of `layer` in this format."""
        return f"{layer}.{self.marker}" in files

    def has_codes(self, files: TensorFiles, name: str, layer: QuantizableLayer) -> bool:
        """Return whether the checkpoint has codes for `layer`, of which `name` is the name.

        Raises ValueError if only some parts of a merged projection have them.
        """
        parts = dict.fromkeys(key.rpartition(".")[0] for key, _ in layer.targets(name))
        others = [part for part in parts if not self.is_stored(files, part)]
        if 0 < len(others) < len(parts):
            problem = f"{name} is only partly quantized, since {self.marker} is missing of these"
            raise ValueError(summarize(problem, others))
        return not others

    def read(self, files: TensorFiles, layer: str, shape: list[int]) -> QuantizedWeight | Tensor:
        """Read the weight of `layer`, which has this shape [out, in].

        Raises ValueError for tensors that are missing, or do not fit it or config.json.
        """
        raise NotImplementedError


class FP8(Format):
    """float8_e4m3fn with a factor for each block of 128 x 128."""

    BLOCK: ClassVar[int] = 128
    marker = "weight_scale_inv"

    @classmethod
    def from_settings(cls, settings: Settings) -> "FP8":
        block = [cls.BLOCK, cls.BLOCK]
        check_supported(settings, weight_block_size=(block,), activation_scheme=(None, "dynamic"))
        return cls()

    def read(self, files: TensorFiles, layer: str, shape: list[int]) -> Tensor:
        weight = files.read(f"{layer}.weight", shape, ["F8_E4M3"])
        num_blocks = [cdiv(size, self.BLOCK) for size in shape]
        factors = files.read(f"{layer}.{self.marker}", num_blocks).float()
        for dim in (0, 1):
            factors = factors.repeat_interleave(self.BLOCK, dim).narrow(dim, 0, shape[dim])
        return weight.float() * factors


@dataclass(frozen=True, kw_only=True)
class PackedFormat(Format):
    """Integer codes in groups of inputs, several to an int32, with the low bits first.

    Codes are packed along `packed_dim` of [out, in], and zeros along the outputs.
    """

    zeros: ClassVar[str]  # the keys of these tensors
    scales: ClassVar[str]
    inputs_first: ClassVar[bool] = True  # whether matrices are stored as [in, out]
    packed_dim: ClassVar[int] = 1
    order: ClassVar[tuple[int, ...]] = ()  # code i has this place in an int32. Empty: its own

    bits: int
    group_size: int  # 0: all inputs of an output share a scale
    is_symmetric: bool  # all zeros are the middle code
    is_scattered: bool = False  # a group can have any inputs
    # Added to each stored zero, with carries within an int32. Version 1 of GPTQ subtracts 1 from
    # all zeros of an int32 in one subtraction, so a zero of 0 borrows from the next one.
    zero_offset: int = 0

    @property
    def scheme(self) -> Scheme | None:
        if self.is_scattered:
            return None
        return Scheme(self.bits, gcd(self.group_size, 128))  # up to 128, as kernels take them

    def read(self, files: TensorFiles, layer: str, shape: list[int]) -> QuantizedWeight | Tensor:
        out_features, in_features = shape
        group_size = self.group_size or in_features
        groups = self.read_groups(files, f"{layer}.g_idx", in_features, group_size)
        grouped = [out_features, cdiv(in_features, group_size)]
        codes = self.read_codes(files, f"{layer}.{self.marker}", shape, self.packed_dim)
        zeros = self.read_zeros(files, f"{layer}.{self.zeros}", grouped)
        scales = self.read_matrix(files, f"{layer}.{self.scales}", grouped, FLOATS).float()
        if self.scheme is None:
            return (codes.float() - zeros[:, groups]) * scales[:, groups]
        # Groups that are larger than those of the scheme are divided.
        groups = groups[:: self.scheme.group_size]
        parts = (codes, scales[:, groups], zeros[:, groups])
        # The dtype is that of dequantized weights. These codes are only copied.
        return QuantizedWeight.from_codes(self.scheme, torch.float32, *parts)

    def read_groups(
        self, files: TensorFiles, name: str, in_features: int, group_size: int
    ) -> Tensor:
        """Return the group of each input."""
        in_order = torch.arange(in_features) // group_size
        if name not in files:
            return in_order
        groups = files.read(name, [in_features], ["I32"]).long()
        if not self.is_scattered and not torch.equal(groups, in_order):
            problem = "reorders inputs, but config.json has no desc_act"
            raise ValueError(f"{files.locate(name)} {problem}")
        if groups.min() < 0 or groups.max() > in_order[-1]:
            raise ValueError(f"{files.locate(name)} has groups that do not exist")
        return groups

    def read_zeros(self, files: TensorFiles, name: str, shape: list[int]) -> Tensor:
        middle = 1 << (self.bits - 1)
        if self.is_symmetric and name not in files:
            return torch.full(shape, middle)
        stored = self.read_codes(files, name, shape, 0, self.zero_offset)
        if self.is_symmetric and not (stored == middle).all():
            raise ValueError(
                f"{files.locate(name)} has zeros that do not fit symmetric codes, which config.json"
                " asks for"
            )
        return stored

    def read_codes(
        self, files: TensorFiles, name: str, shape: list[int], packed_dim: int, offset: int = 0
    ) -> Tensor:
        """Return uint8 of `shape`. `offset` is added to each code, with carries between them."""
        sizes = list(shape)
        sizes[packed_dim] = cdiv(shape[packed_dim] * self.bits, 32)
        words = self.read_matrix(files, name, sizes, ["I32"]).movedim(packed_dim, 1)
        if offset:
            ones = 0xFFFFFFFF // ((1 << self.bits) - 1)  # a 1 in the place of each code
            words = words + offset * ones
        # Unlike `contiguous`, this also gives a dimension of size 1 the stride that `view` needs.
        words = words.clone(memory_format=torch.contiguous_format)
        codes = unpack(words.view(torch.uint8), self.bits)
        if self.order:
            codes = codes.unflatten(1, (-1, len(self.order)))[:, :, self.order].flatten(1)
        return codes[:, : shape[packed_dim]].movedim(1, packed_dim)

    def read_matrix(
        self, files: TensorFiles, name: str, shape: list[int], dtypes: Iterable[str]
    ) -> Tensor:
        """Read a matrix [out, ...] of `shape`."""
        if self.inputs_first:
            return files.read(name, shape[::-1], dtypes).T
        return files.read(name, shape, dtypes)


class GPTQ(PackedFormat):
    marker, zeros, scales = "qweight", "qzeros", "scales"

    @classmethod
    def from_settings(cls, settings: Settings) -> "GPTQ":
        if any(not pattern.startswith("-:") for pattern in settings.get("dynamic") or ()):
            raise ValueError("dynamic gives some layers other bits, which is not supported")
        versions = (None, "gptq", "gptq_v2")
        check_supported(settings, format=versions, checkpoint_format=versions, adapter=(None, {}))
        check_supported(settings, bits=(4, 8))
        version = settings.get("checkpoint_format") or settings.get("format")
        return cls(
            bits=settings["bits"],
            group_size=_read_group_size(settings),
            is_symmetric=settings.get("sym", True),
            is_scattered=bool(settings.get("desc_act")),
            zero_offset=0 if version == "gptq_v2" else 1,
        )


class AWQ(GPTQ):
    packed_dim = 0
    order = (0, 4, 1, 5, 2, 6, 3, 7)

    @classmethod
    def from_settings(cls, settings: Settings) -> "AWQ":
        check_supported(settings, version=(None, "gemm"), bits=(4,), zero_point=(None, True))
        return cls(bits=4, group_size=_read_group_size(settings), is_symmetric=False)


class CompressedTensors(PackedFormat):
    marker, zeros, scales = "weight_packed", "weight_zero_point", "weight_scale"
    inputs_first = False

    @classmethod
    def from_settings(cls, settings: Settings) -> "CompressedTensors":
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
            num_bits=(4, 8),
            type=(None, "int"),
            strategy=(None, "group", "channel"),
            actorder=(None, False, "static", "weight"),
        )
        return cls(
            bits=weights["num_bits"],
            group_size=_read_group_size({"group_size": weights.get("group_size") or -1}),
            is_symmetric=weights.get("symmetric", True),
        )


def _read_group_size(settings: Settings) -> int:
    """Return 0 for -1, with which all inputs of an output share a scale."""
    size = max(0, check_int("group_size", settings.get("group_size"), minimum=-1))
    if size % 32 != 0:
        raise ValueError(f"group_size={size} must be -1 or a multiple of 32")
    return size


# By quant_method. Each raises ValueError that names an unsupported value of quantization_config.
_READERS: dict[str, Callable[[Settings], Format]] = {
    "gptq": GPTQ.from_settings,
    "awq": AWQ.from_settings,
    "compressed-tensors": CompressedTensors.from_settings,
    "fp8": FP8.from_settings,
}

# --- The scheme of each layer

# Only a checkpoint's own codes quantize these. A router is small, and its errors choose other
# experts. The gate of a shared expert has a single row. The decay of a recurrent state acts on all
# later tokens.
_SENSITIVE = ("gate", "router", "shared_expert_gate", "in_proj_ba")


@dataclass(frozen=True)
class Quantization:
    """How the weights of a model are quantized."""

    linear: Scheme | None = None  # for projections that are read as floats
    head: Scheme | None = None  # for embeddings and output head that are read as floats
    format: Format | None = None  # how the checkpoint stores codes

    def choose_scheme(
        self, name: str, layer: QuantizableLayer, files: TensorFiles | None
    ) -> Scheme | None:
        """Return the scheme of a layer's weights. None: they are floats."""
        is_sensitive = name.rpartition(".")[2] in _SENSITIVE
        is_embedding = isinstance(layer, Embedding)
        if self.format is not None and self.format.scheme is not None:
            # A checkpoint with dummy weights has codes for all projections that can have them.
            has_codes = not is_embedding and not is_sensitive
            if files is not None:
                has_codes = self.format.has_codes(files, name, layer)
            if has_codes:
                return self.format.scheme
        if is_sensitive:
            return None
        return self.head if is_embedding else self.linear


NOT_QUANTIZED = Quantization()
# Embeddings and the output head keep 8 bits, because tokens are most sensitive to their errors.
_OPTIONS = {
    None: NOT_QUANTIZED,
    "int8": Quantization(linear=INT8, head=INT8),
    "int4": Quantization(linear=INT4, head=INT8),
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


def quantize_layers(
    model: nn.Module, quantization: Quantization, files: TensorFiles | None, tp: TensorParallel
) -> None:
    """Replace weights of a model on `meta` by quantized ones. `files` is None for dummy weights.

    Raises ValueError if ranks would share a group of inputs.
    """
    for name, layer in list(model.named_modules()):
        if isinstance(layer, QuantizableLayer):
            scheme = quantization.choose_scheme(name, layer, files)
            if scheme is not None:
                layer.quantize(scheme)
                _check_shards(layer, name, scheme, tp)


def _check_shards(layer: QuantizableLayer, name: str, scheme: Scheme, tp: TensorParallel) -> None:
    """Raise ValueError if ranks would share a group of inputs."""
    for key, target in layer.targets(name):
        num_inputs = target.full_shape[-1]
        is_divided = target.dim == 1 and tp.size > 1
        if is_divided and num_inputs % (scheme.group_size * tp.size) != 0:
            raise ValueError(
                f"tensor_parallel_size={tp.size} divides groups of {scheme.group_size} inputs"
                f" of {key}, which has {num_inputs}: use fewer ranks"
            )
