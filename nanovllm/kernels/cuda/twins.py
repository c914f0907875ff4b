"""Which layers have a faster twin on a GPU: those of any device, and some that launch one kernel instead of several."""

import torch
from torch import Tensor, nn

from nanovllm.batch import Batch
from nanovllm.kernels.cuda import functions
from nanovllm.kernels.cuda.attention import store_kvcache
from nanovllm.kernels.twins import Twins, become, make_twins
from nanovllm.models.decoder import Attention, DecoderLayer, DecoderLayers


class FusedLayers(DecoderLayers):
    """A sum and the norm behind it are one kernel, also where that norm is the next layer's."""

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], kv_caches: list[Tensor], batch: Batch) -> Tensor:
        branch = None  # the newest output, not yet added to x
        for layer, kv_cache in zip(self, kv_caches):
            first, second = layer.input_layernorm, layer.post_attention_layernorm
            x, normed = functions.add_rms_norm(x, branch, first.weight, first.eps)
            branch = layer.self_attn(normed, cos_sin, kv_cache, batch)
            x, normed = functions.add_rms_norm(x, branch, second.weight, second.eps)
            branch = layer.mlp(normed)
        return x + branch


class FusedAttention(Attention):
    """All between the projections and the attention is one kernel."""

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], kv_cache: Tensor, batch: Batch) -> Tensor:
        norms = (None, None, 0.0) if self.q_norm is None else (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        query = functions.rotate_and_store(self.qkv_proj(x), *norms, *cos_sin, kv_cache, batch.slot_mapping)
        attended = self.backend.attend(query, kv_cache, batch, self.head_dim**-0.5)
        return self.o_proj(attended.flatten(1))


def fuse_layers(layers: DecoderLayers) -> nn.Module | None:
    """None if one of them is of another kind."""
    return become(FusedLayers, layers) if all([type(layer) is DecoderLayer for layer in layers]) else None


def fuse_attention(attention: Attention) -> nn.Module | None:
    """None if the backend has its own way of storing K/V: the layer then stays as it is."""
    return become(FusedAttention, attention) if attention.backend.store_kvcache is store_kvcache else None


TWINS: Twins = {**make_twins(functions), DecoderLayers: fuse_layers, Attention: fuse_attention}


def find_twins(dtype: torch.dtype) -> tuple[Twins, str | None]:
    """The twins, and why there are none."""
    reason = functions.reason_unavailable(dtype)
    return (TWINS, None) if reason is None else ({}, reason)
