"""A decoder's norms, attention and MLPs in Triton, and the loop over its layers."""

import math
from collections.abc import Iterable
from types import NoneType
from typing import ClassVar, cast

import torch
import triton
from torch import Tensor

from nanovllm.batch.batch import Batch
from nanovllm.kernels.cuda.attention import store_kvcache
from nanovllm.kernels.cuda.decoder_kernels import (
    add_rms_norm_kernel,
    rotate_and_store_kernel,
    silu_and_mul_kernel,
)
from nanovllm.kernels.optimized_layer import OptimizedLayer, has_parts
from nanovllm.layers.norm import RMSNorm
from nanovllm.models.decoder import MLP, Attention, CosSin, CosSins, DecoderLayer, DecoderLayers

# A thread loads 16 bytes at a time: 8 numbers of 16 bits.
_ROTATED_NUMBERS = 2048  # of a token's heads, for 8 warps
_SWIGLU_BLOCK = 1024  # for 4 warps


class FastRMSNorm(OptimizedLayer, RMSNorm):
    def convert(self) -> bool:
        return self.weight.dtype == self.dtype

    def forward(self, x: Tensor) -> Tensor:
        _, normed = add_rms_norm(x.contiguous(), None, self.weight, self.eps)
        return normed


class FastDecoderLayers(OptimizedLayer, DecoderLayers):
    """Fuses each residual add with the RMSNorm after it, across layers too."""

    parts: ClassVar = {  # paths within each layer, whose attention and MLP are called
        "": DecoderLayer,
        "input_layernorm": FastRMSNorm,
        "post_attention_layernorm": FastRMSNorm,
    }

    def convert(self) -> bool:
        return all([has_parts(layer, self.parts) for layer in self])

    def forward(
        self, x: Tensor, cos_sins: CosSins, kv_caches: list[Tensor], batch: Batch
    ) -> Tensor:
        if any(self.hooks):
            return super().forward(x, cos_sins, kv_caches, batch)
        branch: Tensor | None = None  # the newest output, which is not yet added to x
        for layer, kv_cache in zip(cast(Iterable[DecoderLayer], self), kv_caches):
            norm = layer.input_layernorm
            x, normed = add_rms_norm(x, branch, norm.weight, norm.eps)
            branch = layer.self_attn(normed, cos_sins, kv_cache, batch)
            norm = layer.post_attention_layernorm
            x, normed = add_rms_norm(x, branch, norm.weight, norm.eps)
            branch = layer.mlp(normed)
        assert branch is not None
        rows = batch.logits_indices
        return x.index_select(0, rows) + branch.index_select(0, rows)


def add_rms_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return x + branch [..., size] and its RMSNorm. Without a branch, return x and its RMSNorm."""
    assert x.is_contiguous() and (branch is None or branch.is_contiguous())
    size = x.shape[-1]
    assert weight.shape == (size,)
    total = x if branch is None else torch.empty_like(x)
    normed = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    num_warps = min(max(4, block // 512), 16)
    add_rms_norm_kernel[(x.numel() // size,)](
        x,
        branch,
        weight,
        total,
        normed,
        size,
        eps,
        BLOCK=block,
        num_warps=num_warps,
        enable_fp_fusion=True,
    )
    return total, normed


class FastAttention(OptimizedLayer, Attention):
    """Fuses q_norm, k_norm, RoPE and the K/V store into one kernel."""

    parts: ClassVar = {"q_norm": (FastRMSNorm, NoneType), "k_norm": (FastRMSNorm, NoneType)}

    def convert(self) -> bool:
        """The kernel stores K/V like the triton backend, and applies both norms or none.

        It divides a head into pairs of dimensions.
        """
        has_pair = (self.q_norm is None) == (self.k_norm is None)
        if not has_pair or self.shape.head_dim % 2 != 0:
            return False
        return self.backend.store_kvcache is store_kvcache and super().convert()

    def forward(self, x: Tensor, cos_sins: CosSins, kv_cache: Tensor, batch: Batch) -> Tensor:
        cos_sin = cos_sins[self.rope_index]
        if any(self.hooks):
            return super().forward(x, cos_sins, kv_cache, batch)
        batch = self.choose_blocks(batch)
        qkv = self.qkv_proj(x)
        slots = batch.slot_mapping
        query = rotate_and_store(qkv, self.q_norm, self.k_norm, cos_sin, kv_cache, slots)
        attended = self.backend.attend(query, kv_cache, batch, self.shape)
        return self.o_proj(attended.flatten(1))


def rotate_and_store(
    qkv: Tensor,
    q_norm: RMSNorm | None,
    k_norm: RMSNorm | None,
    cos_sin: CosSin,
    kv_cache: Tensor,
    slots: Tensor,
) -> Tensor:
    """Turn qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] into queries and K/V.

    Normalizes query and key heads if there are norms, and rotates them as rotary.apply_rotary.
    Returns the query [num_tokens, num_heads, head_dim], and writes key and value to their slots. A
    token with slot -1 is padding, whose K/V are not written.
    """
    assert all([tensor.is_contiguous() for tensor in (qkv, *cos_sin, kv_cache)])
    num_kv_heads, head_dim = kv_cache.shape[3:]
    assert head_dim % 2 == 0 and 2 * cos_sin[0].shape[-1] <= head_dim
    num_tokens = len(qkv)
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    values_offset = kv_cache.stride(0)
    query = qkv.new_empty(num_tokens, num_heads, head_dim)
    num_all_heads = num_heads + 2 * num_kv_heads
    block = triton.next_power_of_2(head_dim // 2)
    max_heads = max(1, _ROTATED_NUMBERS // (2 * block))
    heads = min(triton.next_power_of_2(num_all_heads), max_heads)  # heads per program
    q_weight = q_norm.weight if q_norm is not None else None
    k_weight = k_norm.weight if k_norm is not None else None
    rotate_and_store_kernel[(num_tokens, triton.cdiv(num_all_heads, heads))](
        qkv,
        q_weight,
        k_weight,
        q_norm.eps if q_norm is not None else 0.0,
        k_norm.eps if k_norm is not None else 0.0,
        *cos_sin,
        query,
        kv_cache,
        slots,
        values_offset,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        ROTATED=cos_sin[0].shape[-1],
        HEADS=heads,
        BLOCK=block,
        num_warps=8,  # with 4, heads would spill, or go through shared memory
        enable_fp_fusion=True,
    )
    return query


class FastMLP(OptimizedLayer, MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu_and_mul(self.gate_up_proj(x)))


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up for gate_up [..., 2 * size], rounded once."""
    assert gate_up.is_contiguous()
    *rows, num_columns = gate_up.shape
    size = num_columns // 2
    output = gate_up.new_empty(*rows, size)
    grid = (math.prod(rows), triton.cdiv(size, _SWIGLU_BLOCK))
    silu_and_mul_kernel[grid](gate_up, output, size, BLOCK=_SWIGLU_BLOCK, enable_fp_fusion=True)
    return output
