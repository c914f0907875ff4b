"""Gemma 3 for text: a decoder with a norm before and after each branch.

    scaled embedding -> [ x + norm(attention(norm(x))); x + norm(mlp(norm(x))) ] per layer -> norm

Five of every six layers attend to a window. They have a RoPE of their own, because they need no low
frequencies. DecoderSpec describes both. Norms multiply by 1 + weight, as in Qwen3.5.

Reference: Gemma 3 Technical Report, 2025.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from nanovllm.batch.batch import Batch
from nanovllm.layers.attention import Backend
from nanovllm.layers.norm import ZeroCenteredRMSNorm
from nanovllm.layers.tensor_parallel import TensorParallel
from nanovllm.models.config_fields import Fields, compute_decoder
from nanovllm.models.decoder import MLP, CosSins, DecoderLayer, DecoderSpec
from nanovllm.utils.checks import check_number


class GeluMLP(MLP):
    """GeGLU (Shazeer 2020): down_proj(gelu(gate_proj(x)) * up_proj(x))."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.gelu(gate, approximate="tanh") * up)


class Gemma3Layer(DecoderLayer):
    """Unlike in a DecoderLayer, post_attention_layernorm normalizes the output of attention."""

    def __init__(self, spec: DecoderSpec, layer: int, backend: Backend, tp: TensorParallel) -> None:
        super().__init__(spec, layer, backend, tp)
        self.pre_feedforward_layernorm = spec.make_norm(spec.hidden_size)
        self.post_feedforward_layernorm = spec.make_norm(spec.hidden_size)

    def forward(self, x: Tensor, cos_sins: CosSins, kv_cache: Tensor, batch: Batch) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), cos_sins, kv_cache, batch)
        x = x + self.post_attention_layernorm(attended)
        expanded = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(expanded)


@dataclass(frozen=True, kw_only=True)
class Gemma3Spec(DecoderSpec):
    """Embeddings are scaled, but not the output head, which shares their matrix."""

    layer_class = Gemma3Layer
    mlp_class = GeluMLP
    norm_class = ZeroCenteredRMSNorm

    @property
    def embedding_scale(self) -> float:
        """The root of the hidden size, rounded to the model's dtype, as in training.

        In bfloat16, the 1B model has 34 in place of 33.94.
        """
        # On the CPU, because models are made on the device "meta", which has no numbers.
        return torch.tensor(self.hidden_size**0.5, dtype=self.dtype, device="cpu").item()


def compute_gemma3(config: PretrainedConfig, given: Fields) -> Fields:
    name = "query_pre_attn_scalar"
    scalar = check_number(name, config.query_pre_attn_scalar, low=0.0, open_low=True)
    return {**compute_decoder(config, given), "scale": scalar**-0.5}
