"""Layers with prepacked weights, which the GEMM kernels of gemm.h multiply."""

import ctypes
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
from nanovllm.layers.quantized import QuantizedWeight
from nanovllm.models.moe import Experts, SharedExpertMoE


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
        self.gate = gate
        self.out_features, self.in_features = weight.shape
        if gate != Gate.NONE:
            self.out_features //= 2
        self.dtype = weight.dtype
        self.panels = prepack(weight, num_parts=1 if gate == Gate.NONE else 2)
        scheme = vars(weight.scheme) if isinstance(weight, QuantizedWeight) else {}
        self.struct = Weight(panels=self.panels, **scheme)  # what C++ functions take

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x [..., in_features]. Return [..., out_features].

        With a gate, the result is SwiGLU or GeGLU, without a bias.
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
            self.gate,
        )
        return output

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows `ids` [num_rows] of the weight, as [num_rows, in_features]."""
        assert ids.dtype == torch.int32 and self.gate == Gate.NONE
        output = self.panels.new_empty(len(ids), self.in_features, dtype=self.dtype)
        load(self.dtype).gather_rows(ctypes.byref(self.struct), ids, output, *output.shape)
        return output


class PrepackedLayer(OptimizedLayer):
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
    structs: tuple[Any, Any]  # arrays of both, which C++ takes

    def convert(self) -> bool:
        if not (can_prepack(self.gate_up_proj) and can_prepack(self.down_proj)):
            return False
        # One after the other, so that only one of the originals is in memory beside its copy.
        self.gate_up = [PrepackedWeight(each, Gate.SILU) for each in self.gate_up_proj]
        del self.gate_up_proj
        self.down = [PrepackedWeight(each) for each in self.down_proj]
        del self.down_proj
        self.structs = (_make_array(self.gate_up), _make_array(self.down))
        return True

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        x = x.contiguous()
        output = torch.empty_like(x)
        load(x.dtype).experts(
            x,
            experts,
            weights,
            *self.structs,
            output,
            *experts.shape,
            len(self.gate_up),
            x.shape[1],
            self.down[0].in_features,
        )
        return output


class FastSharedExpertMoE(OptimizedLayer, SharedExpertMoE):
    replaces = SharedExpertMoE

    def add_shared(self, routed: Tensor, shared: Tensor, gate: Tensor) -> Tensor:
        output = torch.empty_like(routed)  # a hook may have kept `routed`
        inputs = (routed, shared.contiguous(), gate.contiguous())
        load(routed.dtype).add_shared(*inputs, output, *routed.shape)
        return output


def _make_array(weights: list[PrepackedWeight]) -> Any:
    return (Weight * len(weights))(*[each.struct for each in weights])
