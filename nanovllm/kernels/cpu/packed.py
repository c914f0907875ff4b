"""Matrix products in bfloat16 and float16 with prepacked weights: in the order in which the kernels read them."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.kernels.cpu.library import call, load, reason_unavailable
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear
from nanovllm.models.decoder import MLP
from nanovllm.models.moe import Experts


@cache
def can_multiply(dtype: torch.dtype) -> bool:
    """Whether there are kernels for matrix products: in 16 bits, unless the system keeps a processor's AMX to itself."""
    return dtype.itemsize == 2 and reason_unavailable(dtype) is None and bool(load(dtype).can_multiply())


class PackedWeight:
    """A 16-bit matrix [out_features, in_features] in panels, as products.h describes them.

    A `gated` one has gates in its upper half, and what they let pass in the lower; they alternate in memory, 16 by 16.
    """

    def __init__(self, weight: Tensor, gated: bool = False) -> None:
        num_rows, self.in_features = weight.shape
        self.gated = gated
        self.out_features = num_rows // 2 if gated else num_rows
        parts = weight.unflatten(0, (2, -1)) if gated else weight[None]
        width = 32 // len(parts)
        parts = F.pad(parts, (0, -self.in_features % 32, 0, -self.out_features % width))
        rows = parts.unflatten(1, (-1, width)).transpose(0, 1)  # [num_panels, parts, width, depth]
        panels = rows.reshape(rows.shape[0], 32, -1, 2)
        self.panels = panels.transpose(1, 2).contiguous()  # [num_panels, depth / 2, 32, 2]

    @staticmethod
    def can_hold(weight: Tensor) -> bool:
        return weight.device.type == "cpu" and weight.shape[1] % 2 == 0 and can_multiply(weight.dtype)

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [num_rows, in_features] to [num_rows, out_features]."""
        assert x.is_contiguous() and (bias is None or not self.gated)
        output = x.new_empty(x.shape[0], self.out_features)
        num_rows, in_features = x.shape
        call(
            load(x.dtype).linear, x, self.panels, bias, None, output, num_rows, in_features, in_features, self.out_features,
            self.out_features, self.gated,
        )  # fmt: skip
        return output

    def rows(self, ids: Tensor) -> Tensor:
        """The rows of the matrix that `ids` [num_rows] names, [num_rows, in_features]."""
        assert ids.is_contiguous() and not self.gated
        output = self.panels.new_empty(len(ids), self.in_features)
        call(load(output.dtype).gather_rows, self.panels, ids, output, *output.shape)
        return output


class PackedLinear(Linear):
    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.packed.multiply(x, bias)


class PackedColumnParallelLinear(PackedLinear, ColumnParallelLinear):
    pass


class PackedRowParallelLinear(PackedLinear, RowParallelLinear):
    pass


class PackedMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_up_proj.packed.multiply(x))  # with SwiGLU as its epilogue


class PackedExperts(Experts):
    def compute(self, expert: int, x: Tensor) -> Tensor:
        return self.down[expert].multiply(self.gate_up[expert].multiply(x))


class PackedEmbedding(Embedding):
    def look_up(self, rows: Tensor) -> Tensor:
        return self.packed.rows(rows)

    def multiply(self, hidden: Tensor) -> Tensor:
        return self.packed.multiply(hidden)


_PACKED = {
    ColumnParallelLinear: PackedColumnParallelLinear,
    RowParallelLinear: PackedRowParallelLinear,
    Embedding: PackedEmbedding,
}


def pack(layer: nn.Module, gated: bool = False) -> nn.Module | None:
    """The layer with its weight traded for a packed copy; None if that cannot be."""
    if not PackedWeight.can_hold(layer.weight):
        return None
    layer.packed = PackedWeight(layer.weight.detach(), gated)
    layer.weight = None
    layer.__class__ = _PACKED[type(layer)]
    return layer


def pack_mlp(mlp: MLP) -> MLP | None:
    if mlp.gate_up_proj.bias is not None or pack(mlp.gate_up_proj, gated=True) is None:
        return None
    mlp.__class__ = PackedMLP
    return mlp


def pack_experts(experts: Experts) -> Experts | None:
    if not all([PackedWeight.can_hold(weights[0]) for weights in (experts.gate_up_proj, experts.down_proj)]):
        return None
    experts.gate_up = [PackedWeight(weight, gated=True) for weight in experts.gate_up_proj.detach()]
    experts.gate_up_proj = None
    experts.down = [PackedWeight(weight) for weight in experts.down_proj.detach()]
    experts.down_proj = None
    experts.__class__ = PackedExperts
    return experts
