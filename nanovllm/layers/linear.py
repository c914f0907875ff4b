"""Tensor-parallel linear layers (Megatron-LM, Shoeybi et al. 2019).

A rank holds a shard of each weight: some output rows (column parallel, outputs stay sharded) or
some input columns (row parallel, outputs are all-reduced). Projections of the same input are merged
into one matrix, so that one GEMM computes them:

    qkv_proj.weight [q rows | k rows | v rows, hidden]     in the checkpoint: q_proj, k_proj, v_proj

`targets` says which checkpoint tensors fill a layer. models/weights.py reads them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.layers.quantized import multiply
from nanovllm.layers.tensor_parallel import ALONE, TensorParallel


@dataclass(frozen=True)
class Target:
    """Where a checkpoint tensor goes.

    `destination` receives the shard of the tensor that begins at index `start` of dimension `dim`.
    `full_size` is the size of the tensor in that dimension. None: `destination` receives the whole
    tensor.
    """

    destination: Any  # a Tensor or a QuantizedWeight
    dim: int = 0
    start: int = 0
    full_size: int | None = None

    @property
    def full_shape(self) -> list[int]:
        shape = list(self.destination.shape)
        if self.full_size is not None:
            shape[self.dim] = self.full_size
        return shape

    @property
    def shard(self) -> tuple[slice, ...]:
        """The index of this rank's shard in the full tensor."""
        end = self.start + self.destination.shape[self.dim]
        before = [slice(None)] * self.dim
        return (*before, slice(self.start, end))


def shard_rows(
    destination: Any, full_sizes: list[int], tp: TensorParallel, unit: int = 1
) -> Iterator[Target]:
    """Yield targets of a checkpoint tensor whose rows have several parts.

    `destination` has a rank's shard of each part, in whole units. The parts have `full_sizes`.
    """
    shards = [tp.divide(full_size, unit) for full_size in full_sizes]
    rows = destination.split([size for size, _ in shards])
    before = 0  # rows of earlier parts
    for part, (_, start), full_size in zip(rows, shards, full_sizes):
        yield Target(part, 0, before + start, sum(full_sizes))
        before += full_size


class Linear(nn.Module):
    """y = x W^T + b, with one rank's shard of W."""

    weight: Any  # a Parameter, or a QuantizedWeight in its place

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
        """Compute x W^T + bias. Optimized subclasses override it."""
        return multiply(x, self.weight, bias)


class ColumnParallelLinear(Linear):
    """One or more projections of the same input, with concatenated outputs.

    `parts` maps checkpoint names to full output sizes. A list has the sizes of parts of one tensor,
    which are sharded separately. Each rank gets whole units of `unit` features, such as heads.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int | list[int]],
        bias: bool,
        dtype: torch.dtype,
        tp: TensorParallel = ALONE,
        unit: int = 1,
    ) -> None:
        full_sizes: dict[str, list[int]] = {}
        shard_sizes: dict[str, int] = {}  # this rank's
        for name, size in parts.items():
            full_sizes[name] = [size] if isinstance(size, int) else size
            shard_sizes[name] = sum(tp.divide(each, unit)[0] for each in full_sizes[name])
        super().__init__(in_features, sum(shard_sizes.values()), bias, dtype, tp)
        self.full_sizes = full_sizes
        self.shard_sizes = shard_sizes
        self.unit = unit

    def targets(self, name: str) -> Iterator[tuple[str, Target]]:
        parent = name.rpartition(".")[0]
        parameters = {"weight": self.weight}
        if self.bias is not None:
            parameters["bias"] = self.bias
        for key, parameter in parameters.items():
            shards = parameter.split(list(self.shard_sizes.values()))
            for (part, full_sizes), rows in zip(self.full_sizes.items(), shards):
                for target in shard_rows(rows, full_sizes, self.tp, self.unit):
                    yield f"{parent}.{part}.{key}", target

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.bias)


class RowParallelLinear(Linear):
    """Takes sharded inputs and all-reduces the outputs.

    Only rank 0 adds the bias, because the all-reduce would sum one bias for each rank.
    """

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
        bias = self.bias if self.tp.rank == 0 else None
        return self.tp.all_reduce(self.multiply(x, bias))
