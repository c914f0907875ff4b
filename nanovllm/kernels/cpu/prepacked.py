"""Layers with prepacked weights, in the layout that the GEMM kernels of gemm.h read."""

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.kernels.cpu.declarations import Weight
from nanovllm.kernels.cpu.library import load
from nanovllm.kernels.optimized_layer import OptimizedLayer
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.layers.quantized import QuantizedWeight
from nanovllm.models.moe import Experts
from nanovllm.utils.arithmetic import cdiv

_PANEL_WIDTH = 32  # WIDTH of gemm.h
_CACHE_LINE = 64  # bytes
_LARGEST_GROUP = 128  # MAX_GROUP_SIZE of quantized.h
_CHUNK = 1 << 18  # bytes of codes that are prepacked at once, so that temporary copies stay cached


class PrepackedWeight(nn.Module):
    """A weight [out_features, in_features], prepacked into panels.

    gemm.h describes the layout of panels, and quantized.h that of quantized weights. If `gated`,
    the first half of the rows is gate_proj and the second up_proj, and each panel holds 16 rows of
    both.
    """

    def __init__(self, weight: Tensor | QuantizedWeight, gated: bool = False) -> None:
        super().__init__()
        self.gated = gated
        self.out_features, self.in_features = weight.shape
        if gated:
            self.out_features //= 2
        self.dtype = weight.dtype
        if isinstance(weight, QuantizedWeight):
            self.bits = weight.scheme.bits
            self.group_size = weight.scheme.group_size
            self.panels = self._prepack_codes(weight)
        else:
            self.bits = 0
            self.group_size = 0
            self.panels = self._prepack_floats(weight.detach())
        # What C++ functions take. It points to `panels`, so keep this object.
        self.struct = Weight(
            panels=self.panels.data_ptr(), bits=self.bits, group_size=self.group_size
        )

    @staticmethod
    def can_prepack(weight: Tensor | QuantizedWeight) -> bool:
        if isinstance(weight, QuantizedWeight):
            device = weight.codes.device
            group_size = weight.scheme.group_size
            has_known_groups = group_size % _PANEL_WIDTH == 0 and group_size <= _LARGEST_GROUP
        else:
            device = weight.device
            has_known_groups = True
        has_pairs = weight.shape[-1] % _inputs_per_pair(weight.dtype) == 0
        return device.type == "cpu" and has_known_groups and has_pairs

    def _prepack_floats(self, weight: Tensor) -> Tensor:
        padding = -self.in_features % (_CACHE_LINE // weight.itemsize)
        rows = self._divide(_pad(weight, padding), 0, cdiv(self.out_features, self._width))
        panels = rows.unflatten(2, (-1, _inputs_per_pair(weight.dtype)))
        return panels.transpose(1, 2).contiguous()  # [num_panels, depth / pair, 32, pair]

    def _prepack_codes(self, weight: QuantizedWeight) -> Tensor:
        num_panels = cdiv(self.out_features, self._width)
        num_groups = weight.scales.shape[1]
        bytes_per_group = self.group_size * self.bits // 8  # bytes of codes in a row
        bytes_per_row = bytes_per_group + weight.scales.itemsize + weight.zeros.itemsize
        panels = weight.codes.new_empty(num_panels, num_groups, _PANEL_WIDTH * bytes_per_row)
        padding = num_groups * bytes_per_group - weight.codes.shape[1]
        at_once = max(1, _CHUNK // (_PANEL_WIDTH * num_groups * bytes_per_group))
        for first in range(0, num_panels, at_once):
            end = min(first + at_once, num_panels)
            scales = self._divide(weight.scales, first, end).transpose(1, 2)
            zeros = self._divide(weight.zeros, first, end).transpose(1, 2)
            codes = _pad(self._divide(weight.codes, first, end), padding)
            if self.bits == 8:
                zeros = zeros - 128
                words = (codes ^ 128).view(torch.int16)
            else:
                words = _interleave(codes)
            lines = words.unflatten(2, (num_groups, -1)).permute(0, 2, 3, 1).flatten(2)
            parts = [part.contiguous().view(torch.uint8) for part in (scales, zeros, lines)]
            torch.cat(parts, dim=2, out=panels[first:end])
        return panels

    @property
    def _width(self) -> int:
        """Outputs of a panel."""
        return _PANEL_WIDTH // 2 if self.gated else _PANEL_WIDTH

    def _divide(self, rows: Tensor, first: int, end: int) -> Tensor:
        """Return the rows of panels `first` to `end`, padded with zeros: [num_panels, 32, n]."""
        parts = rows.unflatten(0, (_PANEL_WIDTH // self._width, -1))
        parts = parts[:, first * self._width : end * self._width]
        parts = _pad(parts, 0, -parts.shape[1] % self._width)
        return parts.unflatten(1, (-1, self._width)).transpose(0, 1).flatten(1, 2)

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x [..., in_features]. Return [..., out_features].

        If `gated`, the result is SwiGLU of gate and up, without a bias.
        """
        x = x.contiguous()
        output = x.new_empty(*x.shape[:-1], self.out_features)
        load(x.dtype).linear(
            x,
            ctypes.byref(self.struct),
            bias,
            None,  # no residual
            output,
            x.numel() // self.in_features,
            self.in_features,
            self.in_features,  # row stride of x
            self.out_features,
            self.out_features,
            self.gated,
        )
        return output

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows `ids` [num_rows] of the weight, as [num_rows, in_features]."""
        assert ids.dtype == torch.int32 and not self.gated
        output = self.panels.new_empty(len(ids), self.in_features, dtype=self.dtype)
        load(self.dtype).gather_rows(ctypes.byref(self.struct), ids, output, *output.shape)
        return output


def _pad(x: Tensor, columns: int, rows: int = 0) -> Tensor:
    """Append zeros. F.pad copies the tensor also if there is nothing to append."""
    return F.pad(x, (0, columns, 0, rows)) if columns or rows else x


def _interleave(codes: Tensor) -> Tensor:
    """Interleave 4-bit codes [num_panels, 32, n] of pairs, as lines of a panel have them.

    Return int32 [num_panels, 8, n]. A number has the pairs of outputs k, k + 8, k + 16 and k + 24:
    first their even inputs, then their odd inputs.
    """
    outputs = codes.unflatten(1, (4, 8)).permute(0, 2, 3, 1).contiguous()
    numbers = outputs.view(torch.int32).squeeze(-1)
    # Swap nibbles 1 with 2 and 5 with 6, then bytes 1 and 2.
    for shift, mask in ((4, 0x00F000F0), (8, 0x0000FF00)):
        swapped = (numbers ^ numbers >> shift) & mask
        numbers = numbers ^ swapped ^ swapped << shift
    return numbers


def _inputs_per_pair(dtype: torch.dtype) -> int:
    """PAIR of gemm.h: how many inputs of one output are adjacent in a panel."""
    return 2 if dtype.itemsize == 2 else 1


class PrepackedLayer(OptimizedLayer):
    """Mixin for a layer whose weight is replaced by a prepacked copy."""

    weight: Any
    prepacked: PrepackedWeight

    def convert(self) -> bool:
        if not PrepackedWeight.can_prepack(self.weight):
            return False
        self.prepacked = PrepackedWeight(self.weight)
        del self.weight
        return True

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.prepacked.multiply(x, bias)


class PrepackedColumnParallelLinear(PrepackedLayer, ColumnParallelLinear):
    """Computes this rank's shard of the outputs."""

    replaces = ColumnParallelLinear


class PrepackedRowParallelLinear(PrepackedLayer, RowParallelLinear):
    """Takes this rank's shard of the inputs."""

    replaces = RowParallelLinear


class PrepackedEmbedding(PrepackedLayer, Embedding):
    replaces = Embedding

    def look_up(self, rows: Tensor) -> Tensor:
        return self.prepacked.rows(rows)


class PrepackedExperts(OptimizedLayer, Experts):
    replaces = Experts

    gate_up: list[PrepackedWeight]
    down: list[PrepackedWeight]

    def convert(self) -> bool:
        weights = (self.gate_up_proj, self.down_proj)
        if not all([PrepackedWeight.can_prepack(weight) for weight in weights]):
            return False
        experts = range(self.down_proj.shape[0])
        # One after the other, so that only one of the originals is in memory beside its copy.
        self.gate_up = [PrepackedWeight(self.gate_up_proj[i], gated=True) for i in experts]
        del self.gate_up_proj
        self.down = [PrepackedWeight(self.down_proj[i]) for i in experts]
        del self.down_proj
        return True

    def compute(self, expert: int, x: Tensor) -> Tensor:
        return self.down[expert].multiply(self.gate_up[expert].multiply(x))
