"""The layers that are faster on a CPU, in C++.

Some replace layers that torch computes in several passes over the same numbers. Others multiply with prepacked weights. All
decoder layers together are one call, because Python would take longer between two kernels than a small kernel does.
"""

import ctypes
import math
from dataclasses import replace
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.batch import Batch, SamplingBatch
from nanovllm.kernels import Twin, has_known_code
from nanovllm.kernels.cpu import attention
from nanovllm.kernels.cpu.library import call, can_multiply, load, reason_unavailable
from nanovllm.kernels.cpu.shared_memory import SharedMemoryRank
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.layers.sampler import Sampler
from nanovllm.layers.tensor_parallel import TensorParallel
from nanovllm.models.decoder import MLP, Attention, DecoderLayer, DecoderLayers
from nanovllm.models.moe import Experts
from nanovllm.models.opt import OPTLayer

MANY_TOKENS = 512


class FastRMSNorm(Twin, RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        output, size = x.new_empty(x.shape), len(self.weight)
        call(
            load(x.dtype).rms_norm,
            x.contiguous(),
            self.weight,
            output,
            x.numel() // size,
            size,
            self.eps,
        )
        return output


class FastLayerNorm(Twin, nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        output, size = x.new_empty(x.shape), math.prod(self.normalized_shape)
        sizes = x.numel() // size, size
        call(
            load(x.dtype).layer_norm,
            x.contiguous(),
            self.weight,
            self.bias,
            output,
            *sizes,
            self.eps,
        )
        return output


class FastRotaryEmbedding(Twin, RotaryEmbedding):
    inv_freq: Tensor

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        assert positions.dtype == torch.int32
        cos, sin = self.inv_freq.new_empty(2, len(positions), 1, len(self.inv_freq))
        # The model's library, though these are float32: the one of float32 may not be compiled.
        call(
            load(self.dtype).cos_and_sin,
            positions,
            self.inv_freq,
            self.attention_factor,
            cos,
            sin,
            len(cos),
            cos.shape[2],
        )
        return cos, sin


class FastAttention(Twin, Attention):
    def take_over(self) -> bool:
        return all(
            [norm is None or has_known_code(norm, RMSNorm) for norm in (self.q_norm, self.k_norm)]
        )

    def norm_and_rotate(
        self, heads: Tensor, norm: RMSNorm | None, cos_sin: tuple[Tensor, Tensor]
    ) -> Tensor:
        assert heads[:1].is_contiguous()  # tokens may lie apart
        output = heads.new_empty(heads.shape)
        num_tokens, num_heads, head_dim = heads.shape
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        sizes = num_tokens, heads.stride(0), output.stride(0), num_heads, head_dim // 2
        call(load(heads.dtype).rotary, heads.data_ptr(), *cos_sin, weight, output, *sizes, eps)
        return output


class FastMLP(Twin, MLP):
    def forward(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up_proj(x)
        output = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        call(load(gate_up.dtype).silu_and_mul, gate_up, output, *output.shape)
        return self.down_proj(output)


class FastOPTLayer(Twin, OPTLayer):
    def mlp(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        call(load(x.dtype).relu, x, *x.shape)  # in place
        return self.fc2(x)


class FastSampler(Twin, Sampler):
    """Filters without sorting, as the kernel of kernels/cuda/twins.py."""

    def filter(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        logits = logits.contiguous()
        output = torch.empty_like(logits, dtype=torch.float32)
        rows, temperatures = batch.filtered_rows, batch.filtered_temperatures
        assert rows is not None
        filters = rows, temperatures, batch.top_ks, batch.top_ps, batch.min_ps
        call(load(logits.dtype).filter_logits, logits, output, *filters, *logits.shape, len(rows))
        return output

    def draw(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        logits = logits.contiguous()
        tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        noise = self.token_hashes, batch.noise_keys, batch.temperatures
        call(load(logits.dtype).sample, logits, *noise, tokens, *logits.shape)
        return tokens


def inputs_per_pair(weight: Tensor) -> int:
    """PAIR of products.h: how many inputs of an output lie side by side in a panel."""
    return 2 if weight.itemsize == 2 else 1


class PackedWeight(nn.Module):
    """A matrix [out_features, in_features] in panels, as products.h describes them.

    A `gated` one has gates in its upper half, and what they let pass in the lower; they alternate in memory, 16 by 16.
    """

    def __init__(self, weight: Tensor, gated: bool = False) -> None:
        super().__init__()
        self.gated = gated
        parts = weight.detach().unflatten(0, (1 + gated, -1))
        _, self.out_features, self.in_features = parts.shape
        width, line, pair = 32 // len(parts), 64 // weight.itemsize, inputs_per_pair(weight)
        parts = F.pad(parts, (0, -self.in_features % line, 0, -self.out_features % width))
        rows = parts.unflatten(1, (-1, width)).transpose(0, 1)  # [num_panels, parts, width, depth]
        panels = rows.reshape(rows.shape[0], 32, -1, pair)
        self.panels = panels.transpose(1, 2).contiguous()  # [num_panels, depth / pair, 32, pair]

    @staticmethod
    def can_hold(weight: Tensor) -> bool:
        is_divided = weight.shape[-1] % inputs_per_pair(weight) == 0
        return weight.device.type == "cpu" and is_divided and can_multiply(weight.dtype)

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in_features] to [..., out_features]; SwiGLU of that, without a bias, if it is gated."""
        output = x.new_empty(*x.shape[:-1], self.out_features)
        sizes = (
            x.numel() // self.in_features,
            self.in_features,
            self.in_features,
            self.out_features,
            self.out_features,
        )
        call(
            load(x.dtype).linear,
            x.contiguous(),
            self.panels,
            bias,
            None,
            output,
            *sizes,
            self.gated,
        )
        return output

    def rows(self, ids: Tensor) -> Tensor:
        """The rows of the matrix that `ids` [num_rows] names, [num_rows, in_features]."""
        assert ids.dtype == torch.int32 and not self.gated
        output = self.panels.new_empty(len(ids), self.in_features)
        call(load(output.dtype).gather_rows, self.panels, ids, output, *output.shape)
        return output


class Packed(Twin):
    """A layer that has traded its weight for a packed one."""

    weight: nn.Parameter
    packed: PackedWeight

    def take_over(self) -> bool:
        if not PackedWeight.can_hold(self.weight):
            return False
        self.packed = PackedWeight(self.weight)
        del self.weight
        return True

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.packed.multiply(x, bias)


class PackedColumnParallelLinear(Packed, ColumnParallelLinear):
    """A share of the outputs."""


class PackedRowParallelLinear(Packed, RowParallelLinear):
    """A share of the inputs."""


class PackedEmbedding(Packed, Embedding):
    def look_up(self, rows: Tensor) -> Tensor:
        return self.packed.rows(rows)


class PackedExperts(Twin, Experts):
    gate_up: list[PackedWeight]
    down: list[PackedWeight]

    def take_over(self) -> bool:
        if not (PackedWeight.can_hold(self.gate_up_proj) and PackedWeight.can_hold(self.down_proj)):
            return False
        self.gate_up = [PackedWeight(weight, gated=True) for weight in self.gate_up_proj]
        del self.gate_up_proj
        self.down = [PackedWeight(weight) for weight in self.down_proj]
        del self.down_proj
        return True

    def compute(self, expert: int, x: Tensor) -> Tensor:
        return self.down[expert].multiply(self.gate_up[expert].multiply(x))


class _Layer(ctypes.Structure):
    """Layer of fused_layers.h."""

    _fields_ = [
        ("weights", ctypes.c_void_p * 10),
        ("sizes", ctypes.c_int64 * 5),
        ("eps_and_scale", ctypes.c_float * 2),
    ]


class FusedLayers(Twin, DecoderLayers):
    """Holds the layers' weights, prepacked, in place of the layers."""

    tensors: list[Tensor | None]  # that the pointers of `structs` lead to
    structs: "ctypes.Array[_Layer]"
    tp: TensorParallel

    def take_over(self) -> bool:
        layers = [layer for layer in self if can_fuse(layer)]
        if len(layers) < len(self):
            return False
        self.tensors, self.tp = [], layers[0].self_attn.o_proj.tp
        self.structs = (_Layer * len(layers))(*[self._take(layer) for layer in layers])
        del self[:]
        return True

    def _take(self, layer: DecoderLayer) -> _Layer:
        attn, mlp = layer.self_attn, layer.mlp
        assert isinstance(mlp, MLP)
        head_dim = attn.head_dim
        num_heads, num_kv_heads, _ = (size // head_dim for size in attn.qkv_proj.parts.values())
        hidden_size, intermediate_size = mlp.down_proj.weight.shape

        def pack(linear: Linear, gated: bool = False) -> Tensor:
            panels = PackedWeight(linear.weight, gated).panels
            del (
                linear.weight
            )  # now, not with the layer: two copies of one matrix are in memory, never of the model
            return panels

        tensors: list[Tensor | None] = [
            layer.input_layernorm.weight, layer.post_attention_layernorm.weight,
            None if attn.q_norm is None else attn.q_norm.weight, None if attn.k_norm is None else attn.k_norm.weight,
            pack(attn.qkv_proj), attn.qkv_proj.bias, pack(attn.o_proj), attn.o_proj.bias,
            pack(mlp.gate_up_proj, gated=True), pack(mlp.down_proj),
        ]  # fmt: skip
        self.tensors += tensors
        sizes = hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size
        pointers = tuple(None if tensor is None else tensor.data_ptr() for tensor in tensors)
        return _Layer(pointers, sizes, (layer.input_layernorm.eps, head_dim**-0.5))

    def forward(
        self, x: Tensor, cos_sin: tuple[Tensor, Tensor], kv_caches: list[Tensor], batch: Batch
    ) -> Tensor:
        """Adds to x [num_tokens, hidden_size], in place. Of the last layer, only K/V are computed for tokens without logits."""
        rows = batch.logits_indices
        num_whole = len(kv_caches) - (len(rows) < len(x))
        # A long step one by one: Python hears of Ctrl-C only in between.
        size = num_whole if len(x) <= MANY_TOKENS else 1
        for first in range(0, num_whole, max(size, 1)):
            self._compute(first, kv_caches[first : first + size], x, cos_sin, batch)
        if num_whole < len(kv_caches):
            self._compute(num_whole, kv_caches[-1:], x, cos_sin, batch, only_kv=True)
            bounds = torch.searchsorted(rows, batch.cu_seqlens_q, out_int32=True)
            shorter = replace(batch, cu_seqlens_q=bounds, slot_mapping=batch.slot_mapping[rows])
            chosen, cos, sin = (each[rows] for each in (x, *cos_sin))
            self._compute(num_whole, kv_caches[-1:], chosen, (cos, sin), shorter)
            x[rows] = chosen
        if isinstance(self.tp, SharedMemoryRank):
            self.tp.check()
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
        """The layers that have these caches, from the one with index `first` on."""
        numbers = batch.slot_mapping, batch.cu_seqlens_q, batch.context_lens, batch.block_tables
        pointers = (ctypes.c_void_p * len(kv_caches))(
            *[kv_cache.data_ptr() for kv_cache in kv_caches]
        )
        num_blocks, block_size = kv_caches[0].shape[1:3]
        member = ctypes.byref(self.tp.member) if isinstance(self.tp, SharedMemoryRank) else None
        layers = ctypes.byref(self.structs, first * ctypes.sizeof(_Layer))
        sizes = len(x), *batch.block_tables.shape, block_size
        arguments = (
            layers,
            pointers,
            len(kv_caches),
            num_blocks * block_size,
            x,
            *cos_sin,
            *numbers,
            *sizes,
            member,
            only_kv,
        )
        if len(x):
            call(load(x.dtype).decoder_layers, *arguments)


def can_fuse(layer: nn.Module) -> TypeGuard[DecoderLayer]:
    """Whether the C++ code of a decoder layer computes what `layer` does.

    It attends with the C++ kernels, meets other ranks in shared memory, and knows no biases in an MLP. All its numbers are of
    one dtype, and its norms have one eps.
    """
    known = DecoderLayer, Attention, MLP, RMSNorm, ColumnParallelLinear, RowParallelLinear
    parts = list(layer.modules())
    if not isinstance(layer, DecoderLayer) or not all(
        [has_known_code(part, *known) for part in parts]
    ):
        return False
    linears = [part for part in parts if isinstance(part, Linear)]
    attn, mlp, tp = layer.self_attn, layer.mlp, layer.self_attn.o_proj.tp
    has_mlp = isinstance(mlp, MLP) and mlp.gate_up_proj.bias is None and mlp.down_proj.bias is None
    can_meet = tp.size == 1 or isinstance(tp, SharedMemoryRank)
    num_epsilons = len({part.eps for part in parts if isinstance(part, RMSNorm)})
    num_dtypes = len({parameter.dtype for parameter in layer.parameters()})
    if not has_mlp or not can_meet or num_epsilons > 1 or num_dtypes > 1:
        return False
    return attn.backend is attention and all(
        [PackedWeight.can_hold(linear.weight) for linear in linears]
    )


# Without products, and with. Of a layer that has several twins, the first that can be takes over.
SINGLE: list[type[Twin]] = [
    FastRMSNorm, FastLayerNorm, FastRotaryEmbedding, FastAttention, FastMLP, FastOPTLayer, FastSampler,
]  # fmt: skip
PACKED = [
    FusedLayers,
    PackedColumnParallelLinear,
    PackedRowParallelLinear,
    PackedEmbedding,
    PackedExperts,
    *SINGLE,
]


def find_twins(dtype: torch.dtype) -> list[type[Twin]]:
    """Raises RuntimeError if there are none."""
    if reason := reason_unavailable(dtype):
        raise RuntimeError(reason)
    return PACKED if can_multiply(dtype) else SINGLE
