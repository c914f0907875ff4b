"""Linear layers that tensor parallelism can cut (Megatron-LM, Shoeybi et al. 2019).

Every rank holds 1 / tp_size of a weight: some of its output rows (column parallel: the outputs stay divided) or some of
its input columns (row parallel: the outputs of all ranks add up). Projections of the same input are one matrix, so that
it is read in one product:

    qkv_proj.weight [q rows | k rows | v rows, hidden]        in the checkpoint: q_proj, k_proj, v_proj

A layer says which checkpoint tensors fill it (`targets`); models/weights.py does the reading.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Target:
    """Where a checkpoint tensor goes: `destination` takes this rank's share of dimension `dim` (None: everything)."""

    destination: Tensor
    dim: int | None = None
    tp_rank: int = 0
    tp_size: int = 1

    @property
    def full_shape(self) -> list[int]:
        return [size * self.tp_size if dim == self.dim else size for dim, size in enumerate(self.destination.shape)]

    @property
    def share(self) -> tuple[slice, ...]:
        """The index of this rank's share in the full tensor."""
        index = [slice(None)] * self.destination.dim()
        if self.dim is not None:
            size = self.destination.shape[self.dim]
            index[self.dim] = slice(self.tp_rank * size, (self.tp_rank + 1) * size)
        return tuple(index)


class Linear(nn.Module):
    """y = x W^T + b over one rank's share of W."""

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype, tp_rank: int, tp_size: int) -> None:
        super().__init__()
        self.tp_rank, self.tp_size = tp_rank, tp_size
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype)) if bias else None


class ColumnParallelLinear(Linear):
    """One or several projections of one input, their outputs side by side. `parts`: checkpoint name -> full output size."""

    def __init__(
        self, in_features: int, parts: dict[str, int], bias: bool, dtype: torch.dtype, tp_rank: int = 0, tp_size: int = 1
    ) -> None:
        sizes = {name: size // tp_size for name, size in parts.items()}
        super().__init__(in_features, sum(sizes.values()), bias, dtype, tp_rank, tp_size)
        self.parts = sizes

    def targets(self, name: str) -> Iterator[tuple[str, Target]]:
        parent = name.rpartition(".")[0]
        for key, parameter in self.named_parameters():
            for part, rows in zip(self.parts, parameter.split(list(self.parts.values()))):
                yield f"{parent}.{part}.{key}", Target(rows, 0, self.tp_rank, self.tp_size)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(Linear):
    """The counterpart: takes divided inputs. The layer's output is the sum over the ranks; rank 0 adds the bias."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype, tp_rank: int = 0, tp_size: int = 1
    ) -> None:
        super().__init__(in_features // tp_size, out_features, bias, dtype, tp_rank, tp_size)

    def targets(self, name: str) -> Iterator[tuple[str, Target]]:
        yield f"{name}.weight", Target(self.weight, 1, self.tp_rank, self.tp_size)
        if self.bias is not None:
            yield f"{name}.bias", Target(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias if self.tp_rank == 0 else None)
