"""Linear layers of which every rank has a share (Megatron-LM, Shoeybi et al. 2019).

A rank holds some of a weight's output rows (column parallel: the outputs stay divided) or some of its input columns (row
parallel: the outputs of all ranks add up). Projections of the same input are one matrix, so that it is read in one product:

    qkv_proj.weight [q rows | k rows | v rows, hidden]        in the checkpoint: q_proj, k_proj, v_proj

A layer says which checkpoint tensors fill it (`targets`); models/weights.py does the reading.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.tensor_parallel import ALONE, TensorParallel


@dataclass(frozen=True)
class Target:
    """Where a checkpoint tensor goes: `destination` takes a share of its dimension `dim`, from index `start` on."""

    destination: Tensor
    dim: int = 0
    start: int = 0
    full_size: int | None = (
        None  # of the tensor's dimension `dim`; None: as in `destination`, which takes everything
    )

    @property
    def full_shape(self) -> list[int]:
        shape = list(self.destination.shape)
        shape[self.dim] = self.full_size or shape[self.dim]
        return shape

    @property
    def share(self) -> tuple[slice, ...]:
        """The index of this rank's share in the full tensor."""
        return (slice(None),) * self.dim + (
            slice(self.start, self.start + self.destination.shape[self.dim]),
        )


class Linear(nn.Module):
    """y = x W^T + b over one rank's share of W."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: torch.dtype,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype)) if bias else None

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.weight, bias)


class ColumnParallelLinear(Linear):
    """One or several projections of one input, their outputs side by side.

    `parts`: checkpoint name -> full output size, divided among the ranks by units of `unit` features (heads, say).
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        bias: bool,
        dtype: torch.dtype,
        tp: TensorParallel = ALONE,
        unit: int = 1,
    ) -> None:
        sizes = {name: tp.divide(size // unit)[0] * unit for name, size in parts.items()}
        super().__init__(in_features, sum(sizes.values()), bias, dtype, tp)
        self.parts, self.full_sizes, self.unit = sizes, parts, unit

    def targets(self, name: str) -> Iterator[tuple[str, Target]]:
        parent = name.rpartition(".")[0]
        for key, parameter in self.named_parameters():
            for (part, full_size), rows in zip(
                self.full_sizes.items(), parameter.split(list(self.parts.values()))
            ):
                _, first = self.tp.divide(full_size // self.unit)
                yield f"{parent}.{part}.{key}", Target(rows, 0, first * self.unit, full_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.bias)


class RowParallelLinear(Linear):
    """The counterpart: takes divided inputs, and adds up the ranks' outputs. Rank 0 adds the bias."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: torch.dtype,
        tp: TensorParallel = ALONE,
    ) -> None:
        super().__init__(in_features // tp.size, out_features, bias, dtype, tp)

    def targets(self, name: str) -> Iterator[tuple[str, Target]]:
        size = self.weight.shape[1]
        yield f"{name}.weight", Target(self.weight, 1, self.tp.rank * size, self.tp.size * size)
        if self.bias is not None:
            yield f"{name}.bias", Target(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.tp.all_reduce(self.multiply(x, self.bias if self.tp.rank == 0 else None))
