"""Linear layers with prepacked weights, which the GEMM kernels of gemm.h multiply."""

from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.kernels.cpu.declarations import Weight
from nanovllm.kernels.cpu.library import load
from nanovllm.kernels.cpu.panels import can_prepack, prepack
from nanovllm.kernels.optimized_layer import OptimizedLayer
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.layers.quantized import QuantizedWeight, Scheme


class Gate(IntEnum):
    """How a gate is applied, as in common.h."""

    NONE = 0
    SILU = 1  # silu(gate) * up
    GELU = 2  # gelu(gate) * up, with the approximation by tanh


class PrepackedWeight(nn.Module):
    """A weight [out_features, in_features], prepacked into panels (panels.py).

    With a gate, the first half of the rows is gate_proj and the second up_proj.
    """

    def __init__(self, weight: Tensor | QuantizedWeight, gate: Gate = Gate.NONE) -> None:
        super().__init__()
        num_rows, self.in_features = weight.shape
        num_parts = 1 if gate == Gate.NONE else 2
        self.out_features = num_rows // num_parts
        self.gate = gate
        self.dtype = weight.dtype
        self.panels = prepack(weight, num_parts)
        # Without codes, these have no bits.
        scheme = weight.scheme if isinstance(weight, QuantizedWeight) else Scheme(0, 0)
        self.struct = Weight(self, **vars(scheme))  # what C++ functions take

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x [..., in_features]. Return [..., out_features].

        With a gate, the result is SwiGLU or GeGLU, without a bias.
        """
        x = x.contiguous()
        assert x.shape[-1] == self.in_features
        output = x.new_empty(*x.shape[:-1], self.out_features)
        num_rows = x.numel() // self.in_features
        load(x.dtype).linear(x, self.struct, bias, output, num_rows)
        return output

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows `ids` [num_rows] of the weight, as [num_rows, in_features]."""
        assert ids.dtype == torch.int32 and self.gate == Gate.NONE
        output = self.panels.new_empty(len(ids), self.in_features, dtype=self.dtype)
        load(self.dtype).gather_rows(self.struct, ids, output, len(ids))
        return output


class FastLinear(OptimizedLayer):
    """Mixin for a layer whose weight is replaced by a prepacked copy."""

    weight: Any
    prepacked: PrepackedWeight

    def convert(self) -> bool:
        if not can_prepack(self.weight):
            return False
        self.prepacked = PrepackedWeight(self.weight)
        del self.weight
        return True

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.prepacked.multiply(x, bias)


class FastColumnParallelLinear(FastLinear, ColumnParallelLinear):
    """Computes this rank's shard of the outputs."""


class FastRowParallelLinear(FastLinear, RowParallelLinear):
    """Takes this rank's shard of the inputs."""


class FastEmbedding(FastLinear, Embedding):
    """Also multiplies, as an output head."""

    def look_up(self, rows: Tensor) -> Tensor:
        return self.prepacked.rows(rows)
