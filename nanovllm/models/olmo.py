"""OLMo 2 and OLMo 3: a decoder with a norm after each branch, and none before it.

    embedding -> [ x + norm(attention(x)); x + norm(mlp(x)) ] per layer -> norm

Queries and keys are normalized over all heads together. In OLMo 3, three of four layers attend to a
window, and only the others have a RoPE for longer contexts. DecoderSpec describes both.

References: OLMo et al. 2024 (2 OLMo 2 Furious); the model cards of Olmo 3.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from nanovllm.batch import Batch
from nanovllm.layers.attention import Backend
from nanovllm.layers.norm import ParallelRMSNorm, RMSNorm
from nanovllm.layers.tensor_parallel import TensorParallel
from nanovllm.models.decoder import Attention, CosSin, CosSins, DecoderSpec


@dataclass(frozen=True, kw_only=True)
class OlmoSpec(DecoderSpec):
    """A decoder with the layers of this file."""

    def make_layer(self, layer: int, backend: Backend, tp: TensorParallel) -> nn.Module:
        return OlmoLayer(self, layer, backend, tp)

    def make_attention(self, layer: int, backend: Backend, tp: TensorParallel) -> Attention:
        return OlmoAttention(self, layer, backend, tp)


class OlmoAttention(Attention):
    def __init__(self, spec: OlmoSpec, layer: int, backend: Backend, tp: TensorParallel) -> None:
        super().__init__(spec, layer, backend, tp)
        unit = spec.head_dim
        q_size, kv_size = spec.num_heads * unit, spec.num_kv_heads * unit
        self.q_norm = ParallelRMSNorm(q_size, spec.norm_eps, spec.dtype, tp, unit)
        self.k_norm = ParallelRMSNorm(kv_size, spec.norm_eps, spec.dtype, tp, unit)

    def norm_and_rotate(self, heads: Tensor, norm: RMSNorm | None, cos_sin: CosSin) -> Tensor:
        assert norm is not None
        normed = norm(heads.flatten(1)).view_as(heads)
        return super().norm_and_rotate(normed, None, cos_sin)


class OlmoLayer(nn.Module):
    def __init__(self, spec: OlmoSpec, layer: int, backend: Backend, tp: TensorParallel) -> None:
        super().__init__()
        self.self_attn = spec.make_attention(layer, backend, tp)
        self.post_attention_layernorm = spec.make_norm(spec.hidden_size)
        self.mlp = spec.make_mlp(layer, tp)
        self.post_feedforward_layernorm = spec.make_norm(spec.hidden_size)

    def forward(self, x: Tensor, cos_sins: CosSins, kv_cache: Tensor, batch: Batch) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(x, cos_sins, kv_cache, batch))
        return x + self.post_feedforward_layernorm(self.mlp(x))
