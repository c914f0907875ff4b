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

The look-up of embeddings keeps the code of layers/.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from nanovllm.kernels.cuda.launch import describe_gpu, prepare
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
        """Return x [num_rows, in_features] times the transposed weight, plus the bias."""
        num_rows = len(x)
        weight = self.weight
        out_features, in_features = weight.shape
        tile = self.choose_tile(num_rows)
        if tile is None:
            return multiply(x, weight, bias)
        x = x.contiguous()
        bits = None
        group_size = None
        parts = [weight, None, None]
        if isinstance(weight, QuantizedWeight):
            bits = weight.scheme.bits
            group_size = weight.scheme.group_size
            parts = [weight.codes, weight.scales, weight.zeros]
        is_split = tile.programs > 0
        step = _K if is_split else triton.next_power_of_2(in_features)
        launch = prepare(
            _multiply_kernel,
            (x, bias),
            out_features,
            IN_FEATURES=in_features,
            BITS=bits,
            GROUP=group_size,
            N=tile.outputs,
            M=tile.rows,
            K=step,
            num_warps=tile.num_warps,
            num_stages=_NUM_STAGES if is_split else 1,
        )
        tiles = (cdiv(out_features, tile.outputs), cdiv(num_rows, tile.rows))
        # Splits of the inputs fill the GPU. A step is K inputs.
        _, num_processors = describe_gpu(x.device)
        num_tiles = max(1, tiles[0] * tiles[1])
        max_splits = max(1, tile.programs * num_processors // num_tiles)
        num_steps = cdiv(in_features, step)
        steps_per_split = cdiv(num_steps, max_splits)
        num_splits = cdiv(num_steps, steps_per_split)
        output = x.new_empty(num_rows, out_features)
        sums = x.new_empty(num_splits if num_splits > 1 else 0, *output.shape, dtype=torch.float32)
        launch(
            (*tiles, num_splits),
            x,
            *parts,
            bias,
            output,
            sums,
            num_rows,
            out_features,
            steps_per_split,
        )
        return output if num_splits == 1 else sums.sum(0).to(x.dtype)


class FastColumnParallelLinear(FastLinear, ColumnParallelLinear):
    replaces = ColumnParallelLinear


class FastRowParallelLinear(FastLinear, RowParallelLinear):
    replaces = RowParallelLinear


class FastEmbedding(FastLinear, Embedding):
    replaces = Embedding


@triton.jit(do_not_specialize=["num_rows", "steps_per_split"])
def _multiply_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    output_ptr,
    sums_ptr,
    num_rows,
    out_features,
    steps_per_split,
    IN_FEATURES: constexpr,
    BITS: constexpr,
    GROUP: constexpr,
    N: constexpr,
    M: constexpr,
    K: constexpr,
):
    # 64 bits, because a vocabulary times the inputs or the rows overflows 32 bits.
    outputs = (tl.program_id(0) * N + tl.arange(0, N)[:, None]).to(tl.int64)
    rows = (tl.program_id(1) * M + tl.arange(0, M)[None, :]).to(tl.int64)
    split = tl.program_id(2)
    is_output = outputs < out_features
    is_row = rows < num_rows
    first = split * steps_per_split
    end = tl.minimum(first + steps_per_split, tl.cdiv(IN_FEATURES, K))
    acc = tl.zeros([N, M], dtype=tl.float32)
    for step in range(first, end):
        inputs = step * K + tl.arange(0, K)
        is_input = inputs < IN_FEATURES
        if BITS is None:
            mask = is_output & is_input[None, :]
            weight = tl.load(
                weight_ptr + outputs * IN_FEATURES + inputs[None, :], mask=mask, other=0.0
            )
        else:
            ROW_BYTES: constexpr = tl.cdiv(IN_FEATURES * BITS, 8)
            ROW_GROUPS: constexpr = tl.cdiv(IN_FEATURES, GROUP)
            GROUPS: constexpr = K // GROUP
            BYTES: constexpr = K * BITS // 8
            columns = step * BYTES + tl.arange(0, BYTES)[None, :]
            mask = is_output & (columns < ROW_BYTES)
            codes = tl.load(weight_ptr + outputs * ROW_BYTES + columns, mask=mask)
            if BITS == 4:
                codes = tl.interleave(codes & 15, codes >> 4)
            groups = step * GROUPS + tl.arange(0, GROUPS)[None, :]
            mask = is_output & (groups < ROW_GROUPS)
            zeros = tl.load(zeros_ptr + outputs * ROW_GROUPS + groups, mask=mask)
            scales = tl.load(scales_ptr + outputs * ROW_GROUPS + groups, mask=mask, other=0.0)
            # Subtracted as integers, because GPUs convert 32-bit integers to floats faster than
            # codes.
            centered = codes.to(tl.int32).reshape(N, GROUPS, GROUP) - zeros[:, :, None]
            weight = (centered.to(tl.float32) * scales[:, :, None]).reshape(N, K)
            weight = weight.to(x_ptr.dtype.element_ty)
        if M < 16:
            for row in tl.static_range(M):
                row_ptr = x_ptr + tl.minimum(row, num_rows - 1) * IN_FEATURES
                x = tl.load(row_ptr + inputs, mask=is_input, other=0.0)
                products = weight.to(tl.float32) * x.to(tl.float32)[None, :]
                acc = tl.where(rows == row, tl.sum(products, axis=1)[:, None], acc)
        else:
            mask = is_row & is_input[:, None]
            x = tl.load(x_ptr + rows * IN_FEATURES + inputs[:, None], mask=mask, other=0.0)
            acc = tl.dot(weight, x, acc, input_precision="ieee")  # no effect on 16-bit operands
    if bias_ptr is not None:
        if split == 0:
            acc += tl.load(bias_ptr + outputs, mask=is_output, other=0.0)
    mask = is_output & is_row
    if tl.num_programs(2) == 1:
        output = acc.to(output_ptr.dtype.element_ty)
        tl.store(output_ptr + rows * out_features + outputs, output, mask=mask)
    else:
        rows += split * num_rows
        tl.store(sums_ptr + rows * out_features + outputs, acc, mask=mask)
