"""The decoder layers of a step in one C++ call, or one per layer for long steps (fused_layers.h).

Python between two kernels would take longer than a small kernel.
"""

import ctypes
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nanovllm.batch import Batch
from nanovllm.kernels import OptimizedLayer, has_plain_norms
from nanovllm.kernels.cpu import attention
from nanovllm.kernels.cpu.library import load, structure
from nanovllm.kernels.cpu.prepacked import Weight, can_fuse, prepack_gated
from nanovllm.models.decoder import Attention, CosSin, DecoderLayer, DecoderLayers

# A step of more tokens is computed layer by layer, because CPython handles Ctrl-C between calls.
MAX_TOKENS_PER_CALL = 512


@structure
class _Layer(ctypes.Structure):
    """Mirrors struct Layer of fused_layers.h."""

    input_norm: ctypes.c_void_p
    post_attention_norm: ctypes.c_void_p
    q_norm: ctypes.c_void_p
    k_norm: ctypes.c_void_p
    qkv_bias: ctypes.c_void_p
    o_bias: ctypes.c_void_p
    qkv: Weight
    o: Weight
    gate_up: Weight
    down: Weight
    hidden_size: ctypes.c_int64
    num_heads: ctypes.c_int64
    num_kv_heads: ctypes.c_int64
    head_dim: ctypes.c_int64
    intermediate_size: ctypes.c_int64
    eps: ctypes.c_float
    scale: ctypes.c_float


class FusedLayers(OptimizedLayer, DecoderLayers):
    """Runs decoder layers in C++. The layers are not called, but have what the C++ code reads."""

    replaces = DecoderLayers

    def convert(self) -> bool:
        """The C++ code attends like the cpp backend. Subclasses of a layer compute otherwise."""
        for layer in self:
            if type(layer) is not DecoderLayer or type(layer.self_attn) is not Attention:
                return False
            if layer.self_attn.backend is not attention:
                return False
            if not has_plain_norms(layer) or not can_fuse(layer):
                return False
        for layer in self:
            prepack_gated(layer)
        return True

    @cached_property
    def structs(self) -> "ctypes.Array[_Layer]":
        return (_Layer * len(self))(*map(_make_struct, self))

    def forward(self, x: Tensor, cos_sin: CosSin, kv_caches: list[Tensor], batch: Batch) -> Tensor:
        """Run the layers on x [num_tokens, hidden_size], in place.

        The last layer computes only K/V for tokens without logits.
        """
        rows = batch.logits_indices
        has_other_rows = len(rows) < len(x)
        whole = kv_caches[:-1] if has_other_rows else kv_caches
        layers_per_call = len(kv_caches) if len(x) <= MAX_TOKENS_PER_CALL else 1
        for first in range(0, len(whole), layers_per_call):
            self._compute(first, whole[first : first + layers_per_call], x, cos_sin, batch)
        if has_other_rows:
            last_cache = kv_caches[-1:]
            self._compute(len(whole), last_cache, x, cos_sin, batch, only_kv=True)
            cu_seqlens_q = torch.searchsorted(rows, batch.cu_seqlens_q, out_int32=True)
            slot_mapping = batch.slot_mapping[rows]
            shorter = replace(batch, cu_seqlens_q=cu_seqlens_q, slot_mapping=slot_mapping)
            cos, sin = cos_sin
            chosen = x[rows]
            self._compute(len(whole), last_cache, chosen, (cos[rows], sin[rows]), shorter)
            x[rows] = chosen
        return x

    def _compute(
        self,
        first: int,
        kv_caches: list[Tensor],
        x: Tensor,
        cos_sin: CosSin,
        batch: Batch,
        only_kv: bool = False,
    ) -> None:
        """Compute the layers that these caches belong to, beginning with layer `first`."""
        if len(x) == 0:
            return
        pointers = [kv_cache.data_ptr() for kv_cache in kv_caches]
        num_blocks, block_size = kv_caches[0].shape[1:3]
        load(x.dtype).decoder_layers(
            ctypes.byref(self.structs, first * ctypes.sizeof(_Layer)),
            (ctypes.c_void_p * len(pointers))(*pointers),
            len(kv_caches),
            num_blocks * block_size,
            x,
            *cos_sin,
            batch.slot_mapping,
            batch.cu_seqlens_q,
            batch.context_lens,
            batch.block_tables,
            len(x),
            *batch.block_tables.shape,
            block_size,
            only_kv,
        )


def _make_struct(layer: Any) -> _Layer:
    """Describe a layer, whose parts are optimized. The struct points to their tensors."""
    attn = layer.self_attn
    gate_up = layer.gate_up
    return _Layer(
        input_norm=layer.input_layernorm.weight.data_ptr(),
        post_attention_norm=layer.post_attention_layernorm.weight.data_ptr(),
        q_norm=attn.q_norm.weight.data_ptr() if attn.q_norm is not None else None,
        k_norm=attn.k_norm.weight.data_ptr() if attn.k_norm is not None else None,
        qkv_bias=attn.qkv_proj.bias.data_ptr() if attn.qkv_proj.bias is not None else None,
        o_bias=attn.o_proj.bias.data_ptr() if attn.o_proj.bias is not None else None,
        qkv=attn.qkv_proj.prepacked.struct,
        o=attn.o_proj.prepacked.struct,
        gate_up=gate_up.struct,
        down=layer.mlp.down_proj.prepacked.struct,
        hidden_size=gate_up.in_features,
        num_heads=attn.q_size // attn.head_dim,
        num_kv_heads=attn.kv_size // attn.head_dim,
        head_dim=attn.head_dim,
        intermediate_size=gate_up.out_features,
        eps=layer.input_layernorm.eps,
        scale=attn.scale,
    )
