"""Layers with prepacked weights, in the layout that the GEMM kernels of gemm.h read."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.kernels import OptimizedLayer
from nanovllm.kernels.cpu.library import call, load
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.models.moe import Experts

_PANEL_WIDTH = 32  # WIDTH of gemm.h
_CACHE_LINE = 64  # bytes


class PrepackedWeight(nn.Module):
    """A weight [out_features, in_features], prepacked into panels (layout in gemm.h).

    If `gated`, the first half of the rows is gate_proj and the second up_proj, and each panel holds
    16 rows of both.
    """

    def __init__(self, weight: Tensor, gated: bool = False) -> None:
        super().__init__()
        self.gated = gated
        num_parts = 2 if gated else 1
        parts = weight.detach().unflatten(0, (num_parts, -1))
        _, self.out_features, self.in_features = parts.shape
        width = _PANEL_WIDTH // num_parts
        num_padding_columns = -self.in_features % (_CACHE_LINE // weight.itemsize)
        num_padding_rows = -self.out_features % width
        parts = F.pad(parts, (0, num_padding_columns, 0, num_padding_rows))
        rows = parts.unflatten(1, (-1, width)).transpose(0, 1)  # [num_panels, parts, width, depth]
        panels = rows.reshape(len(rows), _PANEL_WIDTH, -1, _inputs_per_pair(weight))
        self.panels = panels.transpose(1, 2).contiguous()  # [num_panels, depth / pair, 32, pair]

    @staticmethod
    def can_prepack(weight: Tensor) -> bool:
        return weight.device.type == "cpu" and weight.shape[-1] % _inputs_per_pair(weight) == 0

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x [..., in_features]. Return [..., out_features].

        If `gated`, the result is SwiGLU of gate and up, without a bias.
        """
        x = x.contiguous()
        output = x.new_empty(*x.shape[:-1], self.out_features)
        num_rows = x.numel() // self.in_features
        x_sizes = (num_rows, self.in_features, self.in_features)
        sizes = (*x_sizes, self.out_features, self.out_features)
        call(load(x.dtype).linear, x, self.panels, bias, None, output, *sizes, self.gated)
        return output

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows `ids` [num_rows] of the weight, as [num_rows, in_features]."""
        assert ids.dtype == torch.int32 and not self.gated
        output = self.panels.new_empty(len(ids), self.in_features)
        call(load(output.dtype).gather_rows, self.panels, ids, output, *output.shape)
        return output


def _inputs_per_pair(weight: Tensor) -> int:
    """PAIR of gemm.h: how many inputs of one output are adjacent in a panel."""
    return 2 if weight.itemsize == 2 else 1


class PrepackedLayer(OptimizedLayer):
    """Mixin for a layer whose weight is replaced by a prepacked copy."""

    weight: nn.Parameter
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
        # One after the other, so that only one of the originals is in memory beside its copy.
        self.gate_up = [PrepackedWeight(weight, gated=True) for weight in self.gate_up_proj]
        del self.gate_up_proj
        self.down = [PrepackedWeight(weight) for weight in self.down_proj]
        del self.down_proj
        return True

    def compute(self, expert: int, x: Tensor) -> Tensor:
        return self.down[expert].multiply(self.gate_up[expert].multiply(x))
