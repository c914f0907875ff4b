"""The pre-norm decoder of Llama, Qwen, Mistral and their relatives, over a flat batch of tokens.

    ids -> embedding -> [ x + attention(norm(x)); x + mlp(norm(x)) ] per layer -> norm -> hidden

Models that differ only in values (sizes, biases, norms on queries and keys, RoPE) share this code,
each with its own DecoderSpec. Modules are named as in Hugging Face checkpoints, except merged
projections. All shapes are those of one rank. num_tokens counts the tokens of the whole batch,
because only attention distinguishes sequences.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.batch.batch import Batch
from nanovllm.checkpoints.tensor_files import EMBEDDING, HEAD
from nanovllm.layers.attention import Backend
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear, Target
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import RopeSpec, RotaryEmbedding, apply_rotary
from nanovllm.layers.tensor_parallel import ALONE, TensorParallel
from nanovllm.models.spec import ModelSpec

CosSin = tuple[Tensor, Tensor]  # for the positions of all tokens
CosSins = list[CosSin]  # one for each RoPE of the model


class Attention(nn.Module):
    NUM_QUERY_PARTS = 1  # vectors per query head in q_proj. Qwen3.5 adds a gate

    def __init__(
        self, spec: "DecoderSpec", layer: int, backend: Backend, tp: TensorParallel
    ) -> None:
        super().__init__()
        shape = spec.attention_shape(layer)
        assert shape is not None  # because a layer with a recurrent state has no Attention
        self.shape = shape
        self.rope_index = spec.rope_indices[layer]
        self.backend = backend
        total_q_size = shape.num_heads * shape.head_dim  # on all ranks together
        total_kv_size = shape.num_kv_heads * shape.head_dim
        sizes = (self.NUM_QUERY_PARTS * total_q_size, total_kv_size, total_kv_size)
        self.qkv_proj = ColumnParallelLinear(
            spec.hidden_size,
            list(zip(spec.qkv_names, sizes)),
            bias=spec.qkv_bias,
            dtype=spec.dtype,
            tp=tp,
            unit=shape.head_dim,
        )
        self.o_proj = RowParallelLinear(total_q_size, spec.hidden_size, spec.o_bias, spec.dtype, tp)
        # Vectors of q_proj, k_proj and v_proj for each token, on this rank.
        self.num_vectors = [size // shape.head_dim for size in self.qkv_proj.shard_sizes]
        self.q_norm = spec.make_norm(shape.head_dim) if spec.qk_norm else None
        self.k_norm = spec.make_norm(shape.head_dim) if spec.qk_norm else None

    def forward(self, x: Tensor, cos_sins: CosSins, kv_cache: Tensor, batch: Batch) -> Tensor:
        vectors = self.qkv_proj(x).unflatten(-1, (-1, self.shape.head_dim))
        # query is [num_tokens, num_heads, head_dim]. key and value have num_kv_heads.
        query, key, value = vectors.split(self.num_vectors, dim=1)
        attended = self.attend(query, key, value, cos_sins, kv_cache, batch)
        return self.o_proj(attended.flatten(1))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos_sins: CosSins,
        kv_cache: Tensor,
        batch: Batch,
    ) -> Tensor:
        """Store K/V and attend to each context. Return [num_tokens, num_heads, head_dim]."""
        cos_sin = cos_sins[self.rope_index]
        query = self.norm_and_rotate(query, self.q_norm, cos_sin)
        key = self.norm_and_rotate(key, self.k_norm, cos_sin)
        batch = self.choose_blocks(batch)
        # Write K/V first, then read through the block table. The tokens of this step are then
        # ordinary context, also for other sequences that share their blocks.
        self.backend.store_kvcache(key, value, kv_cache, batch.slot_mapping)
        return self.backend.attend(query, kv_cache, batch, self.shape)

    def choose_blocks(self, batch: Batch) -> Batch:
        """Return the batch with the blocks of this layer."""
        return batch if self.shape.window is None else batch.for_windows

    def norm_and_rotate(self, heads: Tensor, norm: RMSNorm | None, cos_sin: CosSin) -> Tensor:
        if norm is not None:
            heads = norm(heads)
        return apply_rotary(heads, *cos_sin)


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): down_proj(silu(gate_proj(x)) * up_proj(x))."""

    def __init__(
        self,
        hidden_size: int,
        width: int,
        bias: bool,
        dtype: torch.dtype,
        tp: TensorParallel,
        gate_up_names: Iterable[str] = ("gate_proj", "up_proj"),
    ) -> None:
        super().__init__()
        parts = [(name, width) for name in gate_up_names]
        self.gate_up_proj = ColumnParallelLinear(hidden_size, parts, bias, dtype, tp)
        self.down_proj = RowParallelLinear(width, hidden_size, bias, dtype, tp)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    def __init__(
        self, spec: "DecoderSpec", layer: int, backend: Backend, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.input_layernorm = spec.make_norm(spec.hidden_size)
        self.self_attn = spec.attention_class(spec, layer, backend, tp)
        self.post_attention_layernorm = spec.make_norm(spec.hidden_size)
        self.mlp = spec.make_mlp(layer, tp)

    def forward(self, x: Tensor, cos_sins: CosSins, kv_cache: Tensor, batch: Batch) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_sins, kv_cache, batch)
        return x + self.mlp(self.post_attention_layernorm(x))


class DecoderLayers(nn.ModuleList):
    """The stack of layers, each with its own part of the KV cache.

    This is a module, so that kernels/ can replace the loop by one C++ call.
    """

    def forward(
        self, x: Tensor, cos_sins: CosSins, kv_caches: list[Tensor], batch: Batch
    ) -> Tensor:
        """Return the rows whose logits are wanted, [num_logits, hidden_size]."""
        for layer, kv_cache in zip(self, kv_caches):
            x = layer(x, cos_sins, kv_cache, batch)
        # Other rows are not needed, and the output head is the largest matrix of many models.
        return x.index_select(0, batch.logits_indices)


class Decoder(nn.Module):
    """Token ids to hidden states."""

    def __init__(self, spec: "DecoderSpec", backend: Backend, tp: TensorParallel) -> None:
        super().__init__()
        self.embedding_scale = spec.embedding_scale
        self.embed_tokens = spec.make_embedding(tp)
        self.rotaries = nn.ModuleList(map(RotaryEmbedding, spec.ropes))
        self.layers = DecoderLayers(
            spec.make_layer(layer, backend, tp) for layer in range(spec.num_layers)
        )
        self.norm = spec.make_norm(spec.hidden_size)

    def embed(self, batch: Batch) -> Tensor:
        """Return the input of the first layer, [num_tokens, hidden_size]."""
        embedded = self.embed_tokens(batch.input_ids)
        return embedded if self.embedding_scale == 1.0 else embedded * self.embedding_scale

    def forward(self, batch: Batch, kv_caches: list[Tensor]) -> Tensor:
        x = self.embed(batch)
        cos_sins = [rotary(batch.positions) for rotary in self.rotaries]
        return self.norm(self.layers(x, cos_sins, kv_caches, batch))  # [num_logits, hidden_size]


class CausalLM(nn.Module):
    """A decoder and an output head, which is `lm_head` or the matrix of the embeddings."""

    # Names of their checkpoint tensors, and how the names of a decoder's tensors begin.
    embedding_name = EMBEDDING
    head_name = HEAD
    prefix = "model."
    skipped_names: Iterable[str] = ()  # patterns of tensors that are not needed

    def __init__(self, model: nn.Module, lm_head: Embedding | None) -> None:
        super().__init__()
        self.model = model
        self.lm_head = lm_head

    def forward(self, batch: Batch, kv_caches: list[Tensor]) -> Tensor:
        """Compute hidden states [num_logits, hidden_size]. A CUDA graph ends here."""
        return self.model(batch, kv_caches)

    def check_loaded(self) -> None:
        """Raise ValueError if the model cannot be served with its weights."""

    def name_targets(self, own: dict[str, list[Target]]) -> Iterable[tuple[str, list[Target]]]:
        """Map the names of checkpoint tensors to where they go, given by the model's own names."""
        return own.items()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [num_logits, vocab_size]."""
        head = self.lm_head or cast(Embedding, self.model.embed_tokens)
        return head.logits(hidden)


@dataclass(frozen=True, kw_only=True)
class DecoderSpec(ModelSpec):
    """What distinguishes one decoder of this file from another. architectures.py fills it."""

    norm_eps: float
    ropes: tuple[RopeSpec, ...]  # distinct ones, whose cos and sin are computed once a step
    rope_indices: tuple[int, ...]  # for each layer, an index of `ropes`
    qk_norm: bool = False  # RMSNorm over each query and key head
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    # Tensors of the checkpoint. Parts with the same name are consecutive rows of one tensor.
    qkv_names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up_names: tuple[str, ...] = ("gate_proj", "up_proj")

    # Classes of the parts. A part that depends on the layer has its class from a method.
    decoder_class: ClassVar[type[nn.Module]] = Decoder
    layer_class: ClassVar[type[nn.Module]] = DecoderLayer
    attention_class = Attention
    mlp_class = MLP
    norm_class = RMSNorm

    @property
    def embedding_scale(self) -> float:
        """The factor on embeddings."""
        return 1.0

    def make_model(self, backend: Backend, tp: TensorParallel = ALONE) -> CausalLM:
        model = self.decoder_class(self, backend, tp)
        head = None if self.tie_embeddings else self.make_embedding(tp)
        return CausalLM(model, head)

    def make_embedding(self, tp: TensorParallel) -> Embedding:
        """Make the embedding, or an output head of its own."""
        return Embedding(self.vocab_size, self.hidden_size, self.dtype, tp)

    def make_layer(self, layer: int, backend: Backend, tp: TensorParallel) -> nn.Module:
        return self.layer_class(self, layer, backend, tp)

    def make_mlp(self, layer: int, tp: TensorParallel) -> nn.Module:
        sizes = (self.hidden_size, self.intermediate_size)
        return self.mlp_class(*sizes, self.mlp_bias, self.dtype, tp, self.gate_up_names)

    def make_norm(self, size: int) -> Any:
        return self.norm_class(size, self.norm_eps, self.dtype)
