"""Tensor-parallel linear layers (Megatron-LM, Shoeybi et al. 2019).

A rank holds a shard of each weight: some output rows (column parallel, outputs stay sharded) or
some input columns (row parallel, outputs are all-reduced). Projections of the same input are merged
into one matrix, so that one GEMM computes them:

    qkv_proj.weight [q rows | k rows | v rows, hidden]     in the checkpoint: q_proj, k_proj, v_proj

`targets` says which checkpoint tensors fill a layer. models/weights.py reads them.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanovllm.layers.quantized import QuantizableLayer, QuantizedWeight, multiply
from nanovllm.layers.tensor_parallel import ALONE, TensorParallel


@dataclass(frozen=True)
class Target:
    """Where a checkpoint tensor goes.

    `destination` receives the shard of the tensor that begins at index `start` of dimension `dim`.
    `full_size` is the size of the tensor in that dimension. None: `destination` receives the whole
    tensor. With an `index`, the tensor is a stack of `num_matrices`, of which this is one.
    """

    destination: Tensor | QuantizedWeight
    dim: int = 0
    start: int = 0
    full_size: int | None = None
    index: int | None = None
    num_matrices: int = 0

    @property
    def full_shape(self) -> list[int]:
        shape = list(self.destination.shape)
        if self.full_size is not None:
            shape[self.dim] = self.full_size
        return shape if self.index is None else [self.num_matrices, *shape]

    @property
    def shard(self) -> tuple[slice | int, ...]:
        """The index of this rank's shard in the full tensor."""
        if not self.destination.shape:  # a number
            return ()
        end = self.start + self.destination.shape[self.dim]
        matrix = () if self.index is None else (self.index,)
        return (*matrix, *[slice(None)] * self.dim, slice(self.start, end))


class Source(NamedTuple):
    """Rows of a checkpoint tensor."""

    tensor: str
    start: int
    num_rows: int


class Linear(QuantizableLayer):
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

    `parts` are the names of checkpoint tensors, with full output sizes. Each rank gets a shard of
    every part, in whole units of `unit` features, such as heads. Parts with the same name are
    consecutive rows of one tensor (Qwen3.5's in_proj_qkv).
    """

    def __init__(
        self,
        in_features: int,
        parts: list[tuple[str, int]],
        bias: bool,
        dtype: torch.dtype,
        tp: TensorParallel = ALONE,
        unit: int = 1,
    ) -> None:
        shards = [tp.divide(full_size, unit) for _, full_size in parts]
        shard_sizes = [size for size, _ in shards]
        super().__init__(in_features, sum(shard_sizes), bias, dtype, tp)
        self.shard_sizes = shard_sizes
        self.sources: list[Source] = []  # where this rank's rows come from, in their order
        self.full_sizes = Counter[str]()  # the rows of each tensor
        for (tensor, full_size), (size, start) in zip(parts, shards):
            self.sources.append(Source(tensor, self.full_sizes[tensor] + start, size))
            self.full_sizes[tensor] += full_size

    def targets(self, name: str) -> Iterator[tuple[str, Target]]:
        parent = name.rpartition(".")[0]
        row = 0
        for tensor, start, num_rows in self.sources:
            rows = slice(row, row + num_rows)
            full_size = self.full_sizes[tensor]
            yield f"{parent}.{tensor}.weight", Target(self.weight[rows], 0, start, full_size)
            if self.bias is not None:
                yield f"{parent}.{tensor}.bias", Target(self.bias[rows], 0, start, full_size)
            row += num_rows

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
