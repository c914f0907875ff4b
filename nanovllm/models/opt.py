"""OPT (Zhang et al. 2022), a decoder like GPT-3, without RoPE, RMSNorm or gated MLPs.

    ids -> embedding (-> project_in) + positions -> layers -> norm (-> project_out) -> logits

    pre-norm:           x + attention(norm(x)), then x + mlp(norm(x))
    post-norm (350m):   norm(x + attention(x)), then norm(x + mlp(x))

Modules are named as in Hugging Face checkpoints, without "decoder.". Shapes are those of one rank.
Position embeddings, norms, project_in and project_out are replicated on every rank.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from nanovllm.batch import Batch
from nanovllm.layers.attention import Backend
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.layers.tensor_parallel import ALONE, TensorParallel
from nanovllm.models.attention_fields import Fields, check_multiple
from nanovllm.models.spec import CausalLM, ModelSpec

_FIRST_POSITION = 2  # the rows before it are for padding, which does not occur here


@dataclass(frozen=True, kw_only=True)
class OPTSpec(ModelSpec):
    """What distinguishes one OPT from another. models/architectures.py reads it."""

    word_embed_proj_dim: int  # width of the token embeddings and of the output head
    do_layer_norm_before: bool  # the models with pre-norm also have a norm at the end

    def make_model(self, backend: Backend, tp: TensorParallel = ALONE) -> CausalLM:
        return self.add_head(OPTDecoder(self, backend, tp), self.word_embed_proj_dim, tp)

    def make_norm(self) -> nn.LayerNorm:
        return nn.LayerNorm(self.hidden_size, dtype=self.dtype)


class OPTAttention(nn.Module):
    def __init__(self, spec: OPTSpec, backend: Backend, tp: TensorParallel) -> None:
        super().__init__()
        (self.shape,) = spec.attention_shapes  # all layers have the same
        self.backend = backend
        size = spec.hidden_size
        parts = [("q_proj", size), ("k_proj", size), ("v_proj", size)]
        self.qkv_proj = ColumnParallelLinear(size, parts, True, spec.dtype, tp)
        self.out_proj = RowParallelLinear(size, size, True, spec.dtype, tp)

    def forward(self, x: Tensor, kv_cache: Tensor, batch: Batch) -> Tensor:
        vectors = self.qkv_proj(x).unflatten(-1, (-1, self.shape.head_dim))
        query, key, value = vectors.chunk(3, dim=1)  # each [num_tokens, num_heads, head_dim]
        self.backend.store_kvcache(key, value, kv_cache, batch.slot_mapping)
        attended = self.backend.attend(query.contiguous(), kv_cache, batch, self.shape)
        return self.out_proj(attended.flatten(1))


class OPTLayer(nn.Module):
    def __init__(self, spec: OPTSpec, backend: Backend, tp: TensorParallel) -> None:
        super().__init__()
        hidden_size, width = spec.hidden_size, spec.intermediate_size
        self.norm_first = spec.do_layer_norm_before
        self.self_attn = OPTAttention(spec, backend, tp)
        self.self_attn_layer_norm = spec.make_norm()
        self.fc1 = ColumnParallelLinear(hidden_size, [("fc1", width)], True, spec.dtype, tp)
        self.fc2 = RowParallelLinear(width, hidden_size, True, spec.dtype, tp)
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
    """Token ids to hidden states of the size of the embeddings."""

    def __init__(self, spec: OPTSpec, backend: Backend, tp: TensorParallel) -> None:
        super().__init__()
        hidden_size, embedding_size = spec.hidden_size, spec.word_embed_proj_dim
        num_positions = spec.max_len + _FIRST_POSITION
        self.embed_tokens = Embedding(spec.vocab_size, embedding_size, spec.dtype, tp)
        self.embed_positions = nn.Embedding(num_positions, hidden_size, dtype=spec.dtype)
        self.project_in: nn.Module = nn.Identity()
        self.project_out: nn.Module = nn.Identity()
        if embedding_size != hidden_size:
            self.project_in = RowParallelLinear(embedding_size, hidden_size, False, spec.dtype)
            self.project_out = RowParallelLinear(hidden_size, embedding_size, False, spec.dtype)
        self.layers = nn.ModuleList(OPTLayer(spec, backend, tp) for _ in range(spec.num_layers))
        has_norm = spec.do_layer_norm_before
        self.final_layer_norm = spec.make_norm() if has_norm else nn.Identity()

    def forward(self, batch: Batch, kv_caches: list[Tensor]) -> Tensor:
        x = self.project_in(self.embed_tokens(batch.input_ids))  # [num_tokens, hidden_size]
        x = x + self.embed_positions(batch.positions + _FIRST_POSITION)
        for layer, kv_cache in zip(self.layers, kv_caches):
            x = layer(x, kv_cache, batch)
        x = x.index_select(0, batch.logits_indices)  # [num_logits, hidden_size]
        return self.project_out(self.final_layer_norm(x))  # [num_logits, embedding_size]


def compute_opt(config: PretrainedConfig, given: Fields) -> Fields:
    hidden_size, num_heads = given["hidden_size"], given["num_heads"]
    check_multiple("hidden_size", hidden_size, "num_attention_heads", num_heads)
    head_dim = hidden_size // num_heads
    return {
        "num_kv_heads": num_heads,
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
        "windows": (None,) * given["num_layers"],
    }
