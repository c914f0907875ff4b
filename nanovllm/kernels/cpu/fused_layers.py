"""The decoder layers of a step in one C++ call, or one per layer for long steps (fused_layers.h).

Python between two kernels would take longer than a small kernel.
"""

import ctypes
from dataclasses import replace
from typing import TypeGuard

import torch
from torch import Tensor, nn

from nanovllm.batch import Batch
from nanovllm.kernels import OptimizedLayer
from nanovllm.kernels.cpu import attention
from nanovllm.kernels.cpu.library import call, load
from nanovllm.kernels.cpu.prepacked import PrepackedWeight, Weight
from nanovllm.layers.linear import Linear
from nanovllm.layers.norm import RMSNorm
from nanovllm.models.decoder import MLP, Attention, DecoderLayer, DecoderLayers

# A step of more tokens is computed layer by layer, because CPython handles Ctrl-C between calls.
MAX_TOKENS_PER_CALL = 512


class _Layer(ctypes.Structure):
    """Mirrors struct Layer of fused_layers.h."""

    _fields_ = [
        ("input_norm", ctypes.c_void_p),
        ("post_attention_norm", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("qkv_bias", ctypes.c_void_p),
        ("o_bias", ctypes.c_void_p),
        ("qkv", Weight),
        ("o", Weight),
        ("gate_up", Weight),
        ("down", Weight),
        ("hidden_size", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("intermediate_size", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    ]


class FusedLayers(OptimizedLayer, DecoderLayers):
    """Runs decoder layers in C++, from prepacked weights that replace them."""

    replaces = DecoderLayers

    # What the pointers in `structs` point to.
    tensors: list[Tensor | None]
    weights: list[PrepackedWeight]
    structs: "ctypes.Array[_Layer]"

    def convert(self) -> bool:
        layers = [layer for layer in self if can_fuse(layer)]
        if len(layers) < len(self):
            return False
        self.tensors = []
        self.weights = []
        structs = [self._convert_layer(layer) for layer in layers]
        self.structs = (_Layer * len(layers))(*structs)
        del self[:]
        return True

    def _convert_layer(self, layer: DecoderLayer) -> _Layer:
        attn, mlp = layer.self_attn, layer.mlp
        assert isinstance(mlp, MLP)
        q_size, kv_size, _ = attn.qkv_proj.shard_sizes.values()
        hidden_size, intermediate_size = mlp.down_proj.weight.shape
        return _Layer(
            input_norm=self._point_to(layer.input_layernorm.weight),
            post_attention_norm=self._point_to(layer.post_attention_layernorm.weight),
            q_norm=self._point_to(attn.q_norm.weight if attn.q_norm is not None else None),
            k_norm=self._point_to(attn.k_norm.weight if attn.k_norm is not None else None),
            qkv_bias=self._point_to(attn.qkv_proj.bias),
            o_bias=self._point_to(attn.o_proj.bias),
            qkv=self._prepack(attn.qkv_proj),
            o=self._prepack(attn.o_proj),
            gate_up=self._prepack(mlp.gate_up_proj, gated=True),
            down=self._prepack(mlp.down_proj),
            hidden_size=hidden_size,
            num_heads=q_size // attn.head_dim,
            num_kv_heads=kv_size // attn.head_dim,
            head_dim=attn.head_dim,
            intermediate_size=intermediate_size,
            eps=layer.input_layernorm.eps,
            scale=attn.scale,
        )

    def _point_to(self, tensor: Tensor | None) -> int | None:
        self.tensors.append(tensor)
        return tensor.data_ptr() if tensor is not None else None

    def _prepack(self, linear: Linear, gated: bool = False) -> Weight:
        """Prepack the weight of a layer and delete the original at once, to save memory."""
        weight = PrepackedWeight(linear.weight, gated)
        del linear.weight
        self.weights.append(weight)
        return weight.struct

    def forward(
        self, x: Tensor, cos_sin: tuple[Tensor, Tensor], kv_caches: list[Tensor], batch: Batch
    ) -> Tensor:
        """Run the layers on x [num_tokens, hidden_size], in place.

        The last layer computes only K/V for tokens without logits.
        """
        rows = batch.logits_indices
        has_other_rows = len(rows) < len(x)
        num_whole = len(kv_caches) - 1 if has_other_rows else len(kv_caches)
        layers_per_call = max(num_whole, 1) if len(x) <= MAX_TOKENS_PER_CALL else 1
        for first in range(0, num_whole, layers_per_call):
            end = min(first + layers_per_call, num_whole)
            self._compute(first, kv_caches[first:end], x, cos_sin, batch)
        if has_other_rows:
            last_cache = kv_caches[-1:]
            self._compute(num_whole, last_cache, x, cos_sin, batch, only_kv=True)
            cu_seqlens_q = torch.searchsorted(rows, batch.cu_seqlens_q, out_int32=True)
            slot_mapping = batch.slot_mapping[rows]
            shorter = replace(batch, cu_seqlens_q=cu_seqlens_q, slot_mapping=slot_mapping)
            cos, sin = cos_sin
            chosen = x[rows]
            self._compute(num_whole, last_cache, chosen, (cos[rows], sin[rows]), shorter)
            x[rows] = chosen
        return x

    def _compute(
        self,
        first: int,
        kv_caches: list[Tensor],
        x: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        batch: Batch,
        only_kv: bool = False,
    ) -> None:
        """Compute the layers that these caches belong to, beginning with layer `first`."""
        if len(x) == 0:
            return
        pointers = [kv_cache.data_ptr() for kv_cache in kv_caches]
        num_blocks, block_size = kv_caches[0].shape[1:3]
        call(
            load(x.dtype).decoder_layers,
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


def can_fuse(layer: nn.Module) -> TypeGuard[DecoderLayer]:
    """Return whether the C++ code computes the same as `layer`.

    The C++ code uses the cpp backend, and supports one rank and no biases in an MLP. Subclasses
    compute something else.
    """
    if type(layer) is not DecoderLayer or type(layer.mlp) is not MLP:
        return False
    attn = layer.self_attn
    if type(attn) is not Attention or type(layer.input_layernorm) is not RMSNorm:
        return False
    linears = [part for part in layer.modules() if isinstance(part, Linear)]
    can_prepack = all([PrepackedWeight.can_prepack(linear.weight) for linear in linears])
    is_alone = attn.o_proj.tp.size == 1
    has_mlp_bias = layer.mlp.gate_up_proj.bias is not None
    return attn.backend is attention and is_alone and can_prepack and not has_mlp_bias
