"""MLPs in Triton, and the experts of an MoE, which are many small MLPs.

Experts have shapes that depend on the number of tokens only, so that a CUDA graph can replay them.
The pairs of a token and one of its experts are sorted by expert. A program multiplies a tile of
pairs, all of one expert, by some rows of a matrix of this expert. It finds the expert from the
numbers of pairs. With tiles of two pairs:

    expert    e0             e1       e3           e2 has no pairs
    pairs     p1 p2 | p5     p3       p0 p4
    tile      0       1      2        3            4 and 5: without pairs, in this step

The result for a token does not depend on the tokens beside it. Such grouped GEMMs are also in
vLLM's fused_moe and in MegaBlocks (Gale et al. 2022). Quantized experts, and those in float32, keep
the code of models/moe.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from nanovllm.kernels.cuda.launch import prepare
from nanovllm.kernels.optimized_layer import OptimizedLayer
from nanovllm.models.decoder import MLP
from nanovllm.models.moe import Experts
from nanovllm.utils.helpers import cdiv

# Not tuned on a GPU.
_SWIGLU_BLOCK = 1024
_FEW_TOKENS = 32  # for which experts have small tiles
_OUTPUTS = 64  # of a tile


class FastMLP(OptimizedLayer, MLP):
    replaces = MLP

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu_and_mul(self.gate_up_proj(x)))


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up for gate_up [num_rows, 2 * size], rounded once."""
    assert gate_up.is_contiguous()
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty(num_rows, size)
    launch = prepare(_silu_and_mul_kernel, (gate_up,), size, BLOCK=_SWIGLU_BLOCK)
    launch((num_rows, cdiv(size, _SWIGLU_BLOCK), 1), gate_up, output, size)
    return output


@triton.jit
def _silu_and_mul_kernel(gate_up_ptr, output_ptr, size, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    gate = tl.load(gate_up_ptr + row * 2 * size + offsets, mask=mask).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * size + size + offsets, mask=mask).to(tl.float32)
    output = gate * tl.sigmoid(gate) * up
    tl.store(output_ptr + row * size + offsets, output.to(output_ptr.dtype.element_ty), mask=mask)


class FastExperts(OptimizedLayer, Experts):
    replaces = Experts
    SUPPORTS_CUDA_GRAPHS = True

    def convert(self) -> bool:
        """The self-test compiles the kernels for few and for many tokens."""
        weight = self.gate_up_proj
        if not isinstance(weight, Tensor) or weight.dtype == torch.float32:
            return False
        # A power of two of experts, as tl.arange takes it. Those that do not exist have no pairs.
        num_bounds = triton.next_power_of_2(len(weight)) + 1
        self.bounds = torch.arange(num_bounds, device=weight.device)
        return True

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        chosen, pairs = experts.flatten().sort()
        starts = torch.searchsorted(chosen, self.bounds, out_int32=True)
        tile = 16 if len(x) <= _FEW_TOKENS else 64
        gate_up = _multiply(x.contiguous(), self.gate_up_proj, None, pairs, starts, tile)
        outputs = _multiply(silu_and_mul(gate_up), self.down_proj, weights, pairs, starts, tile)
        return outputs.view(*experts.shape, -1).sum(1)  # in float32


def _multiply(
    x: Tensor, weight: Tensor, scales: Tensor | None, pairs: Tensor, starts: Tensor, tile: int
) -> Tensor:
    """Multiply a row of x, which a token or a pair has, for each pair. Scale the results."""
    num_pairs = len(pairs)
    num_experts, out_features, in_features = weight.shape
    output = x.new_empty(num_pairs, out_features)
    launch = prepare(
        _multiply_experts_kernel,
        (x, scales),
        OUT_FEATURES=out_features,
        IN_FEATURES=in_features,
        EXPERTS=len(starts) - 1,
        N=_OUTPUTS,
        M=tile,
        K=64,
    )
    max_tiles = min(num_pairs, num_pairs // tile + num_experts)
    grid = (cdiv(out_features, _OUTPUTS), max_tiles, 1)
    launch(grid, x, weight, scales, pairs, starts, output, num_pairs // len(x))
    return output


@triton.jit(do_not_specialize=["pairs_per_row"])
def _multiply_experts_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    pairs_ptr,
    starts_ptr,
    output_ptr,
    pairs_per_row,
    OUT_FEATURES: constexpr,
    IN_FEATURES: constexpr,
    EXPERTS: constexpr,
    N: constexpr,
    M: constexpr,
    K: constexpr,
):
    tile = tl.program_id(1)
    starts_ptrs = starts_ptr + tl.arange(0, EXPERTS)
    num_pairs = tl.load(starts_ptrs + 1) - tl.load(starts_ptrs)  # of each expert
    tile_ends = tl.cumsum(tl.cdiv(num_pairs, M))
    is_before = tile_ends <= tile
    expert = tl.sum(is_before.to(tl.int32))
    if expert == EXPERTS:
        return
    tile -= tl.max(tl.where(is_before, tile_ends, 0))
    places = tl.load(starts_ptr + expert) + tile * M + tl.arange(0, M)[None, :]
    is_pair = places < tl.load(starts_ptr + expert + 1)
    pairs = tl.load(pairs_ptr + places, mask=is_pair, other=0)
    outputs = (tl.program_id(0) * N + tl.arange(0, N))[:, None]
    is_output = outputs < OUT_FEATURES
    x_ptrs = x_ptr + pairs // pairs_per_row * IN_FEATURES
    weight_ptrs = weight_ptr + (expert.to(tl.int64) * OUT_FEATURES + outputs) * IN_FEATURES
    acc = tl.zeros([N, M], dtype=tl.float32)
    for first in range(0, IN_FEATURES, K):
        inputs = first + tl.arange(0, K)
        is_input = inputs < IN_FEATURES
        mask = is_output & is_input[None, :]
        weight = tl.load(weight_ptrs + inputs[None, :], mask=mask, other=0.0)
        x = tl.load(x_ptrs + inputs[:, None], mask=is_pair & is_input[:, None], other=0.0)
        acc = tl.dot(weight, x, acc)
    if scales_ptr is not None:
        acc *= tl.load(scales_ptr + pairs, mask=is_pair, other=0.0)
    output_ptrs = output_ptr + pairs * OUT_FEATURES + outputs
    tl.store(output_ptrs, acc.to(output_ptr.dtype.element_ty), mask=is_output & is_pair)
