"""Chooses the scheme of each weight, and reads the tensors of quantized checkpoints."""

from torch import Tensor, nn
import torch.nn.functional as F

from nanovllm.layers.embedding import Embedding
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.layers.quantized import (
    QuantizedColumnParallelLinear,
    QuantizedEmbedding,
    QuantizedRowParallelLinear,
    QuantizedWeight,
    Scheme,
)
from nanovllm.models.moe import Experts

INT8 = Scheme(8, 128)
INT4 = Scheme(4, 64)


class QuantizedExperts(Experts):
    """Experts with quantized matrices, each in the scheme of its own rows."""

    gate_up_proj: QuantizedWeight  # type: ignore[assignment]
    down_proj: QuantizedWeight  # type: ignore[assignment]

    def compute(self, expert: int, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up_proj[expert].dequantize()).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down_proj[expert].dequantize())


QUANTIZED: dict[type[nn.Module], type[nn.Module]] = {
    ColumnParallelLinear: QuantizedColumnParallelLinear,
    RowParallelLinear: QuantizedRowParallelLinear,
    Embedding: QuantizedEmbedding,
    Experts: QuantizedExperts,
}


def quantize_layer(layer: nn.Module, scheme: Scheme) -> None:
    """Replace the matrices of a layer by empty quantized weights."""
    layer.__class__ = QUANTIZED[type(layer)]
    for name, parameter in list(layer.named_parameters(recurse=False)):
        if parameter.dim() >= 2:
            delattr(layer, name)
            setattr(layer, name, QuantizedWeight.empty_like(parameter, scheme))
