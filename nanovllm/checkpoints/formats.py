"""How checkpoints store quantized weights, and how they are read.

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
    fp8, stacked experts gate_up_proj, gate_up_proj_scale_inv, down_proj, ...   floats

Codes that a QuantizedWeight can hold are kept as they are. Other weights become floats, because
new codes would lose precision. Whether a weight is quantized is read from the names of the stored
tensors, since every format has its own rules for exceptions in config.json.

References: AutoGPTQ, AutoAWQ and compressed-tensors, which define the formats.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nanovllm.checkpoints.tensor_files import FLOATS, TensorFiles
from nanovllm.layers.quantized import QuantizedWeight, Scheme, unpack
from nanovllm.utils.helpers import cdiv

FP8_BLOCK = 128
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # output i has this place in an int32, low bits first


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a checkpoint stores quantized weights."""

    marker: ClassVar[str]  # the key of a tensor that every quantized weight has, and no other
    scheme: Scheme | None = None  # scheme of the codes. None: the weights are read as floats

    def is_stored(self, files: TensorFiles, layer: str) -> bool:
        """Return whether the checkpoint has the weight of `layer` in this format."""
        return f"{layer}.{self.marker}" in files

    def read(self, files: TensorFiles, layer: str, shape: list[int]) -> QuantizedWeight | Tensor:
        """Read the weight of `layer`, which has this shape [out, in], or [experts, out, in].

        Raises ValueError for tensors that are missing, or do not fit it or config.json.
        """
        raise NotImplementedError


class FP8(Format):
    """float8_e4m3fn with a factor for each block of 128 x 128."""

    marker = "weight_scale_inv"

    def read(self, files: TensorFiles, layer: str, shape: list[int]) -> Tensor:
        name = f"{layer}.weight"
        weight = files.open(name, shape, ["F8_E4M3"])
        is_stacked = len(shape) == 3 and layer.endswith("gate_up_proj")
        if is_stacked and shape[1] % (2 * FP8_BLOCK) != 0:
            raise ValueError(
                f"{files.locate(name)} has blocks with rows of both gate_proj and up_proj, because"
                f" moe_intermediate_size is no multiple of {FP8_BLOCK}: store experts singly"
            )
        num_blocks = [cdiv(size, FP8_BLOCK) for size in shape[-2:]]
        factors = files.read(f"{layer}.{self.marker}", shape[:-2] + num_blocks).float()
        for dim in (-2, -1):
            factors = factors.repeat_interleave(FP8_BLOCK, dim).narrow(dim, 0, shape[dim])
        return weight[...].float() * factors


@dataclass(frozen=True, kw_only=True)
class PackedFormat(Format):
    """Integer codes in groups of inputs, several to an int32, with the low bits first.

    Codes are packed along `packed_dim` of [out, in], and zeros along the outputs.
    """

    zeros: ClassVar[str]  # the keys of these tensors
    scales: ClassVar[str]
    inputs_first: ClassVar[bool]  # whether matrices are stored as [in, out], not as [out, in]
    packed_dim: ClassVar[int] = 1

    bits: int
    group_size: int  # 0: all inputs of an output share a scale
    is_symmetric: bool  # all zeros are the middle code
    zero_offset: int = 0  # added to each stored zero, with carries within a word of 32 bits

    def read(self, files: TensorFiles, layer: str, shape: list[int]) -> QuantizedWeight | Tensor:
        out_features, in_features = shape
        groups = self.find_groups(files, layer, in_features)
        grouped = [out_features, cdiv(in_features, self.group_size or in_features)]
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

    def find_groups(self, files: TensorFiles, layer: str, in_features: int) -> Tensor:
        """Return the group of each input."""
        return torch.arange(in_features) // (self.group_size or in_features)

    def read_zeros(self, files: TensorFiles, name: str, shape: list[int]) -> Tensor:
        if not self.is_symmetric:
            return self.read_codes(files, name, shape, 0, self.zero_offset)
        middle = 1 << (self.bits - 1)
        if name in files:
            stored = self.read_codes(files, name, shape, packed_dim=0)
            # Some checkpoints of GPTQ's version 2 say that they are of version 1.
            if not ((stored == middle) | (stored == middle - self.zero_offset)).all():
                raise ValueError(
                    f"{files.locate(name)} has zeros that do not fit symmetric codes, which"
                    " config.json asks for"
                )
        return torch.full(shape, middle)

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
        codes = self.unpack(words.contiguous())
        return codes[:, : shape[packed_dim]].movedim(1, packed_dim)

    def read_matrix(
        self, files: TensorFiles, name: str, shape: list[int], dtypes: Iterable[str]
    ) -> Tensor:
        """Read a matrix [out, ...] of `shape`."""
        if self.inputs_first:
            return files.read(name, shape[::-1], dtypes).T
        return files.read(name, shape, dtypes)

    def unpack(self, words: Tensor) -> Tensor:
        """Return the codes in each row of an int32 matrix, as uint8."""
        return unpack(words.view(torch.uint8), self.bits)


class GPTQ(PackedFormat):
    """Groups can be of scattered inputs.

    Version 1 subtracts 1 from all zeros of an int32 in one subtraction, so a zero of 0 borrows from
    the next one. Version 2 stores zeros as they are.
    """

    marker = "qweight"
    zeros = "qzeros"
    scales = "scales"
    inputs_first = True

    def find_groups(self, files: TensorFiles, layer: str, in_features: int) -> Tensor:
        in_order = super().find_groups(files, layer, in_features)
        name = f"{layer}.g_idx"
        if name not in files:
            return in_order
        groups = files.read(name, [in_features], ["I32"]).long()
        if self.scheme is not None and not torch.equal(groups, in_order):
            problem = "reorders inputs, but config.json has no desc_act"
            raise ValueError(f"{files.locate(name)} {problem}")
        if groups.min() < 0 or groups.max() > in_order[-1]:
            raise ValueError(f"{files.locate(name)} has groups that do not exist")
        return groups


class AWQ(GPTQ):
    """The tensors of GPTQ, with codes that are packed along the outputs and interleaved."""

    packed_dim = 0

    def unpack(self, words: Tensor) -> Tensor:
        return super().unpack(words).unflatten(1, (-1, 8))[:, :, _AWQ_ORDER].flatten(1)


class CompressedTensors(PackedFormat):
    """Matrices are stored as [out, in], and their shapes beside them, which are not read."""

    marker = "weight_packed"
    zeros = "weight_zero_point"
    scales = "weight_scale"
    inputs_first = False
