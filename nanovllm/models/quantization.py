"""Which weights are quantized, and how checkpoints store quantized weights.

    quant_method in config.json   tensors of a weight [out, in]             read as
    gptq                          qweight, qzeros, scales, (g_idx)          the same codes
    gptq with desc_act            the same, groups of scattered inputs      floats
    awq, version gemm             qweight, qzeros, scales                   the same codes
    compressed-tensors            weight_packed, weight_scale, ...          the same codes
    fp8, blocks of 128 x 128      weight, weight_scale_inv                  floats

Codes that a QuantizedWeight can hold are kept as they are. Other weights become floats, because
new codes would lose precision. They are quantized again only if the option `quantization` asks for
it. Whether a weight is quantized is read from the names of the stored tensors, since every format
has its own rules for exceptions in config.json.

References: AutoGPTQ, AutoAWQ and compressed-tensors, which define the formats.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PretrainedConfig

from nanovllm.arithmetic import cdiv
from nanovllm.checks import check_choice, check_int, naming
from nanovllm.layers.quantized import QuantizedWeight, Scheme
from nanovllm.models.tensor_files import TensorFiles

INT8 = Scheme(bits=8, group_size=128)
INT4 = Scheme(bits=4, group_size=64)
# Embeddings and the output head keep 8 bits, because tokens are most sensitive to their errors.
_OPTIONS = {"int8": (INT8, INT8), "int4": (INT4, INT8)}
_GROUP_SIZES = (32, 64, 128)  # of a Scheme
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where an int32 has the codes of 8 outputs
_FP8_BLOCK = 128
Settings = dict[str, Any]


@dataclass(frozen=True)
class Format:
    """How a checkpoint stores quantized weights. Each quant_method has a subclass.

    Attributes:
        scheme: That of the codes. None: the weights are read as floats.
    """

    MARKER: ClassVar[str]  # a tensor that every quantized weight has, and no other
    scheme: Scheme | None

    def is_stored(self, files: TensorFiles, layer: str) -> bool:
        """Return whether the checkpoint has the weight of `layer` in this format."""
        return f"{layer}.{self.MARKER}" in files

    def is_empty_bias(self, files: TensorFiles, name: str) -> bool:
        """Return whether `name` is a bias of zeros, which AutoGPTQ adds where there is none."""
        layer, _, key = name.rpartition(".")
        is_bias = key == "bias" and self.is_stored(files, layer)
        return is_bias and not files.read(name).any()

    def read(self, files: TensorFiles, layer: str, shape: list[int]) -> QuantizedWeight | Tensor:
        """Read the weight of `layer`, which has this shape.

        Raises ValueError for tensors that are missing, or do not fit it or config.json.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class PackedFormat(Format):
    """Integer codes of `bits` in groups of `group_size` inputs, several codes to an int32."""

    bits: int
    group_size: int | None  # None: all inputs of an output share a scale
    is_symmetric: bool  # all zeros are the middle code

    def num_groups(self, in_features: int) -> int:
        return 1 if self.group_size is None else cdiv(in_features, self.group_size)

    def num_words(self, num_codes: int) -> int:
        return cdiv(num_codes * self.bits, 32)

    def unpack(self, packed: Tensor, size: int) -> Tensor:
        """Unpack the last dimension of an int32 tensor, the low bits first, to `size` codes."""
        shifts = torch.arange(0, 32, self.bits, dtype=torch.int32)
        codes = packed[..., None] >> shifts & (1 << self.bits) - 1
        return codes.to(torch.uint8).flatten(-2)[..., :size]

    def assemble(
        self, codes: Tensor, scales: Tensor, zeros: Tensor | None = None
    ) -> QuantizedWeight:
        """Make a weight of codes [out, in], and scales and zeros [out, groups].

        Without zeros, each is the middle code. Groups that are larger than those of the scheme are
        divided.
        """
        if zeros is None:
            zeros = torch.full(scales.shape, self.middle)
        assert self.scheme is not None
        in_features = codes.shape[1]
        num_groups = cdiv(in_features, self.scheme.group_size)
        num_parts = cdiv(self.group_size or in_features, self.scheme.group_size)
        scales = scales.repeat_interleave(num_parts, dim=1)[:, :num_groups]
        zeros = zeros.repeat_interleave(num_parts, dim=1)[:, :num_groups]
        return QuantizedWeight.from_codes(self.scheme, torch.float32, codes, scales, zeros)

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)


@dataclass(frozen=True)
class GPTQ(PackedFormat):
    """qweight [in / 8, out], qzeros [groups, out / 8], scales [groups, out], g_idx [in]."""

    MARKER = "qweight"
    stored_offset: int  # what is added to stored zeros: 1 in version 1 of the format, else 0

    def read(self, files: TensorFiles, layer: str, shape: list[int]) -> QuantizedWeight | Tensor:
        out_features, in_features = shape
        num_groups = self.num_groups(in_features)
        packed = files.read(
            f"{layer}.qweight", [self.num_words(in_features), out_features], ["I32"]
        )
        codes = self.unpack(packed.T, in_features)
        sizes = [num_groups, self.num_words(out_features)]
        zeros = self.unpack(files.read(f"{layer}.qzeros", sizes, ["I32"]), out_features).T.int()
        if self.is_symmetric:
            # Some checkpoints of version 2 say that they are of version 1. Both mean the middle.
            if not bool(((zeros == self.middle) | (zeros == self.middle - 1)).all()):
                raise ValueError(f"{layer}.qzeros has other zeros than sym=true allows")
            zeros = torch.full_like(zeros, self.middle)
        else:
            zeros += self.stored_offset
        scales = files.read(f"{layer}.scales", [num_groups, out_features]).T.float()
        in_order = torch.arange(in_features) // (self.group_size or in_features)
        groups = in_order
        if f"{layer}.g_idx" in files:
            groups = files.read(f"{layer}.g_idx", [in_features], ["I32"]).long()
        if self.scheme is not None:
            if not torch.equal(groups, in_order):
                raise ValueError(f"{layer}.g_idx reorders inputs, but config.json has no desc_act")
            return self.assemble(codes, scales, zeros)
        if not bool((groups.clamp(0, num_groups - 1) == groups).all()):
            raise ValueError(f"{layer}.g_idx names groups that do not exist")
        return (codes.float() - zeros[:, groups]) * scales[:, groups]


@dataclass(frozen=True)
class AWQ(PackedFormat):
    """qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]."""

    MARKER = "qweight"

    def read(self, files: TensorFiles, layer: str, shape: list[int]) -> QuantizedWeight:
        out_features, in_features = shape
        num_groups, num_words = self.num_groups(in_features), self.num_words(out_features)
        packed = files.read(f"{layer}.qweight", [in_features, num_words], ["I32"])
        codes = self._unpack_outputs(packed, out_features)
        zeros: Tensor | None = None
        if not self.is_symmetric:
            packed = files.read(f"{layer}.qzeros", [num_groups, num_words], ["I32"])
            zeros = self._unpack_outputs(packed, out_features)
        scales = files.read(f"{layer}.scales", [num_groups, out_features]).T
        return self.assemble(codes, scales, zeros)

    def _unpack_outputs(self, packed: Tensor, out_features: int) -> Tensor:
        stored = self.unpack(packed, packed.shape[1] * 8).unflatten(1, (-1, 8))
        return stored[:, :, _AWQ_ORDER].flatten(1)[:, :out_features].T


@dataclass(frozen=True)
class CompressedTensors(PackedFormat):
    """weight_packed [out, in / 8], weight_scale [out, groups], weight_zero_point [out / 8, groups].

    weight_shape has the shape of the weight.
    """

    MARKER = "weight_packed"

    def read(self, files: TensorFiles, layer: str, shape: list[int]) -> QuantizedWeight:
        out_features, in_features = shape
        num_groups = self.num_groups(in_features)
        stored_shape = files.read(f"{layer}.weight_shape", [2], ["I64", "I32"]).tolist()
        if stored_shape != shape:
            raise ValueError(f"{layer}.weight_shape is {stored_shape}, the model needs {shape}")
        sizes = [out_features, self.num_words(in_features)]
        packed = files.read(f"{layer}.weight_packed", sizes, ["I32"])
        codes = self.unpack(packed, in_features)
        zeros: Tensor | None = None
        if not self.is_symmetric:
            sizes = [self.num_words(out_features), num_groups]
            packed = files.read(f"{layer}.weight_zero_point", sizes, ["I32"])
            zeros = self.unpack(packed.T, out_features).T
        scales = files.read(f"{layer}.weight_scale", [out_features, num_groups])
        return self.assemble(codes, scales, zeros)


@dataclass(frozen=True)
class FP8(Format):
    """weight [out, in] in float8_e4m3fn, with a factor for each block of 128 x 128."""

    MARKER = "weight_scale_inv"

    def read(self, files: TensorFiles, layer: str, shape: list[int]) -> Tensor:
        weight = files.read(f"{layer}.weight", shape, ["F8_E4M3"]).float()
        num_blocks = [cdiv(size, _FP8_BLOCK) for size in shape]
        factors = files.read(f"{layer}.weight_scale_inv", num_blocks).float()
        of_rows = factors.repeat_interleave(_FP8_BLOCK, dim=0)[: shape[0]]
        return weight * of_rows.repeat_interleave(_FP8_BLOCK, dim=1)[:, : shape[1]]


@dataclass(frozen=True)
class Quantization:
    """How the weights of a model are quantized."""

    linear: Scheme | None = None  # of projections that are read as floats
    head: Scheme | None = None  # of embeddings and output head, if they are read as floats
    format: Format | None = None  # of the checkpoint


NOT_QUANTIZED = Quantization()


def read_quantization(config: PretrainedConfig, option: str | None) -> Quantization:
    """Read quantization_config. Raises ValueError that names an unsupported format or value."""
    linear, head = _OPTIONS[option] if option is not None else (None, None)
    settings = getattr(config, "quantization_config", None)
    if not settings:
        return Quantization(linear, head)
    with naming("quantization_config", Exception):  # an invalid value can raise anything
        settings = dict(settings)
        method = check_choice("quant_method", settings.get("quant_method"), tuple(_READERS))
        return Quantization(linear, head, _READERS[method](settings))


def _read_gptq(settings: Settings) -> GPTQ:
    if any(not pattern.startswith("-:") for pattern in settings.get("dynamic") or ()):
        raise ValueError("dynamic gives some layers other bits, which is not supported")
    check_choice("format", settings.get("format", "gptq"), ("gptq", "gptq_v2"))
    version = check_choice(
        "checkpoint_format", settings.get("checkpoint_format", "gptq"), ("gptq", "gptq_v2")
    )
    bits, group_size, scheme = _read_groups(settings["bits"], settings["group_size"])
    return GPTQ(
        scheme=None if settings.get("desc_act") else scheme,
        bits=bits,
        group_size=group_size,
        is_symmetric=settings.get("sym", True),
        stored_offset=1 if version == "gptq" else 0,
    )


def _read_awq(settings: Settings) -> AWQ:
    check_choice("version", str(settings.get("version", "gemm")).lower(), ("gemm",))
    check_choice("bits", str(settings["bits"]), ("4",))
    bits, group_size, scheme = _read_groups(settings["bits"], settings["group_size"])
    return AWQ(scheme, bits, group_size, is_symmetric=not settings.get("zero_point", True))


def _read_compressed(settings: Settings) -> CompressedTensors:
    check_choice("format", settings.get("format"), ("pack-quantized",))
    groups = list(settings["config_groups"].values())
    if len(groups) != 1:
        raise ValueError("several config_groups are not supported")
    weights = groups[0]["weights"]
    for name in ("input_activations", "output_activations"):
        if groups[0].get(name) is not None:
            raise ValueError(f"{name} of config_groups are not supported: only weights can be")
    check_choice("type", weights.get("type", "int"), ("int",))
    check_choice("strategy", weights.get("strategy", "group"), ("group", "channel"))
    if weights.get("actorder") in ("group", "dynamic"):
        raise ValueError(f"actorder={weights['actorder']!r} is not supported")
    bits, group_size, scheme = _read_groups(weights["num_bits"], weights.get("group_size") or -1)
    return CompressedTensors(scheme, bits, group_size, weights.get("symmetric", True))


def _read_fp8(settings: Settings) -> FP8:
    if settings.get("weight_block_size") != [_FP8_BLOCK, _FP8_BLOCK]:
        raise ValueError("weight_block_size must be [128, 128]")
    check_choice("activation_scheme", settings.get("activation_scheme", "dynamic"), ("dynamic",))
    return FP8(scheme=None)


def _read_groups(bits: object, group_size: object) -> tuple[int, int | None, Scheme]:
    """Return the bits, the group size (None for a whole row), and the scheme that holds them."""
    num_bits = int(check_choice("bits", str(bits), ("4", "8")))
    size = check_int("group_size", group_size, minimum=-1)
    scheme_size = size if size in _GROUP_SIZES else max(_GROUP_SIZES)
    if size != -1 and (size == 0 or size % scheme_size != 0):
        raise ValueError(f"group_size={size} must be -1, 32, 64 or a multiple of 128")
    return num_bits, None if size == -1 else size, Scheme(num_bits, scheme_size)


_READERS = {
    "gptq": _read_gptq,
    "awq": _read_awq,
    "compressed-tensors": _read_compressed,
    "fp8": _read_fp8,
}
