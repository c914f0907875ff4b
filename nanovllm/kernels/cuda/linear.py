"""Linear layers in Triton, with quantized weights or few rows of x.

A program dequantizes a tile of a quantized weight in registers, rounds it to the dtype of x as the
specification in layers/quantized.py does, and multiplies it by a tile of x:

    output^T [N, M] += weight [N, K] x^T [K, M]      N outputs, M rows of x, K inputs at a time

The weight is the left operand, because matrix instructions take only that one from registers. Few
tiles do not fill a GPU, so the inputs are then split over several programs. Each program writes its
sums in float32. torch adds them, always in the same order. The bias is added before rounding.

cuBLAS reads a small weight slowly if x has few rows. Where this kernel is faster, it multiplies
them instead, without matrix instructions and, also with quantized weights, without splits. A
program reads whole rows of the weight, and the result for a row of x does not depend on the number
of rows.

Rows of codes whose size is not a multiple of 4 bytes are read byte by byte, which is slow.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from nanovllm.kernels.cuda.attention import describe_gpu
from nanovllm.kernels.cuda.linear_kernels import multiply_kernel
from nanovllm.kernels.optimized_layer import OptimizedLayer
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.layers.quantized import QuantizedWeight, multiply
from nanovllm.utils.helpers import cdiv


class _Tile(NamedTuple):
    rows: int  # of x
    outputs: int
    num_warps: int
    programs: int  # that fit a multiprocessor


_K = 128  # inputs of a tile: the largest group, so that a tile has whole groups
_K_OF_FEW_ROWS = 1024  # all inputs of the weights measured below, or a third of them
_NUM_STAGES = 3  # 8 to 16 KB of codes in flight per program
# tl.dot takes at least 16 rows. A thread has about 128 registers. float32 has no matrix
# instructions, and larger tiles of it would spill.
_SMALL_TILE = _Tile(rows=16, outputs=64, num_warps=4, programs=4)
# One program takes most registers of a multiprocessor. With more rows it would spill.
_LARGE_TILE = _Tile(rows=64, outputs=128, num_warps=8, programs=1)

# A product of few rows without matrix instructions, for weights of up to this many numbers. The
# figures are microseconds on an H200, of cuBLAS and of this algorithm with the best of some tiles,
# in bfloat16 with weights outside of the L2 cache. `.ci/gpu/run products` prints such lines.
# Quantized weights were not measured.
#
#     outputs, inputs      1 row      2 rows     4 rows
#     6144, 1024        5.9, 5.0    5.9, 6.1   5.9, 8.2
#     4096, 1024        4.8, 4.0    5.2, 4.8   5.3, 6.5
#     1024, 2048       12.6, 3.1   10.3, 3.7   8.4, 4.8
#     1024, 3072        6.7, 3.7    6.7, 4.5   6.7, 6.1
_SMALL_WEIGHT = 8 << 20
_FEW_OUTPUTS = 2048


def choose_tile_of_few_rows(weight_shape: torch.Size, num_rows: int) -> _Tile | None:
    out_features, in_features = weight_shape
    max_rows = 4 if out_features <= _FEW_OUTPUTS else 1
    if not 0 < num_rows <= max_rows or out_features * in_features > _SMALL_WEIGHT:
        return None
    num_warps = 4 if in_features <= 1024 else 8
    return _Tile(triton.next_power_of_2(num_rows), outputs=2, num_warps=num_warps, programs=0)


class FastLinear(OptimizedLayer):
    weight: Any

    def convert(self) -> bool:
        """Compile the kernels for few and for many rows, so that serving compiles none."""
        x = self.weight.new_empty([64, self.weight.shape[1]]).zero_()
        capability, _ = describe_gpu(x.device)
        # On Turing, the matrix products of quantized weights would spill.
        is_quantized = isinstance(self.weight, QuantizedWeight)
        if self.choose_tile(1) is None or (is_quantized and capability < 8):
            return False
        for num_rows in (1, 2, 4, 16, 64):
            self.multiply(x[:num_rows], getattr(self, "bias", None))  # an embedding has no bias
        return True

    def choose_tile(self, num_rows: int) -> _Tile | None:
        """Return None if cuBLAS computes this."""
        is_16_bit = self.dtype.itemsize == 2
        few_rows = choose_tile_of_few_rows(self.weight.shape, num_rows)
        if is_16_bit and few_rows is not None:
            return few_rows
        if not isinstance(self.weight, QuantizedWeight):
            return None
        return _LARGE_TILE if is_16_bit and num_rows > _SMALL_TILE.rows else _SMALL_TILE

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x [..., in_features] times the transposed weight, plus the bias."""
        num_rows = x.shape[:-1].numel()
        weight = self.weight
        out_features, in_features = weight.shape
        tile = self.choose_tile(num_rows)
        if tile is None:
            return multiply(x, weight, bias)
        x = x.contiguous()
        is_quantized = isinstance(weight, QuantizedWeight)
        parts = (weight, None, None)
        if is_quantized:
            parts = (weight.codes, weight.scales, weight.zeros)
        is_split = tile.programs > 0
        step = _K if is_split else _K_OF_FEW_ROWS
        tiles = (cdiv(out_features, tile.outputs), cdiv(num_rows, tile.rows))
        # Splits of the inputs fill the GPU. A step is K inputs.
        _, num_processors = describe_gpu(x.device)
        num_tiles = max(1, tiles[0] * tiles[1])
        max_splits = max(1, tile.programs * num_processors // num_tiles)
        num_steps = cdiv(in_features, step)
        steps_per_split = cdiv(num_steps, max_splits)
        num_splits = cdiv(num_steps, steps_per_split)
        output = x.new_empty(*x.shape[:-1], out_features)
        sums = x.new_empty(num_splits if num_splits > 1 else 0, *output.shape, dtype=torch.float32)
        multiply_kernel[(*tiles, num_splits)](
            x,
            *parts,
            bias,
            output,
            sums,
            num_rows,
            out_features,
            steps_per_split,
            IN_FEATURES=in_features,
            BITS=weight.scheme.bits if is_quantized else None,
            GROUP=weight.scheme.group_size if is_quantized else None,
            N=tile.outputs,
            M=tile.rows,
            K=step,
            num_warps=tile.num_warps,
            num_stages=_NUM_STAGES if is_split else 1,
            enable_fp_fusion=True,
        )
        return output if num_splits == 1 else sums.sum(0).to(x.dtype)


class FastColumnParallelLinear(FastLinear, ColumnParallelLinear):
    """Computes this rank's shard of the outputs."""


class FastRowParallelLinear(FastLinear, RowParallelLinear):
    """Takes this rank's shard of the inputs."""


class FastEmbedding(FastLinear, Embedding):
    """Multiplies, as an output head. The look-up of embeddings keeps the code of layers/."""
