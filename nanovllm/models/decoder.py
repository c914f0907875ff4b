"""The pre-norm decoder of Qwen3 and its relatives, over a flat batch of tokens.

    ids -> embedding -> [ x + attention(norm(x)); x + mlp(norm(x)) ] per layer -> norm -> logits

Models that differ by values (sizes, biases, norms on queries and keys, RoPE) are a DecoderSpec each and share this code.
Modules are named as in Hugging Face checkpoints. All shapes are one rank's; num_tokens is that of the whole batch, so
everything but attention is blind to which sequence a token belongs to.
"""

from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.engine.batch import Batch
from nanovllm.layers.cpu_kernels import TiledWeight
from nanovllm.layers.cpu_kernels.fused_layers import FusedLayers
from nanovllm.layers.linear import ColumnParallelLinear, GatedLinear, Linear, RowParallelLinear
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import RopeSpec, RotaryEmbedding, apply_rotary


@dataclass(frozen=True)
class DecoderSpec:
    """What distinguishes one decoder from another. Read from config.json by models/__init__.py."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope: RopeSpec
    qk_norm: bool  # RMSNorm over each query and key head
    qkv_bias: bool
    o_bias: bool
    tie_embeddings: bool
    max_len: int  # positions that the model was made for
    dtype: torch.dtype


class Attention(nn.Module):
    def __init__(self, spec: DecoderSpec, backend: ModuleType, tp_rank: int, tp_size: int) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.backend = backend
        heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads, "v_proj": spec.num_kv_heads}
        parts = {name: num * spec.head_dim for name, num in heads.items()}
        self.qkv_proj = ColumnParallelLinear(spec.hidden_size, parts, spec.qkv_bias, spec.dtype, tp_rank, tp_size)
        self.o_proj = RowParallelLinear(parts["q_proj"], spec.hidden_size, spec.o_bias, spec.dtype, tp_rank, tp_size)
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps, spec.dtype) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps, spec.dtype) if spec.qk_norm else None

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], kv_cache: Tensor, batch: Batch) -> Tensor:
        qkv = self.qkv_proj(x).split(list(self.qkv_proj.parts.values()), dim=-1)
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in qkv)  # [num_tokens, heads, head_dim]
        query, key = apply_rotary(query, *cos_sin, self.q_norm), apply_rotary(key, *cos_sin, self.k_norm)
        # Write first, then read through the block table: so tokens of this very step are context like any other.
        self.backend.store_kvcache(key, value, kv_cache, batch.slot_mapping)
        attended = self.backend.attend(query, kv_cache, batch, self.head_dim**-0.5)
        return self.o_proj(attended.flatten(1))


class MLP(nn.Module):
    def __init__(self, spec: DecoderSpec, tp_rank: int, tp_size: int) -> None:
        super().__init__()
        parts = {"gate_proj": spec.intermediate_size, "up_proj": spec.intermediate_size}
        self.gate_up_proj = GatedLinear(spec.hidden_size, parts, False, spec.dtype, tp_rank, tp_size)
        self.down_proj = RowParallelLinear(spec.intermediate_size, spec.hidden_size, False, spec.dtype, tp_rank, tp_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, spec: DecoderSpec, backend: ModuleType, tp_rank: int, tp_size: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps, spec.dtype)
        self.self_attn = Attention(spec, backend, tp_rank, tp_size)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps, spec.dtype)
        self.mlp = MLP(spec, tp_rank, tp_size)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], kv_cache: Tensor, batch: Batch) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, kv_cache, batch)
        return x + self.mlp(self.post_attention_layernorm(x))


class Embedding(nn.Module):
    """A row of `weight` [vocab_size, hidden_size] per token id; the same shape serves as output head."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.vocab_size, spec.hidden_size, dtype=spec.dtype))
        self.packed: TiledWeight | None = None

    def pack(self) -> None:
        """As Linear.pack, where the packed weight still shows its rows."""
        if TiledWeight.can_hold(self.weight):
            self.packed = TiledWeight(self.weight.detach())
            self.weight = None

    def forward(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight) if self.packed is None else self.packed.rows(token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight) if self.packed is None else self.packed.multiply(hidden)


class Decoder(nn.Module):
    """Token ids to hidden states."""

    def __init__(self, spec: DecoderSpec, backend: ModuleType, tp_rank: int, tp_size: int) -> None:
        super().__init__()
        self.embed_tokens = Embedding(spec)
        self.rotary = RotaryEmbedding(spec.head_dim, spec.rope)
        self.layers = nn.ModuleList(DecoderLayer(spec, backend, tp_rank, tp_size) for _ in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, spec.dtype)
        self.fused_layers: FusedLayers | None = None

    def forward(self, batch: Batch, kv_caches: list[Tensor]) -> Tensor:
        x = self.embed_tokens(batch.input_ids)  # [num_tokens, hidden_size]
        cos_sin = self.rotary(batch.positions)
        if self.fused_layers is not None:
            x = self.fused_layers(x, cos_sin, kv_caches, batch)
        else:
            for layer, kv_cache in zip(self.layers, kv_caches):
                x = layer(x, cos_sin, kv_cache, batch)
        return self.norm(x[batch.logits_indices])  # [num_logits, hidden_size]; the other tokens only leave their K/V


class CausalLM(nn.Module):
    """A decoder with an output head."""

    def __init__(self, spec: DecoderSpec, backend: ModuleType, tp_rank: int = 0, tp_size: int = 1) -> None:
        super().__init__()
        self.model = Decoder(spec, backend, tp_rank, tp_size)
        self.lm_head = None if spec.tie_embeddings else Embedding(spec)

    def pack(self) -> None:
        """Once the weights are loaded: put them, and the layers, into the form that is fastest here."""
        for module in self.modules():
            if isinstance(module, Linear | Embedding):
                module.pack()
        if FusedLayers.can_hold(self.model.layers):
            self.model.fused_layers = FusedLayers(self.model.layers)

    def forward(self, batch: Batch, kv_caches: list[Tensor]) -> Tensor:
        """Hidden states [num_logits, hidden_size]. Apart from the logits, so that a CUDA graph can end here."""
        return self.model(batch, kv_caches)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        head = self.lm_head or self.model.embed_tokens
        return head.logits(hidden)  # [num_logits, vocab_size]
