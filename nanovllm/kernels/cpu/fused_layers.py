"""The decoder layers of a step in one C++ call, or one per layer for long steps (fused_layers.h).

Python between two kernels would take longer than a small kernel.
"""

import ctypes
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from nanovllm.batch.batch import Batch
from nanovllm.kernels.cpu import attention
from nanovllm.kernels.cpu.declarations import Blocks, Layer, Rope, Struct
from nanovllm.kernels.cpu.elementwise import (
    NORMS,
    FastAttention,
    FastGeluMLP,
    FastMLP,
    describe_norm,
    run_on_one_rank,
)
from nanovllm.kernels.cpu.library import load
from nanovllm.kernels.cpu.prepacked import (
    PrepackedColumnParallelLinear,
    PrepackedRowParallelLinear,
    PrepackedWeight,
)
from nanovllm.kernels.optimized_layer import OptimizedLayer, has_parts
from nanovllm.models.decoder import CosSins, DecoderLayer, DecoderLayers
from nanovllm.models.gemma3 import Gemma3Layer
from nanovllm.models.olmo import OlmoAttention, OlmoLayer

# A step of more tokens is computed layer by layer, because CPython handles Ctrl-C between calls.
MAX_TOKENS_PER_CALL = 512

_FOUR_NORMS = {
    "before_attention": "input_layernorm",
    "after_attention": "post_attention_layernorm",
    "before_mlp": "pre_feedforward_layernorm",
    "after_mlp": "post_feedforward_layernorm",
}
_NORMS = {  # of each class: fields of the struct, and attributes of the layer
    DecoderLayer: {
        "before_attention": "input_layernorm",
        "before_mlp": "post_attention_layernorm",
    },
    Gemma3Layer: _FOUR_NORMS,
    OlmoLayer: _FOUR_NORMS,
}


class FusedLayers(OptimizedLayer, DecoderLayers):
    """Runs decoder layers in C++. The layers are not called, but hold the weights that it reads."""

    replaces = DecoderLayers
    parts: ClassVar = {  # paths within each layer
        "": tuple(_NORMS),
        "self_attn": (FastAttention, OlmoAttention),
        "self_attn.q_norm": NORMS,
        "self_attn.k_norm": NORMS,
        "self_attn.qkv_proj": PrepackedColumnParallelLinear,
        "self_attn.o_proj": PrepackedRowParallelLinear,
        "mlp": (FastMLP, FastGeluMLP),
        "mlp.gate_up": PrepackedWeight,
        "mlp.down_proj": PrepackedRowParallelLinear,
    }

    def convert(self) -> bool:
        """The C++ code attends like the cpp backend, and supports one rank."""
        for layer in cast(Iterable[Any], self):
            norms = dict.fromkeys(_NORMS.get(type(layer), {}).values(), (*NORMS, nn.Identity))
            if not has_parts(layer, {**self.parts, **norms}):
                return False
            if layer.self_attn.backend is not attention:
                return False
            down_proj = layer.mlp.down_proj
            if down_proj.bias is not None or not run_on_one_rank(layer.self_attn.o_proj, down_proj):
                return False
        return True

    @cached_property
    def structs(self) -> Any:
        """Made by the first step. None if a part was replaced after `convert`."""
        if not self.convert():
            return None
        self.kept = list(map(_make_struct, self))  # the array copies them
        return (Layer * len(self))(*self.kept)

    def forward(
        self, x: Tensor, cos_sins: CosSins, kv_caches: list[Tensor], batch: Batch
    ) -> Tensor:
        """The last layer computes only K/V for tokens without logits."""
        if self.structs is None or any(self.hooks):
            return super().forward(x, cos_sins, kv_caches, batch)
        batches = [batch, batch.for_windows]
        x = x.clone()  # the C++ code works in place, and a hook may have kept x
        rows = batch.logits_indices
        has_other_rows = len(rows) < len(x)
        whole = kv_caches[:-1] if has_other_rows else kv_caches
        layers_per_call = len(kv_caches) if len(x) <= MAX_TOKENS_PER_CALL else 1
        for first in range(0, len(whole), layers_per_call):
            self._compute(first, whole[first : first + layers_per_call], x, cos_sins, batches)
        if has_other_rows:
            last_cache = kv_caches[-1:]
            self._compute(len(whole), last_cache, x, cos_sins, batches, only_kv=True)
            starts = torch.searchsorted(rows, batch.cu_seqlens_q, out_int32=True)
            shorter = [
                replace(each, cu_seqlens_q=starts, slot_mapping=each.slot_mapping[rows])
                for each in batches
            ]
            x = x[rows]
            cos_sins = [(cos[rows], sin[rows]) for cos, sin in cos_sins]
            self._compute(len(whole), last_cache, x, cos_sins, shorter)
        return x

    def _compute(
        self,
        first: int,
        kv_caches: list[Tensor],
        x: Tensor,
        cos_sins: CosSins,
        batches: list[Batch],
        only_kv: bool = False,
    ) -> None:
        """Compute the layers that these caches belong to, from layer `first`, in place of x."""
        if len(x) == 0:
            return
        batch = batches[0]
        keys = [kv_cache.data_ptr() for kv_cache in kv_caches]
        values = [kv_cache.data_ptr() + kv_cache.nbytes // 2 for kv_cache in kv_caches]
        ropes = [Rope(cos=cos, sin=sin, half=cos.shape[-1]) for cos, sin in cos_sins]
        assert all([2 * rope.half <= kv_caches[0].shape[-1] for rope in ropes])
        load(x.dtype).decoder_layers(
            ctypes.byref(self.structs, first * ctypes.sizeof(Layer)),
            _make_array(keys),
            _make_array(values),
            len(kv_caches),
            x,
            (Rope * len(ropes))(*ropes),
            (Blocks * 2)(*map(_find_blocks, batches)),
            batch.cu_seqlens_q,
            batch.context_lens,
            len(x),
            len(batch.context_lens),
            kv_caches[0].shape[2],  # block size
            only_kv,
        )


def _find_blocks(batch: Batch) -> Struct:
    """Describe where the K/V of a batch are."""
    return Blocks(
        slot_mapping=batch.slot_mapping,
        block_tables=batch.block_tables,
        table_width=batch.block_tables.shape[1],
    )


def _make_array(addresses: list[int]) -> Any:
    return (ctypes.c_void_p * len(addresses))(*addresses)


def _make_struct(layer: Any) -> Struct:
    """Describe a layer, whose parts are optimized."""
    attn = layer.self_attn
    gate_up = layer.mlp.gate_up
    norms = _NORMS[type(layer)].items()
    return Layer(
        **{field: describe_norm(getattr(layer, name)) for field, name in norms},
        q_norm=describe_norm(attn.q_norm),
        k_norm=describe_norm(attn.k_norm),
        qkv_bias=attn.qkv_proj.bias,
        o_bias=attn.o_proj.bias,
        qkv=attn.qkv_proj.prepacked.struct,
        o=attn.o_proj.prepacked.struct,
        gate_up=gate_up.struct,
        down=layer.mlp.down_proj.prepacked.struct,
        hidden_size=gate_up.in_features,
        num_heads=attn.num_vectors[0],
        num_kv_heads=attn.num_vectors[1],
        head_dim=attn.shape.head_dim,
        intermediate_size=gate_up.out_features,
        gate=gate_up.gate,
        scale=attn.shape.scale,
        window=attn.shape.window or 0,  # 0: all
        rope_index=attn.rope_index,
    )
