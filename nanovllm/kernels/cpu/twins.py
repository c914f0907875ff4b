"""Which layers have a faster twin on a CPU: with products in 16 bits, all decoder layers together are one."""

from functools import partial

import torch
from torch import Tensor

from nanovllm.kernels.cpu import functions
from nanovllm.kernels.cpu.fused_layers import fuse
from nanovllm.kernels.cpu.library import reason_unavailable
from nanovllm.kernels.cpu.packed import can_multiply, pack, pack_experts, pack_mlp
from nanovllm.kernels.twins import Twins, become, make_twins
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.models.decoder import MLP, Attention, DecoderLayers
from nanovllm.models.moe import Experts


def make_cpu_twins(dtype: torch.dtype) -> Twins:
    """Those that need no products. RoPE's angles come from the library of `dtype`, the model's, which is loaded anyway."""

    class FastRotaryEmbedding(RotaryEmbedding):
        def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
            return functions.cos_and_sin(positions, self.inv_freq, self.attention_factor, dtype)

    class FastAttention(Attention):
        def norm_and_rotate(self, heads: Tensor, norm: RMSNorm | None, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
            return functions.rotary(heads, *cos_sin, *((None, 0.0) if norm is None else (norm.weight, norm.eps)))

    twins = {RotaryEmbedding: FastRotaryEmbedding, Attention: FastAttention}
    return {**make_twins(functions), **{layer: partial(become, twin) for layer, twin in twins.items()}}


def find_twins(dtype: torch.dtype) -> tuple[Twins, str | None]:
    """The twins, and why there are none."""
    if reason := reason_unavailable(dtype):
        return {}, reason
    twins = make_cpu_twins(dtype)
    if not can_multiply(dtype):
        return twins, None
    packed = {ColumnParallelLinear: pack, RowParallelLinear: pack, Embedding: pack, Experts: pack_experts}
    return {**twins, **packed, MLP: lambda mlp: pack_mlp(mlp) or twins[MLP](mlp), DecoderLayers: fuse}, None
