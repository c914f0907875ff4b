"""The experts of an MoE in Triton, which are many small MLPs.

Their shapes depend on the number of tokens only, so that a CUDA graph can replay them. The pairs
of a token and one of its experts are sorted by expert. A program multiplies a tile of pairs, all of
one expert, by some rows of a matrix of this expert. It finds the expert from the numbers of pairs.
With tiles of two pairs:

    expert    e0             e1       e3           e2 has no pairs
    pairs     p1 p2 | p5     p3       p0 p4
    tile      0       1      2        3            4 and 5: without pairs, in this step

The result for a token does not depend on the tokens beside it. Such grouped GEMMs are also in
vLLM's fused_moe and in MegaBlocks (Gale et al. 2022). Quantized experts, and those in float32 or on
Turing, keep the code of models/moe.py.
"""

import torch
import triton
from torch import Tensor

from nanovllm.kernels.cuda.attention import describe_gpu, has_matrix_instructions
from nanovllm.kernels.cuda.decoder import silu_and_mul
from nanovllm.kernels.cuda.moe_kernels import multiply_experts_kernel
from nanovllm.kernels.optimized_layer import OptimizedLayer
from nanovllm.models.moe import Experts
from nanovllm.utils.helpers import cdiv

# So many tokens give each expert about two pairs, if 8 of 128 are chosen. Large tiles would be
# mostly empty.
_FEW_TOKENS = 32
_OUTPUTS = 64  # of a tile


class FastExperts(OptimizedLayer, Experts):
    SUPPORTS_CUDA_GRAPHS = True

    def convert(self) -> bool:
        """The self-test compiles the kernels for few and for many tokens."""
        weight = self.gate_up_proj
        if not isinstance(weight, Tensor):
            return False
        capability, _ = describe_gpu(weight.device)
        if not has_matrix_instructions(weight.dtype, capability):
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
    max_tiles = min(num_pairs, num_pairs // tile + num_experts)
    multiply_experts_kernel[(cdiv(out_features, _OUTPUTS), max_tiles)](
        x,
        weight,
        scales,
        pairs,
        starts,
        output,
        num_pairs // len(x),
        OUT_FEATURES=out_features,
        IN_FEATURES=in_features,
        EXPERTS=len(starts) - 1,
        N=_OUTPUTS,
        M=tile,
        K=64,
        enable_fp_fusion=True,
    )
    return output
