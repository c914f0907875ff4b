"""Linear layers in Triton, with quantized weights or few rows of x.

A program dequantizes a tile of a quantized weight in registers, rounds it to the dtype of x as the
specification in layers/quantized.py does, and multiplies it by a tile of x:

    output^T [N, M] += weight [N, K] x^T [K, M]      N outputs, M rows of x, K inputs at a time

The weight is the left operand, because matrix instructions take only that one from registers. Few
tiles do not fill a GPU, so the inputs are then split over several programs. Each program writes its
sums in float32. torch adds them, always in the same order. The bias is added before rounding.

cuBLAS reads a small weight slowly if x has few rows. Where this kernel is faster, it multiplies
them instead, without matrix instructions. Quantized weights of the same shapes then do without
splits, too. A program reads whole rows of the weight, and the result for a row of x does not depend
on the number of rows.

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


# Not tuned on a GPU.
_K = 128  # inputs of a tile: the largest group, so that a tile has whole groups
_NUM_STAGES = 3  # 8 to 16 KB of codes in flight per program
# tl.dot takes at least 16 rows. A thread has about 128 registers. float32 has no matrix
# instructions, and larger tiles of it would spill.
_SMALL_TILE = _Tile(rows=16, outputs=64, num_warps=4, programs=4)
# One program takes most registers of a multiprocessor. With more rows it would spill.
_LARGE_TILE = _Tile(rows=64, outputs=128, num_warps=8, programs=1)

# Tiles without matrix instructions, by out_features and in_features. `rows` is the most rows of x
# that they multiply, and inputs are not split. The figures are microseconds on an H200, of cuBLAS
# and of this algorithm, in bfloat16 with weights outside of the L2 cache. `.ci/gpu/run products`
# prints such lines. Quantized weights were not measured.
_FEW_ROWS = {
    #                                         1 row      2 rows     4 rows
    (4096, 1024): _Tile(2, 2, 4, 0),  #   4.8, 4.0   5.2, 4.8   5.3, 6.5
    (1024, 2048): _Tile(4, 1, 4, 0),  #  12.6, 3.1  10.3, 3.7   8.4, 4.8
    (6144, 1024): _Tile(1, 2, 4, 0),  #   5.9, 5.0   5.9, 6.1   5.9, 8.2
    (1024, 3072): _Tile(4, 2, 8, 0),  #   6.7, 3.7   6.7, 4.5   6.7, 6.1
}


class FastLinear(OptimizedLayer):
    weight: Any

    def convert(self) -> bool:
        """Compile the kernels for few and for many rows, so that serving compiles none."""
        if self.choose_tile(1) is None:
            return False
        for num_rows in (1, 2, 4, 16, 64):
            x = self.weight.new_empty([num_rows, self.weight.shape[1]]).zero_()
            self.multiply(x, getattr(self, "bias", None))  # an embedding has no bias
        return True

    def choose_tile(self, num_rows: int) -> _Tile | None:
        """Return None if cuBLAS computes this."""
        few_rows = _FEW_ROWS.get(tuple(self.weight.shape))
        is_16_bit = self.dtype.itemsize == 2
        if is_16_bit and few_rows is not None and 0 < num_rows <= few_rows.rows:
            return few_rows._replace(rows=triton.next_power_of_2(num_rows))
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
        step = _K if is_split else triton.next_power_of_2(in_features)
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
