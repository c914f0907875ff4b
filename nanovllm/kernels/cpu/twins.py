"""Which layers have a faster twin on a CPU."""

import torch

from nanovllm.kernels.cpu import functions
from nanovllm.kernels.cpu.fused_layers import fuse
from nanovllm.kernels.cpu.library import reason_unavailable
from nanovllm.kernels.cpu.packed import can_multiply, pack, pack_experts, pack_mlp
from nanovllm.kernels.twins import Twins, make_twins
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.models.decoder import MLP, DecoderLayers
from nanovllm.models.moe import Experts


def find_twins(dtype: torch.dtype) -> tuple[Twins, str | None]:
    """The twins, and why there are none."""
    if reason := reason_unavailable(dtype):
        return {}, reason
    twins = make_twins(functions)
    if can_multiply(dtype):
        make_fast = twins[MLP]
        packed = {ColumnParallelLinear: pack, RowParallelLinear: pack, Embedding: pack, Experts: pack_experts}
        twins = {**twins, **packed, MLP: lambda mlp: pack_mlp(mlp) or make_fast(mlp), DecoderLayers: fuse}
    return twins, None
