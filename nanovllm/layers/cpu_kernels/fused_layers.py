"""All decoder layers on a CPU in one call: between two kernels, Python would take longer than a small kernel does."""

import ctypes
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from nanovllm.engine.batch import Batch
from nanovllm.layers import cpu_kernels
from nanovllm.layers.cpu_kernels import TiledWeight

if TYPE_CHECKING:
    from nanovllm.models.decoder import DecoderLayer

MANY_TOKENS = 512

POINTERS = ["input_norm", "post_attention_norm", "q_norm", "k_norm", "qkv", "qkv_bias", "o", "o_bias", "gate_up", "down"]
SIZES = ["hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"]


class _Layer(ctypes.Structure):
    """Layer of fused_layer.h."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in POINTERS],
        *[(name, ctypes.c_int64) for name in SIZES],
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    ]


class FusedLayers:
    """What a stack of models.decoder.DecoderLayer computes, from the same weights."""

    def __init__(self, layers: Iterable["DecoderLayer"]) -> None:
        layers = [_describe(layer) for layer in layers]
        self.layers = (_Layer * len(layers))(*layers)

    @staticmethod
    def can_hold(layers: Iterable["DecoderLayer"]) -> bool:
        """Whether all weights are whole and tiled, and the K/V cache is that of the C++ kernels."""
        return all([_can_hold(layer) for layer in layers])

    def __call__(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], kv_caches: list[Tensor], batch: Batch) -> Tensor:
        """Adds to x [num_tokens, hidden_size], in place."""
        assert all([tensor.is_contiguous() for tensor in (x, *cos_sin, *kv_caches, batch.block_tables)])
        pointers = (ctypes.c_void_p * len(kv_caches))(*[kv_cache.data_ptr() for kv_cache in kv_caches])
        num_blocks, block_size = kv_caches[0].shape[1:3]
        # A long step one by one: Python hears of Ctrl-C only in between.
        num_layers = len(kv_caches) if len(x) <= MANY_TOKENS else 1
        for first in range(0, len(kv_caches), num_layers):
            cpu_kernels._call(
                cpu_kernels._library(x.dtype).decoder_layers,
                ctypes.byref(self.layers, first * ctypes.sizeof(_Layer)),
                ctypes.byref(pointers, first * ctypes.sizeof(ctypes.c_void_p)),
                num_layers, num_blocks * block_size, x, *cos_sin, batch.slot_mapping, batch.cu_seqlens_q, batch.context_lens,
                batch.block_tables, len(x), *batch.block_tables.shape, block_size,
            )  # fmt: skip
        return x


def _can_hold(layer: "DecoderLayer") -> bool:
    products = [layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj]
    are_whole = all([isinstance(product.packed, TiledWeight) and product.tp_size == 1 for product in products])
    return are_whole and layer.self_attn.backend.__name__.endswith(".cpp")


def _describe(layer: "DecoderLayer") -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    tensors = [
        layer.input_layernorm.weight,
        layer.post_attention_layernorm.weight,
        attention.q_norm and attention.q_norm.weight,
        attention.k_norm and attention.k_norm.weight,
        attention.qkv_proj.packed.columns,
        attention.qkv_proj.bias,
        attention.o_proj.packed.columns,
        attention.o_proj.bias,
        mlp.gate_up_proj.packed.columns,
        mlp.down_proj.packed.columns,
    ]
    head_dim = attention.head_dim
    num_heads, num_kv_heads, _ = (size // head_dim for size in attention.qkv_proj.parts.values())
    return _Layer(
        *[None if tensor is None else tensor.data_ptr() for tensor in tensors],
        layer.input_layernorm.weight.shape[0], num_heads, num_kv_heads, head_dim, mlp.down_proj.packed.in_features,
        layer.input_layernorm.eps, head_dim**-0.5,
    )  # fmt: skip
