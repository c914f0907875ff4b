"""The pre-norm decoder of Llama, Qwen, Mistral and their relatives, over a flat batch of tokens.

    ids -> embedding -> [ x + attention(norm(x)); x + mlp(norm(x)) ] per layer -> norm -> logits

Models that differ by values (sizes, biases, norms on queries and keys, RoPE) are a DecoderSpec each and share this code.
Modules are named as in Hugging Face checkpoints. All shapes are one rank's; num_tokens is that of the whole batch, so
everything but attention is blind to which sequence a token belongs to.
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.batch import Batch
from nanovllm.layers.attention import Backend
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import RopeSpec, RotaryEmbedding, apply_rotary
from nanovllm.layers.tensor_parallel import ALONE, TensorParallel


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What the engine must know of a model. Each structure has a spec of its own, which says the rest and makes the model."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of the MLPs
    max_len: int  # positions that the model was made for
    dtype: torch.dtype

    @property
    def divided_sizes(self) -> dict[str, int]:
        """What must come out even when divided among the ranks, by its name in config.json."""
        return {"num_attention_heads": self.num_heads, "intermediate_size": self.intermediate_size}

    def make_model(self, backend: Backend, tp: TensorParallel = ALONE) -> "CausalLM":
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class DecoderSpec(ModelSpec):
    """What distinguishes one decoder of this file from another. Read from config.json by models/config.py."""

    norm_eps: float
    rope: RopeSpec
    qk_norm: bool = False  # RMSNorm over each query and key head
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool

    def make_model(self, backend: Backend, tp: TensorParallel = ALONE) -> "CausalLM":
        head = None if self.tie_embeddings else Embedding(self.vocab_size, self.hidden_size, self.dtype, tp)
        return CausalLM(Decoder(self, backend, tp), head)

    def make_mlp(self, layer: int, tp: TensorParallel) -> nn.Module:
        return MLP(self, tp)


class Attention(nn.Module):
    def __init__(self, spec: DecoderSpec, backend: Backend, tp: TensorParallel) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.backend = backend
        heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads, "v_proj": spec.num_kv_heads}
        parts = {name: num * spec.head_dim for name, num in heads.items()}
        self.qkv_proj = ColumnParallelLinear(spec.hidden_size, parts, spec.qkv_bias, spec.dtype, tp, spec.head_dim)
        self.o_proj = RowParallelLinear(parts["q_proj"], spec.hidden_size, spec.o_bias, spec.dtype, tp)
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps, spec.dtype) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps, spec.dtype) if spec.qk_norm else None

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], kv_cache: Tensor, batch: Batch) -> Tensor:
        qkv = self.qkv_proj(x).split(list(self.qkv_proj.parts.values()), dim=-1)
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in qkv)  # [num_tokens, heads, head_dim]
        query, key = self.norm_and_rotate(query, self.q_norm, cos_sin), self.norm_and_rotate(key, self.k_norm, cos_sin)
        # Write first, then read through the block table: so tokens of this very step are context like any other.
        self.backend.store_kvcache(key, value, kv_cache, batch.slot_mapping)
        attended = self.backend.attend(query, kv_cache, batch, self.head_dim**-0.5)
        return self.o_proj(attended.flatten(1))

    def norm_and_rotate(self, heads: Tensor, norm: RMSNorm | None, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        return apply_rotary(heads if norm is None else norm(heads), *cos_sin)


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): a projection, let through by a gate, and back."""

    def __init__(self, spec: DecoderSpec, tp: TensorParallel) -> None:
        super().__init__()
        parts = {"gate_proj": spec.intermediate_size, "up_proj": spec.intermediate_size}
        self.gate_up_proj = ColumnParallelLinear(spec.hidden_size, parts, spec.mlp_bias, spec.dtype, tp)
        self.down_proj = RowParallelLinear(spec.intermediate_size, spec.hidden_size, spec.mlp_bias, spec.dtype, tp)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    def __init__(self, spec: DecoderSpec, layer: int, backend: Backend, tp: TensorParallel) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps, spec.dtype)
        self.self_attn = Attention(spec, backend, tp)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps, spec.dtype)
        self.mlp = spec.make_mlp(layer, tp)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], kv_cache: Tensor, batch: Batch) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, kv_cache, batch)
        return x + self.mlp(self.post_attention_layernorm(x))


class DecoderLayers(nn.ModuleList):
    """The stack of layers, each with its own part of the KV cache."""

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], kv_caches: list[Tensor], batch: Batch) -> Tensor:
        for layer, kv_cache in zip(self, kv_caches):
            x = layer(x, cos_sin, kv_cache, batch)
        return x


class Decoder(nn.Module):
    """Token ids to hidden states."""

    def __init__(self, spec: DecoderSpec, backend: Backend, tp: TensorParallel) -> None:
        super().__init__()
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, spec.dtype, tp)
        self.rotary = RotaryEmbedding(spec.rope)
        self.layers = DecoderLayers(DecoderLayer(spec, layer, backend, tp) for layer in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, spec.dtype)

    def forward(self, batch: Batch, kv_caches: list[Tensor]) -> Tensor:
        x = self.embed_tokens(batch.input_ids)  # [num_tokens, hidden_size]
        x = self.layers(x, self.rotary(batch.positions), kv_caches, batch)
        x = x.index_select(0, batch.logits_indices)  # [num_logits, hidden_size]; the other tokens only leave their K/V
        return self.norm(x)


class CausalLM(nn.Module):
    """A decoder, which takes a batch and the KV caches to hidden states, and an output head: `lm_head`, or its embeddings."""

    def __init__(self, model: nn.Module, lm_head: Embedding | None) -> None:
        super().__init__()
        self.model = model
        self.lm_head = lm_head

    def forward(self, batch: Batch, kv_caches: list[Tensor]) -> Tensor:
        """Hidden states [num_logits, hidden_size]. Apart from the logits, so that a CUDA graph can end here."""
        return self.model(batch, kv_caches)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        head = self.lm_head or cast(Embedding, self.model.embed_tokens)
        return head.logits(hidden)  # [num_logits, vocab_size]
