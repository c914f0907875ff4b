"""All decoder layers on a CPU in one call: between two kernels, Python would take longer than a small kernel does."""

import ctypes

from torch import Tensor, nn

from nanovllm.batch import Batch
from nanovllm.kernels.cpu import attention
from nanovllm.kernels.cpu.library import call, load
from nanovllm.kernels.cpu.packed import PackedWeight
from nanovllm.kernels.cpu.shared_memory import SharedMemoryRank
from nanovllm.models.decoder import MLP, DecoderLayer, DecoderLayers

MANY_TOKENS = 512

POINTERS = ["input_norm", "post_attention_norm", "q_norm", "k_norm", "qkv", "qkv_bias", "o", "o_bias", "gate_up", "down"]
SIZES = ["hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"]


class _Layer(ctypes.Structure):
    """Layer of fused_layers.h."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in POINTERS],
        *[(name, ctypes.c_int64) for name in SIZES],
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    ]


class FusedLayers(nn.Module):
    """What DecoderLayers computes, from the same weights, prepacked. The layers that it is made from are used up."""

    def __init__(self, layers: DecoderLayers) -> None:
        super().__init__()
        self.tensors: list[Tensor | None] = []  # that the pointers lead to
        self.layers = (_Layer * len(layers))(*[self._take(layer) for layer in layers])
        self.tp = layers[0].mlp.down_proj.tp

    def _take(self, layer: DecoderLayer) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        head_dim = attention.head_dim
        num_heads, num_kv_heads, _ = (size // head_dim for size in attention.qkv_proj.parts.values())
        hidden_size, intermediate_size = mlp.down_proj.weight.shape

        def pack(linear: nn.Module, gated: bool = False) -> Tensor:
            panels = PackedWeight(linear.weight.detach(), gated).panels
            linear.weight = None
            return panels

        tensors = [
            layer.input_layernorm.weight,
            layer.post_attention_layernorm.weight,
            attention.q_norm and attention.q_norm.weight,
            attention.k_norm and attention.k_norm.weight,
            pack(attention.qkv_proj),
            attention.qkv_proj.bias,
            pack(attention.o_proj),
            attention.o_proj.bias,
            pack(mlp.gate_up_proj, gated=True),
            pack(mlp.down_proj),
        ]
        self.tensors += tensors
        return _Layer(
            *[None if tensor is None else tensor.data_ptr() for tensor in tensors],
            hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size, layer.input_layernorm.eps, head_dim**-0.5,
        )  # fmt: skip

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], kv_caches: list[Tensor], batch: Batch) -> Tensor:
        """Adds to x [num_tokens, hidden_size], in place."""
        assert all([tensor.is_contiguous() for tensor in (x, *cos_sin, *kv_caches, batch.block_tables)])
        pointers = (ctypes.c_void_p * len(kv_caches))(*[kv_cache.data_ptr() for kv_cache in kv_caches])
        num_blocks, block_size = kv_caches[0].shape[1:3]
        member = ctypes.byref(self.tp.member) if self.tp.size > 1 else None
        # A long step one by one: Python hears of Ctrl-C only in between.
        num_layers = len(kv_caches) if len(x) <= MANY_TOKENS else 1
        for first in range(0, len(kv_caches), num_layers):
            call(
                load(x.dtype).decoder_layers,
                ctypes.byref(self.layers, first * ctypes.sizeof(_Layer)),
                ctypes.byref(pointers, first * ctypes.sizeof(ctypes.c_void_p)),
                num_layers, num_blocks * block_size, x, *cos_sin, batch.slot_mapping, batch.cu_seqlens_q, batch.context_lens,
                batch.block_tables, len(x), *batch.block_tables.shape, block_size, member,
            )  # fmt: skip
        if self.tp.size > 1:
            self.tp.check()
        return x


def fuse(layers: DecoderLayers) -> FusedLayers | None:
    """None if a layer does not attend with the C++ kernels, or share memory with other ranks, or has a weight that cannot be
    packed, or an MLP with biases or of another kind."""
    return FusedLayers(layers) if all([_can_fuse(layer) for layer in layers]) else None


def _can_fuse(layer: DecoderLayer) -> bool:
    attn, mlp, tp = layer.self_attn, layer.mlp, layer.self_attn.o_proj.tp
    if type(mlp) is not MLP or mlp.down_proj.bias is not None:
        return False
    linears = [attn.qkv_proj, attn.o_proj, mlp.gate_up_proj, mlp.down_proj]
    can_meet = tp.size == 1 or isinstance(tp, SharedMemoryRank)
    can_pack = all([PackedWeight.can_hold(linear.weight) for linear in linears])
    return can_meet and can_pack and attn.backend is attention
