"""Qwen3.5: three of four layers have a Gated DeltaNet instead of attention.

    layers 0, 1, 2, 4, ...   x + delta_net(norm(x)); x + mlp(norm(x))    a state of fixed size
    layers 3, 7, ...         x + attention(norm(x)); x + mlp(norm(x))    K/V of all tokens

A Gated DeltaNet reads and writes the recurrent state of a sequence (layers/gated_delta.py). The
attention has a gate on its output, and RoPE for the first dimensions of a head. Norms multiply by
1 + weight. All shapes are those of one rank.

Qwen3.5-MoE and Qwen3-Next have experts in place of MLPs (models/moe.py). Qwen3-Next is the older
one. Its checkpoints have other names and another order of rows for the projections of a DeltaNet.

References: Yang et al. 2024 (Gated DeltaNet); the model cards of Qwen3-Next and Qwen3.5.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PretrainedConfig

from nanovllm.batch.batch import Batch
from nanovllm.layers.attention import AttentionShape, Backend
from nanovllm.layers.gated_delta import DeltaInputs, DeltaSizes, GatedDeltaRule
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear, Source
from nanovllm.layers.norm import ZeroCenteredRMSNorm
from nanovllm.layers.tensor_parallel import TensorParallel
from nanovllm.models.config_fields import Fields, check_multiple, compute_decoder
from nanovllm.models.decoder import Attention, CosSins, DecoderLayer, DecoderSpec
from nanovllm.models.moe import MoESpec


class GatedAttention(Attention):
    """Attention whose output is multiplied by a gate. q_proj has a query and a gate per head."""

    NUM_QUERY_PARTS = 2

    def forward(self, x: Tensor, cos_sins: CosSins, kv_cache: Tensor, batch: Batch) -> Tensor:
        vectors = self.qkv_proj(x).unflatten(-1, (-1, self.shape.head_dim))
        # query_gate is [num_tokens, 2 * num_heads, head_dim], a query and a gate in turns.
        query_gate, key, value = vectors.split(self.num_vectors, dim=1)
        query, gate = query_gate.unflatten(1, (-1, 2)).unbind(2)
        attended = self.attend(query, key, value, cos_sins, kv_cache, batch)
        return self.o_proj((attended * gate.sigmoid()).flatten(1))


class DeltaLayer(nn.Module):
    """As a DecoderLayer, with a Gated DeltaNet in place of attention and states in place of K/V."""

    def __init__(self, spec: "Qwen35Spec", layer: int, tp: TensorParallel) -> None:
        super().__init__()
        self.input_layernorm = spec.make_norm(spec.hidden_size)
        self.linear_attn = GatedDeltaNet(spec, tp)
        self.post_attention_layernorm = spec.make_norm(spec.hidden_size)
        self.mlp = spec.make_mlp(layer, tp)

    def forward(self, x: Tensor, cos_sins: CosSins, states: Tensor, batch: Batch) -> Tensor:
        x = x + self.linear_attn(self.input_layernorm(x), states, batch)
        return x + self.mlp(self.post_attention_layernorm(x))


class GatedDeltaNet(nn.Module):
    def __init__(self, spec: "Qwen35Spec", tp: TensorParallel) -> None:
        super().__init__()
        num_heads = spec.num_value_heads
        value_size = num_heads * spec.value_dim
        qkv_parts = [("in_proj_qkv", size) for size in spec.qkv_sizes]
        qkvz_parts = [*qkv_parts, ("in_proj_z", value_size)]
        self.in_proj_qkvz = spec.make_projection("in_proj_qkvz", qkvz_parts, tp)
        # A beta and a decay per head. Checkpoints with quantized weights keep these two as floats.
        ba_parts = [("in_proj_b", num_heads), ("in_proj_a", num_heads)]
        self.in_proj_ba = spec.make_projection("in_proj_ba", ba_parts, tp)
        self.delta_rule = GatedDeltaRule(spec, spec.norm_eps, spec.dtype, tp)
        self.out_proj = RowParallelLinear(value_size, spec.hidden_size, False, spec.dtype, tp)

    def forward(self, x: Tensor, states: Tensor, batch: Batch) -> Tensor:
        *qkv_sizes, gate_size = self.in_proj_qkvz.shard_sizes
        qkv, gate = self.in_proj_qkvz(x).split([sum(qkv_sizes), gate_size], dim=-1)
        beta, decay = self.in_proj_ba(x).chunk(2, dim=-1)
        inputs = DeltaInputs(qkv, gate, beta, decay)
        return self.out_proj(self.delta_rule(inputs, states, batch))


@dataclass(frozen=True, kw_only=True)
class Qwen35Spec(DeltaSizes, DecoderSpec):
    """A decoder with the sizes of its Gated DeltaNets.

    DeltaSizes comes first, because its state_size replaces that of ModelSpec.
    """

    layer_types: Sequence[str]  # "full_attention", or "linear_attention" for a Gated DeltaNet

    attention_class = GatedAttention
    norm_class = ZeroCenteredRMSNorm

    def attention_shape(self, layer: int) -> AttentionShape | None:
        has_state = self.layer_types[layer] == "linear_attention"
        return None if has_state else super().attention_shape(layer)

    def make_layer(self, layer: int, backend: Backend, tp: TensorParallel) -> nn.Module:
        if self.attention_shape(layer) is None:
            return DeltaLayer(self, layer, tp)
        return DecoderLayer(self, layer, backend, tp)

    def make_projection(
        self, name: str, parts: list[tuple[str, int]], tp: TensorParallel
    ) -> ColumnParallelLinear:
        """Make a projection of a DeltaNet's input, the matrix `name`, which merges `parts`."""
        return ColumnParallelLinear(self.hidden_size, parts, False, self.dtype, tp)


@dataclass(frozen=True, kw_only=True)
class Qwen35MoESpec(Qwen35Spec, MoESpec):
    """With experts in place of MLPs, in layers with attention and in those with a state."""


@dataclass(frozen=True, kw_only=True)
class Qwen3NextSpec(Qwen35MoESpec):
    """In its checkpoints, a merged projection is one tensor. The rows of a key head are adjacent:

    in_proj_qkvz    q of head 0 | k | v | z | q of head 1 | k | v | z | ...
    in_proj_ba      b of head 0 | a | b of head 1 | a | ...
    """

    def make_projection(
        self, name: str, parts: list[tuple[str, int]], tp: TensorParallel
    ) -> ColumnParallelLinear:
        projection = super().make_projection(name, parts, tp)
        num_heads, first_head = tp.divide(self.num_key_heads)
        sizes = [full_size // self.num_key_heads for _, full_size in parts]  # of a head
        projection.sources = []
        for index, size in enumerate(sizes):
            for head in range(first_head, first_head + num_heads):
                start = head * sum(sizes) + sum(sizes[:index])
                projection.sources.append(Source(name, start, size))
        projection.full_sizes = Counter({name: self.num_key_heads * sum(sizes)})
        return projection


def compute_qwen3_5(config: PretrainedConfig, given: Fields) -> Fields:
    types = ("linear_attention", "full_attention")
    computed = compute_decoder(config, given, types, allow_partial_rope=True)
    if "full_attention" not in config.layer_types:
        raise ValueError("layer_types without full_attention are not supported")
    num_value_heads, num_key_heads = given["num_value_heads"], given["num_key_heads"]
    check_multiple("linear_num_value_heads", num_value_heads, "linear_num_key_heads", num_key_heads)
    return computed
