"""OPT (Zhang et al. 2022), a decoder like GPT-3's: from before RoPE, RMSNorm and gated MLPs.

    ids -> embedding (-> project_in) + embedding of the position -> layers -> norm (-> project_out) -> logits

    pre-norm:           x + attention(norm(x)), then x + mlp(norm(x))
    post-norm (350m):   norm(x + attention(x)), then norm(x + mlp(x))

Modules are named as in Hugging Face checkpoints. Shapes are one rank's; positions, norms and projections are whole on each.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.batch import Batch
from nanovllm.layers.attention import Backend
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.layers.tensor_parallel import ALONE, TensorParallel
from nanovllm.models.decoder import CausalLM, ModelSpec

_FIRST_POSITION = 2  # the rows before it are padding's, and never read


@dataclass(frozen=True, kw_only=True)
class OPTSpec(ModelSpec):
    """What distinguishes one OPT from another. Read from config.json by models/config.py."""

    embedding_size: int  # of the tokens' embeddings and of the output head
    norm_first: bool
    final_norm: bool
    norm_has_weights: bool
    bias: bool  # of the layers' projections; project_in and project_out have none
    tie_embeddings: bool

    def make_model(self, backend: Backend, tp: TensorParallel = ALONE) -> CausalLM:
        head = (
            None
            if self.tie_embeddings
            else Embedding(self.vocab_size, self.embedding_size, self.dtype, tp)
        )
        return CausalLM(OPTModel(self, backend, tp), head)

    def make_norm(self) -> nn.LayerNorm:
        return nn.LayerNorm(
            self.hidden_size, elementwise_affine=self.norm_has_weights, dtype=self.dtype
        )


class OPTAttention(nn.Module):
    def __init__(self, spec: OPTSpec, backend: Backend, tp: TensorParallel) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.backend = backend
        size, parts = (
            spec.hidden_size,
            dict.fromkeys(("q_proj", "k_proj", "v_proj"), spec.hidden_size),
        )
        self.qkv_proj = ColumnParallelLinear(size, parts, spec.bias, spec.dtype, tp)
        self.out_proj = RowParallelLinear(size, size, spec.bias, spec.dtype, tp)

    def forward(self, x: Tensor, kv_cache: Tensor, batch: Batch) -> Tensor:
        qkv = self.qkv_proj(x).chunk(3, dim=-1)
        query, key, value = (
            part.unflatten(-1, (-1, self.head_dim)) for part in qkv
        )  # [num_tokens, num_heads, head_dim]
        self.backend.store_kvcache(key, value, kv_cache, batch.slot_mapping)
        attended = self.backend.attend(query.contiguous(), kv_cache, batch, self.head_dim**-0.5)
        return self.out_proj(attended.flatten(1))


class OPTLayer(nn.Module):
    def __init__(self, spec: OPTSpec, backend: Backend, tp: TensorParallel) -> None:
        super().__init__()
        self.norm_first = spec.norm_first
        self.self_attn = OPTAttention(spec, backend, tp)
        self.self_attn_layer_norm = spec.make_norm()
        self.fc1 = ColumnParallelLinear(
            spec.hidden_size, {"fc1": spec.intermediate_size}, spec.bias, spec.dtype, tp
        )
        self.fc2 = RowParallelLinear(
            spec.intermediate_size, spec.hidden_size, spec.bias, spec.dtype, tp
        )
        self.final_layer_norm = spec.make_norm()

    def forward(self, x: Tensor, kv_cache: Tensor, batch: Batch) -> Tensor:
        if self.norm_first:
            x = x + self.self_attn(self.self_attn_layer_norm(x), kv_cache, batch)
            return x + self.mlp(self.final_layer_norm(x))
        x = self.self_attn_layer_norm(x + self.self_attn(x, kv_cache, batch))
        return self.final_layer_norm(x + self.mlp(x))

    def mlp(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(x)))


class OPTDecoder(nn.Module):
    """Token ids to what the output head takes."""

    def __init__(self, spec: OPTSpec, backend: Backend, tp: TensorParallel) -> None:
        super().__init__()
        sizes = spec.embedding_size, spec.hidden_size
        self.embed_tokens = Embedding(spec.vocab_size, spec.embedding_size, spec.dtype, tp)
        self.embed_positions = Embedding(
            spec.max_len + _FIRST_POSITION, spec.hidden_size, spec.dtype
        )
        is_narrow = spec.embedding_size != spec.hidden_size
        self.project_in = (
            RowParallelLinear(*sizes, False, spec.dtype) if is_narrow else nn.Identity()
        )
        self.project_out = (
            RowParallelLinear(*sizes[::-1], False, spec.dtype) if is_narrow else nn.Identity()
        )
        self.layers = nn.ModuleList(OPTLayer(spec, backend, tp) for _ in range(spec.num_layers))
        self.final_layer_norm = spec.make_norm() if spec.final_norm else nn.Identity()

    def forward(self, batch: Batch, kv_caches: list[Tensor]) -> Tensor:
        x = self.project_in(self.embed_tokens(batch.input_ids))  # [num_tokens, hidden_size]
        x = x + self.embed_positions(batch.positions + _FIRST_POSITION)
        for layer, kv_cache in zip(self.layers, kv_caches):
            x = layer(x, kv_cache, batch)
        return self.project_out(
            self.final_layer_norm(x.index_select(0, batch.logits_indices))
        )  # [num_logits, embedding_size]


class OPTModel(nn.Module):
    """The decoder, under the name that checkpoints give it."""

    def __init__(self, spec: OPTSpec, backend: Backend, tp: TensorParallel) -> None:
        super().__init__()
        self.decoder = OPTDecoder(spec, backend, tp)

    @property
    def embed_tokens(self) -> Embedding:
        return self.decoder.embed_tokens

    def forward(self, batch: Batch, kv_caches: list[Tensor]) -> Tensor:
        return self.decoder(batch, kv_caches)
