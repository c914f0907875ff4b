"""OLMo 2 and OLMo 3: a decoder with a norm after each branch, and none before it.

    embedding -> [ x + norm(attention(x)); x + norm(mlp(x)) ] per layer -> norm

Queries and keys are normalized over all heads together. In OLMo 3, three of four layers attend to a
window, and only the others have a RoPE for longer contexts. DecoderSpec describes both.

References: OLMo et al. 2024 (2 OLMo 2 Furious); the model cards of Olmo 3.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanovllm.layers.attention import Backend
from nanovllm.layers.linear import Target
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import apply_rotary
from nanovllm.layers.tensor_parallel import TensorParallel
from nanovllm.models.decoder import Attention, CosSin, DecoderSpec
from nanovllm.models.gemma3 import Gemma3Layer


class OlmoNorm(RMSNorm):
    """Unlike a RMSNorm, rounds once, after the product with the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * self.normalize(x)).to(x.dtype)


class HeadsNorm(OlmoNorm):
    """A norm over all heads together, which are sharded over the ranks."""

    def __init__(self, spec: DecoderSpec, num_heads: int, tp: TensorParallel) -> None:
        full_size = num_heads * spec.head_dim
        shard_size, self.start = tp.divide(full_size, spec.head_dim)
        super().__init__(shard_size, spec.norm_eps, spec.dtype)
        self.full_size = full_size
        self.tp = tp

    def targets(self, name: str) -> Iterator[tuple[str, Target]]:
        yield f"{name}.weight", Target(self.weight, 0, self.start, self.full_size)

    def normalize(self, x: Tensor) -> Tensor:
        """Use the mean of all ranks. Ranks that share heads repeat all heads equally often."""
        wide = x.float()
        means = self.tp.all_reduce(wide.square().mean(-1, keepdim=True))
        return wide * torch.rsqrt(means / self.tp.size + self.eps)


class OlmoAttention(Attention):
    def __init__(self, spec: DecoderSpec, layer: int, backend: Backend, tp: TensorParallel) -> None:
        super().__init__(spec, layer, backend, tp)
        self.q_norm = HeadsNorm(spec, spec.num_heads, tp)
        self.k_norm = HeadsNorm(spec, spec.num_kv_heads, tp)

    def norm_and_rotate(self, heads: Tensor, norm: RMSNorm | None, cos_sin: CosSin) -> Tensor:
        assert norm is not None
        return apply_rotary(norm(heads.flatten(1)).view_as(heads), *cos_sin)


class OlmoLayer(Gemma3Layer):
    """Unlike in Gemma 3, there is no norm before a branch."""

    def __init__(self, spec: DecoderSpec, layer: int, backend: Backend, tp: TensorParallel) -> None:
        super().__init__(spec, layer, backend, tp)
        self.input_layernorm = nn.Identity()
        self.pre_feedforward_layernorm = nn.Identity()


@dataclass(frozen=True, kw_only=True)
class OlmoSpec(DecoderSpec):
    """A decoder with the layers of this file."""

    layer_class = OlmoLayer
    attention_class = OlmoAttention
    norm_class = OlmoNorm
