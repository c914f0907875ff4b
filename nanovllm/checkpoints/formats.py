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

Codes that a QuantizedWeight can hold are kept as they are. Other weights become floats, because
new codes would lose precision. Whether a weight is quantized is read from the names of the stored
tensors, since every format has its own rules for exceptions in config.json.

References: AutoGPTQ, AutoAWQ and compressed-tensors, which define the formats.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanovllm.checkpoints.tensor_files import FLOATS, TensorFiles
from nanovllm.layers.quantized import QuantizedWeight, Scheme, unpack
from nanovllm.utils.helpers import cdiv

FP8_BLOCK = 128


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a checkpoint stores quantized weights."""

    marker: str  # the key of a tensor that every quantized weight has, and no other
    scheme: Scheme | None = None  # scheme of the codes. None: the weights are read as floats

    def is_stored(self, files: TensorFiles, layer: str) -> bool:
        """Return whether the checkpoint has the weight of `layer` in this format."""
        return f"{layer}.{self.marker}" in files

    def read(self, files: TensorFiles, layer: str, shape: list[int]) -> QuantizedWeight | Tensor:
        """Read the weight of `layer`, which has this shape [out, in].

        Raises ValueError for tensors that are missing, or do not fit it or config.json.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class FP8(Format):
    """float8_e4m3fn with a factor for each block of 128 x 128."""

    marker: str = "weight_scale_inv"

    def read(self, files: TensorFiles, layer: str, shape: list[int]) -> Tensor:
        weight = files.read(f"{layer}.weight", shape, ["F8_E4M3"])
        num_blocks = [cdiv(size, FP8_BLOCK) for size in shape]
        factors = files.read(f"{layer}.{self.marker}", num_blocks).float()
        for dim in (0, 1):
            factors = factors.repeat_interleave(FP8_BLOCK, dim).narrow(dim, 0, shape[dim])
        return weight.float() * factors


@dataclass(frozen=True, kw_only=True)
class PackedFormat(Format):
    """Integer codes in groups of inputs, several to an int32, with the low bits first.

    Codes are packed along `packed_dim` of [out, in], and zeros along the outputs. In GPTQ a group
    can have scattered inputs.
    """

    zeros: str  # the keys of these tensors
    scales: str
    inputs_first: bool = True  # whether matrices are stored as [in, out], not as [out, in]
    packed_dim: int = 1
    order: tuple[int, ...] = ()  # code i has this place in an int32. Empty: its own
    bits: int
    group_size: int  # 0: all inputs of an output share a scale
    is_symmetric: bool  # all zeros are the middle code
    # Added to each stored zero, with carries within an int32. Version 1 of GPTQ subtracts 1 from
    # all zeros of an int32 in one subtraction, so a zero of 0 borrows from the next one.
    zero_offset: int = 0

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
        in_order = torch.arange(in_features) // (self.group_size or in_features)
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


# What the formats call their tensors, and how they pack them.
GPTQ: dict[str, Any] = dict(marker="qweight", zeros="qzeros", scales="scales")
AWQ = dict(GPTQ, packed_dim=0, order=(0, 4, 1, 5, 2, 6, 3, 7))
COMPRESSED: dict[str, Any] = dict(
    marker="weight_packed", zeros="weight_zero_point", scales="weight_scale", inputs_first=False
)
