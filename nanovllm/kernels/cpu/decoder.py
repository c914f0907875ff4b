"""A decoder's attention and MLPs in C++, and all of its layers in one call (fused_layers.h).

Python between two kernels would take longer than a small kernel. Long steps have a call for each
layer.
"""

import ctypes
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from types import NoneType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from nanovllm.batch.batch import Batch
from nanovllm.kernels.cpu import attention
from nanovllm.kernels.cpu.attention import describe_heads, describe_sequences
from nanovllm.kernels.cpu.declarations import Layer, Rope, Sequences, Struct
from nanovllm.kernels.cpu.library import load
from nanovllm.kernels.cpu.linear import (
    FastColumnParallelLinear,
    FastRowParallelLinear,
    Gate,
    PrepackedWeight,
)
from nanovllm.kernels.cpu.norm import NORMS, describe_norm
from nanovllm.kernels.cpu.panels import can_prepack
from nanovllm.kernels.optimized_layer import OptimizedLayer, has_parts, list_hooks
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.tensor_parallel import TensorParallel
from nanovllm.models.decoder import MLP, Attention, CosSin, CosSins, DecoderLayer, DecoderLayers
from nanovllm.models.gemma3 import GeluMLP, Gemma3Layer

# A step of more tokens is computed layer by layer, because CPython handles Ctrl-C between calls.
MAX_TOKENS_PER_CALL = 512

_NORMS = {  # of each class: fields of the struct, and attributes of the layer
    DecoderLayer: {
        "before_attention": "input_layernorm",
        "before_mlp": "post_attention_layernorm",
    },
    Gemma3Layer: {
        "before_attention": "input_layernorm",
        "after_attention": "post_attention_layernorm",
        "before_mlp": "pre_feedforward_layernorm",
        "after_mlp": "post_feedforward_layernorm",
    },
}
_OPTIONAL_NORM = (*NORMS, NoneType)


class FastAttention(OptimizedLayer, Attention):
    parts: ClassVar = {"q_norm": _OPTIONAL_NORM, "k_norm": _OPTIONAL_NORM}

    def norm_and_rotate(self, heads: Tensor, norm: RMSNorm | None, cos_sin: CosSin) -> Tensor:
        fused = norm if isinstance(norm, NORMS) and not any(self.hooks) else None
        if norm is not None and fused is None:
            heads = norm(heads).contiguous()
        head_dim = heads.shape[2]
        assert fused is None or len(fused.weight) == head_dim
        assert heads[:1].is_contiguous()  # the tokens need not be adjacent
        output = heads.new_empty(heads.shape)
        load(heads.dtype).rotary(
            heads.data_ptr(),
            describe_rope(cos_sin, head_dim),
            describe_norm(fused),
            output,
            heads.stride(0),
            *heads.shape,
        )
        return output


def describe_rope(cos_sin: CosSin, head_dim: int) -> Struct:
    cos, sin = cos_sin
    assert 2 * cos.shape[-1] <= head_dim
    return Rope(cos=cos, sin=sin, half=cos.shape[-1])


class FastMLP(OptimizedLayer, MLP):
    """Applies the gate in the GEMM of the merged projection, whose weight it takes."""

    GATE = Gate.SILU

    gate_up: PrepackedWeight  # in place of gate_up_proj

    def convert(self) -> bool:
        projection = self.gate_up_proj
        is_plain = has_parts(projection, {"": ColumnParallelLinear}) and projection.bias is None
        if not is_plain or any(list_hooks(projection)) or not can_prepack(projection.weight):
            return False
        self.gate_up = PrepackedWeight(projection.weight, self.GATE)
        del self.gate_up_proj
        return True

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_up.multiply(x))


class FastGeluMLP(FastMLP, GeluMLP):
    GATE = Gate.GELU


def run_on_one_rank(*linears: RowParallelLinear) -> bool:
    """Return whether there is nothing to reduce over ranks."""
    return all([type(each.tp) is TensorParallel and each.tp.size == 1 for each in linears])


class FastDecoderLayers(OptimizedLayer, DecoderLayers):
    """Runs decoder layers in C++. The layers are not called, but hold the weights that it reads."""

    parts: ClassVar = {  # paths within each layer
        "": tuple(_NORMS),
        "self_attn": FastAttention,
        "self_attn.q_norm": _OPTIONAL_NORM,
        "self_attn.k_norm": _OPTIONAL_NORM,
        "self_attn.qkv_proj": FastColumnParallelLinear,
        "self_attn.o_proj": FastRowParallelLinear,
        "mlp": (FastMLP, FastGeluMLP),
        "mlp.gate_up": PrepackedWeight,
        "mlp.down_proj": FastRowParallelLinear,
    }

    def convert(self) -> bool:
        """The C++ code attends like the cpp backend, and supports one rank."""
        for layer in cast(Iterable[Any], self):
            norms = dict.fromkeys(_NORMS.get(type(layer), {}).values(), NORMS)
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
        return make_array(Layer, self.kept)

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
            if len(rows) == 0:
                return x[:0]
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
        block_size, _, head_dim = kv_caches[0].shape[2:]
        keys = [kv_cache.data_ptr() for kv_cache in kv_caches]
        values = [kv_cache.data_ptr() + kv_cache.nbytes // 2 for kv_cache in kv_caches]
        ropes = [describe_rope(each, head_dim) for each in cos_sins]
        seqs = [describe_sequences(each, block_size) for each in batches]
        load(x.dtype).decoder_layers(
            ctypes.byref(self.structs, first * ctypes.sizeof(Layer)),
            make_array(ctypes.c_void_p, keys),
            make_array(ctypes.c_void_p, values),
            len(kv_caches),
            x,
            make_array(Rope, ropes),
            make_array(Sequences, seqs),
            len(x),
            only_kv,
        )


def make_array(kind: Any, values: list[Any]) -> Any:
    return (kind * len(values))(*values)


def _make_struct(layer: Any) -> Struct:
    """Describe a layer, whose parts are optimized."""
    attn = layer.self_attn
    num_heads, num_kv_heads, _ = attn.num_vectors
    norms = _NORMS[type(layer)].items()
    return Layer(
        **{field: describe_norm(getattr(layer, name)) for field, name in norms},
        q_norm=describe_norm(attn.q_norm),
        k_norm=describe_norm(attn.k_norm),
        qkv_bias=attn.qkv_proj.bias,
        o_bias=attn.o_proj.bias,
        qkv=attn.qkv_proj.prepacked.struct,
        o=attn.o_proj.prepacked.struct,
        gate_up=layer.mlp.gate_up.struct,
        down=layer.mlp.down_proj.prepacked.struct,
        heads=describe_heads(attn.shape, num_heads, num_kv_heads),
        rope_index=attn.rope_index,
    )
