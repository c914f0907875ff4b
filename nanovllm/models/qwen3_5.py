"""Qwen3.5: three of four layers have a Gated DeltaNet instead of attention.

    layers 0, 1, 2, 4, ...   x + delta_net(norm(x)); x + mlp(norm(x))    a state of fixed size
    layers 3, 7, ...         x + attention(norm(x)); x + mlp(norm(x))    K/V of all tokens

A Gated DeltaNet reads and writes the recurrent state of a sequence (layers/gated_delta.py). The
attention has a gate on its output, and RoPE for the first dimensions of a head. Norms multiply by
1 + weight. All shapes are those of one rank.

References: Yang et al. 2024 (Gated DeltaNet); the model cards of Qwen3-Next and Qwen3.5.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from nanovllm.batch import Batch
from nanovllm.layers.attention import Backend
from nanovllm.layers.gated_delta import DeltaInputs, GatedDeltaRule
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.layers.norm import RMSNorm, ZeroCenteredRMSNorm
from nanovllm.layers.tensor_parallel import TensorParallel
from nanovllm.models.decoder import Attention, CosSin, DecoderLayer, DecoderSpec


@dataclass(frozen=True, kw_only=True)
class Qwen35Spec(DecoderSpec):
    """Sizes of the Gated DeltaNets are those of all ranks."""

    attention_layers: frozenset[int]  # all others have a Gated DeltaNet
    num_key_heads: int  # heads of a Gated DeltaNet
    num_value_heads: int  # a multiple of num_key_heads
    key_dim: int
    value_dim: int
    conv_size: int  # tokens that the convolution sees

    @property
    def divided_sizes(self) -> dict[str, int]:
        return {**super().divided_sizes, "linear_num_key_heads": self.num_key_heads}

    def has_attention(self, layer: int) -> bool:
        return layer in self.attention_layers

    @property
    def qkv_sizes(self) -> list[int]:
        """Sizes of the queries, keys and values of a Gated DeltaNet."""
        key_size = self.num_key_heads * self.key_dim
        return [key_size, key_size, self.num_value_heads * self.value_dim]

    @property
    def state_size(self) -> int:
        """See layers/gated_delta.py."""
        matrices_size = self.num_value_heads * self.key_dim * self.value_dim
        return matrices_size + (self.conv_size - 1) * sum(self.qkv_sizes)

    def make_layer(self, layer: int, backend: Backend, tp: TensorParallel) -> nn.Module:
        if self.has_attention(layer):
            return DecoderLayer(self, layer, backend, tp)
        return DeltaLayer(self, layer, tp)

    def make_attention(self, backend: Backend, tp: TensorParallel) -> Attention:
        return GatedAttention(self, backend, tp)

    def make_norm(self, size: int) -> RMSNorm:
        return ZeroCenteredRMSNorm(size, self.norm_eps, self.dtype)


class GatedAttention(Attention):
    """Attention whose output is multiplied by a gate. q_proj has a query and a gate per head."""

    NUM_QUERY_PARTS = 2

    def forward(self, x: Tensor, cos_sin: CosSin, kv_cache: Tensor, batch: Batch) -> Tensor:
        sizes = [2 * self.q_size, self.kv_size, self.kv_size]
        query_gate, key, value = self.qkv_proj(x).split(sizes, dim=-1)
        # Each is [num_tokens, num_heads, head_dim].
        query, gate = query_gate.unflatten(-1, (-1, 2, self.head_dim)).unbind(-2)
        key = key.unflatten(-1, (-1, self.head_dim))
        value = value.unflatten(-1, (-1, self.head_dim))
        query = self.norm_and_rotate(query, self.q_norm, cos_sin)
        key = self.norm_and_rotate(key, self.k_norm, cos_sin)
        self.backend.store_kvcache(key, value, kv_cache, batch.slot_mapping)
        attended = self.backend.attend(query, kv_cache, batch, self.scale)
        return self.o_proj((attended * gate.sigmoid()).flatten(1))


class DeltaLayer(nn.Module):
    """As a DecoderLayer, with a Gated DeltaNet in place of attention and states in place of K/V."""

    def __init__(self, spec: Qwen35Spec, layer: int, tp: TensorParallel) -> None:
        super().__init__()
        self.input_layernorm = spec.make_norm(spec.hidden_size)
        self.linear_attn = GatedDeltaNet(spec, tp)
        self.post_attention_layernorm = spec.make_norm(spec.hidden_size)
        self.mlp = spec.make_mlp(layer, tp)

    def forward(self, x: Tensor, cos_sin: CosSin, states: Tensor, batch: Batch) -> Tensor:
        x = x + self.linear_attn(self.input_layernorm(x), states, batch)
        return x + self.mlp(self.post_attention_layernorm(x))


class GatedDeltaNet(nn.Module):
    def __init__(self, spec: Qwen35Spec, tp: TensorParallel) -> None:
        super().__init__()
        num_heads = spec.num_value_heads
        value_size = num_heads * spec.value_dim
        parts = [("in_proj_qkv", size) for size in spec.qkv_sizes]
        parts.append(("in_proj_z", value_size))
        self.in_proj_qkvz = ColumnParallelLinear(spec.hidden_size, parts, False, spec.dtype, tp)
        # A beta and a decay per head. Checkpoints with quantized weights keep these two as floats.
        parts = [("in_proj_b", num_heads), ("in_proj_a", num_heads)]
        self.in_proj_ba = ColumnParallelLinear(spec.hidden_size, parts, False, spec.dtype, tp)
        self.delta_rule = GatedDeltaRule(
            num_key_heads=spec.num_key_heads,
            num_value_heads=spec.num_value_heads,
            key_dim=spec.key_dim,
            value_dim=spec.value_dim,
            conv_size=spec.conv_size,
            norm_eps=spec.norm_eps,
            dtype=spec.dtype,
            tp=tp,
        )
        self.out_proj = RowParallelLinear(value_size, spec.hidden_size, False, spec.dtype, tp)

    def forward(self, x: Tensor, states: Tensor, batch: Batch) -> Tensor:
        qkvz = self.in_proj_qkvz(x)
        gate_size = self.in_proj_qkvz.shard_sizes[-1]
        qkv, gate = qkvz.split([qkvz.shape[-1] - gate_size, gate_size], dim=-1)
        beta, decay = self.in_proj_ba(x).chunk(2, dim=-1)
        inputs = DeltaInputs(qkv, gate, beta, decay)
        return self.out_proj(self.delta_rule(inputs, states, batch))
