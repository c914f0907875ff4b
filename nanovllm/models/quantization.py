"""Which weights are quantized, and how checkpoints store quantized weights.

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

Codes that a QuantizedWeight can hold are kept as they are. Other weights become floats, because
new codes would lose precision. They are quantized again only if the option `quantization` asks for
it. Whether a weight is quantized is read from the names of the stored tensors, since every format
has its own rules for exceptions in config.json.

References: AutoGPTQ, AutoAWQ and compressed-tensors, which define the formats.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from nanovllm.arithmetic import cdiv
from nanovllm.checks import check_choice, check_int, naming, show
from nanovllm.layers.quantized import QuantizedWeight, Scheme, unpack
from nanovllm.models.tensor_files import FLOATS, TensorFiles

INT8 = Scheme(bits=8, group_size=128)
INT4 = Scheme(bits=4, group_size=64)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # output i has this place in an int32, low bits first
_FP8_BLOCK = 128
Settings = dict[str, Any]


@dataclass(frozen=True)
class Format:
    """How a checkpoint stores quantized weights.

    Attributes:
        marker: The key of a tensor that every quantized weight has, and no other weight.
        scheme: That of the codes. None: the weights are read as floats.
    """

    marker: str
    scheme: Scheme | None

    def is_stored(self, files: TensorFiles, layer: str) -> bool:
        """Return whether the checkpoint has the weight of `layer` in this format."""
        return f"{layer}.{self.marker}" in files

    def read(self, files: TensorFiles, layer: str, shape: list[int]) -> QuantizedWeight | Tensor:
        """Read the weight of `layer`, which has this shape.

        Raises ValueError for tensors that are missing, or do not fit it or config.json.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PackedFormat(Format):
    """Integer codes in groups of inputs, several to an int32, with the low bits first.

    Attributes:
        zeros, scales: The keys of these tensors.
        inputs_first: Whether matrices are stored as [in, out]. Otherwise they are [out, in].
        packed_dim: The dimension of [out, in] along which codes are packed. Zeros are packed along
            the outputs.
        zero_offset: What is added to stored zeros.
    """

    zeros: str
    scales: str
    inputs_first: bool
    packed_dim: int
    bits: int
    group_size: int  # 0: all inputs of an output share a scale
    is_symmetric: bool  # all zeros are the middle code
    zero_offset: int = 0

    def read(self, files: TensorFiles, layer: str, shape: list[int]) -> QuantizedWeight | Tensor:
        out_features, in_features = shape
        in_order = torch.arange(in_features) // (self.group_size or in_features)
        groups = self._read_groups(files, f"{layer}.g_idx", in_order)
        grouped = [out_features, int(in_order[-1]) + 1]
        codes = self._read_codes(files, f"{layer}.{self.marker}", shape, self.packed_dim)
        zeros = self._read_zeros(files, f"{layer}.{self.zeros}", grouped)
        scales = self._read_matrix(files, f"{layer}.{self.scales}", grouped, FLOATS).float()
        name = f"{layer}.weight_shape"
        if name in files and files.read(name, [2], ["I64", "I32"]).tolist() != shape:
            raise ValueError(f"{files.locate(name)} is not {shape}, which the model needs")
        if self.scheme is None:
            return (codes.float() - zeros[:, groups]) * scales[:, groups]
        # Groups that are larger than those of the scheme are divided.
        groups = groups[:: self.scheme.group_size]
        parts = (codes, scales[:, groups], zeros[:, groups])
        return QuantizedWeight.from_codes(self.scheme, torch.float32, *parts)

    def _read_groups(self, files: TensorFiles, name: str, in_order: Tensor) -> Tensor:
        """Return the group of each input."""
        if name not in files:
            return in_order
        groups = files.read(name, [len(in_order)], ["I32"]).long()
        if self.scheme is not None and not torch.equal(groups, in_order):
            problem = "reorders inputs, but config.json has no desc_act"
            raise ValueError(f"{files.locate(name)} {problem}")
        if groups.min() < 0 or groups.max() > in_order[-1]:
            raise ValueError(f"{files.locate(name)} has groups that do not exist")
        return groups

    def _read_zeros(self, files: TensorFiles, name: str, shape: list[int]) -> Tensor:
        middle = torch.full(shape, 1 << (self.bits - 1))
        if self.is_symmetric and name not in files:
            return middle
        zeros = self._read_codes(files, name, shape, packed_dim=0).int() + self.zero_offset
        if not self.is_symmetric:
            return zeros
        # Some checkpoints of GPTQ's version 2 say that they are of version 1.
        if not set((zeros - middle).unique().tolist()) <= {0, self.zero_offset}:
            raise ValueError(
                f"{files.locate(name)} has zeros that do not fit symmetric codes, which config.json"
                " asks for"
            )
        return middle

    def _read_codes(
        self, files: TensorFiles, name: str, shape: list[int], packed_dim: int
    ) -> Tensor:
        """Return uint8 of `shape`."""
        sizes = list(shape)
        sizes[packed_dim] = cdiv(shape[packed_dim] * self.bits, 32)
        words = self._read_matrix(files, name, sizes, ["I32"]).movedim(packed_dim, 1)
        codes = unpack(words.contiguous().view(torch.uint8), self.bits)
        if self.packed_dim == 0:  # only AWQ packs along the outputs, and interleaves them
            codes = codes.unflatten(1, (-1, 8))[:, :, _AWQ_ORDER].flatten(1)
        return codes[:, : shape[packed_dim]].movedim(1, packed_dim)

    def _read_matrix(
        self, files: TensorFiles, name: str, shape: list[int], dtypes: Iterable[str]
    ) -> Tensor:
        """Read a matrix [out, ...] of `shape`."""
        if self.inputs_first:
            return files.read(name, shape[::-1], dtypes).T
        return files.read(name, shape, dtypes)


_GPTQ = partial(
    PackedFormat,
    "qweight",
    zeros="qzeros",
    scales="scales",
    inputs_first=True,
    packed_dim=1,
)
_AWQ = partial(_GPTQ, packed_dim=0)
_COMPRESSED = partial(
    PackedFormat,
    "weight_packed",
    zeros="weight_zero_point",
    scales="weight_scale",
    inputs_first=False,
    packed_dim=1,
)


@dataclass(frozen=True)
class FP8(Format):
    """float8_e4m3fn with a factor for each block of 128 x 128."""

    def read(self, files: TensorFiles, layer: str, shape: list[int]) -> Tensor:
        weight = files.read(f"{layer}.weight", shape, ["F8_E4M3"]).float()
        num_blocks = [cdiv(size, _FP8_BLOCK) for size in shape]
        factors = files.read(f"{layer}.{self.marker}", num_blocks).float()
        for dim, size in enumerate(shape):
            factors = factors.repeat_interleave(_FP8_BLOCK, dim).narrow(dim, 0, size)
        return weight * factors


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
    """Read quantization_config. Raises ValueError that names an unsupported format or value."""
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
    _check(settings, format=versions, checkpoint_format=versions)
    version = settings.get("checkpoint_format") or settings.get("format")
    format = _make_packed(
        _GPTQ,
        settings["bits"],
        settings["group_size"],
        settings.get("sym", True),
        zero_offset=0 if version == "gptq_v2" else 1,
    )
    return replace(format, scheme=None) if settings.get("desc_act") else format


def _read_awq(settings: Settings) -> Format:
    _check(settings, version=(None, "gemm", "GEMM"), bits=(4,))
    is_symmetric = not settings.get("zero_point", True)
    return _make_packed(_AWQ, settings["bits"], settings["group_size"], is_symmetric)


def _read_compressed(settings: Settings) -> Format:
    _check(settings, format=("pack-quantized",))
    groups = list(settings["config_groups"].values())
    if len(groups) != 1:
        raise ValueError(
            f"several config_groups are not supported: {', '.join(settings['config_groups'])}"
        )
    _check(groups[0], input_activations=(None,), output_activations=(None,))
    weights = groups[0]["weights"]
    _check(
        weights,
        type=(None, "int"),
        strategy=(None, "group", "channel"),
        actorder=(None, False, "static", "weight"),
    )
    is_symmetric = weights.get("symmetric", True)
    return _make_packed(_COMPRESSED, weights["num_bits"], weights.get("group_size"), is_symmetric)


def _read_fp8(settings: Settings) -> Format:
    block = [_FP8_BLOCK, _FP8_BLOCK]
    _check(settings, weight_block_size=(block,), activation_scheme=(None, "dynamic"))
    return FP8("weight_scale_inv", scheme=None)


def _check(settings: Settings, **supported: tuple[object, ...]) -> None:
    """Require supported values. A setting can be absent if None is one of them."""
    for name, values in supported.items():
        if settings.get(name) not in values:
            given = show(settings.get(name))
            raise ValueError(f"{name} must be one of {', '.join(map(repr, values))}, not {given}")


def _make_packed(
    make: partial[PackedFormat],
    bits: int,
    group_size: object,
    is_symmetric: bool,
    zero_offset: int = 0,
) -> PackedFormat:
    _check({"bits": bits}, bits=(4, 8))
    size = 0 if group_size in (None, -1) else check_int("group_size", group_size, minimum=1)
    if size % 32 != 0:
        raise ValueError(f"group_size={size} must be -1 or a multiple of 32")
    return make(
        scheme=Scheme(bits, gcd(size, 128)),  # groups of up to 128, as kernels take them
        bits=bits,
        group_size=size,
        is_symmetric=is_symmetric,
        zero_offset=zero_offset,
    )


_READERS = {
    "gptq": _read_gptq,
    "awq": _read_awq,
    "compressed-tensors": _read_compressed,
    "fp8": _read_fp8,
}
