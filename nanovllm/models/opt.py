"""OPT (Zhang et al. 2022), a decoder like GPT-3, without RoPE, RMSNorm or gated MLPs.

    ids -> embedding (-> project_in) + positions -> layers -> norm (-> project_out) -> logits

    pre-norm:           x + attention(norm(x)), then x + mlp(norm(x))
    post-norm (350m):   norm(x + attention(x)), then norm(x + mlp(x))

The structure is that of decoder.py, with learned positions in place of a RoPE, which rotates by 0
here. checkpoints/tensor_files.py gives the tensors the names of the other decoders. Position
embeddings, norms, project_in and project_out are replicated on every rank.
"""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from nanovllm.batch.batch import Batch
from nanovllm.layers.attention import Backend
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.layers.rotary import RopeSpec
from nanovllm.layers.tensor_parallel import TensorParallel
from nanovllm.models.config_fields import Fields, check_multiple
from nanovllm.models.decoder import CosSins, Decoder, DecoderLayer, DecoderSpec

_FIRST_POSITION = 2  # the rows before it are for padding, which does not occur here


class ReluMLP(nn.Module):
    def __init__(self, spec: DecoderSpec, tp: TensorParallel) -> None:
        super().__init__()
        hidden_size, width = spec.hidden_size, spec.intermediate_size
        self.fc1 = ColumnParallelLinear(hidden_size, [("fc1", width)], True, spec.dtype, tp)
        self.fc2 = RowParallelLinear(width, hidden_size, True, spec.dtype, tp)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(x)))


class PostNormLayer(DecoderLayer):
    def forward(self, x: Tensor, cos_sins: CosSins, kv_cache: Tensor, batch: Batch) -> Tensor:
        x = self.input_layernorm(x + self.self_attn(x, cos_sins, kv_cache, batch))
        return self.post_attention_layernorm(x + self.mlp(x))


class OPTDecoder(Decoder):
    """Token ids to hidden states of the size of the embeddings."""

    def __init__(self, spec: "OPTSpec", backend: Backend, tp: TensorParallel) -> None:
        super().__init__(spec, backend, tp)
        hidden_size, embedding_size = spec.hidden_size, spec.word_embed_proj_dim
        num_positions = spec.max_len + _FIRST_POSITION
        self.embed_positions = nn.Embedding(num_positions, hidden_size, dtype=spec.dtype)
        self.project_in: nn.Module = nn.Identity()
        self.project_out: nn.Module = nn.Identity()
        if embedding_size != hidden_size:
            self.project_in = RowParallelLinear(embedding_size, hidden_size, False, spec.dtype)
            self.project_out = RowParallelLinear(hidden_size, embedding_size, False, spec.dtype)
        if not spec.do_layer_norm_before:
            self.norm = nn.Identity()

    def embed(self, batch: Batch) -> Tensor:
        x = self.project_in(super().embed(batch))
        return x + self.embed_positions(batch.positions + _FIRST_POSITION)

    def forward(self, batch: Batch, kv_caches: list[Tensor]) -> Tensor:
        return self.project_out(super().forward(batch, kv_caches))  # [num_logits, embedding_size]


@dataclass(frozen=True, kw_only=True)
class OPTSpec(DecoderSpec):
    """What distinguishes one OPT from another. The fields are named as in config.json."""

    word_embed_proj_dim: int  # width of the token embeddings and of the output head
    do_layer_norm_before: bool  # the models with pre-norm also have a norm at the end

    decoder_class = OPTDecoder
    mlp_class = ReluMLP

    def make_embedding(self, tp: TensorParallel) -> Embedding:
        return Embedding(self.vocab_size, self.word_embed_proj_dim, self.dtype, tp)

    def make_layer(self, layer: int, backend: Backend, tp: TensorParallel) -> nn.Module:
        kind = DecoderLayer if self.do_layer_norm_before else PostNormLayer
        return kind(self, layer, backend, tp)

    def make_norm(self, size: int) -> Any:
        return nn.LayerNorm(size, self.norm_eps, dtype=self.dtype)


def compute_opt(config: PretrainedConfig, given: Fields) -> Fields:
    hidden_size, num_heads = given["hidden_size"], given["num_heads"]
    check_multiple("hidden_size", hidden_size, "num_attention_heads", num_heads)
    head_dim = hidden_size // num_heads
    return {
        "num_kv_heads": num_heads,
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
        "windows": (None,) * given["num_layers"],
        "ropes": (RopeSpec((0.0,) * (head_dim // 2)),),
        "rope_indices": (0,) * given["num_layers"],
        "norm_eps": 1e-5,
    }
