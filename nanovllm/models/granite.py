"""Granite 3: a decoder of Llama's structure with four constant factors.

    e * embedding -> [ x + r * attention(norm(x)); x + r * mlp(norm(x)) ] per layer -> norm
    scores of attention * a
    logits / l

Here the residual stream is y = x / r. The layers are then those of decoder.py, and their optimized
versions apply:

    e / r * embedding -> [ y + attention(norm(y)); y + mlp(norm(y)) ] per layer -> norm

A norm computes x / sqrt(mean(x^2) + eps). Its result for y is the same if eps is divided by r^2.

Reference: the model cards of Granite 3.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from nanovllm.layers.attention import Backend
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.tensor_parallel import ALONE, TensorParallel
from nanovllm.models.decoder import Decoder, DecoderSpec
from nanovllm.models.spec import CausalLM


@dataclass(frozen=True, kw_only=True)
class GraniteSpec(DecoderSpec):
    """A decoder with the factors e, r and l. The factor a is the field `scale`."""

    embedding_multiplier: float
    residual_multiplier: float
    logits_scaling: float

    def make_model(self, backend: Backend, tp: TensorParallel = ALONE) -> CausalLM:
        model = self.add_head(GraniteDecoder(self, backend, tp), self.hidden_size, tp)
        return GraniteLM(model.model, model.lm_head, self.logits_scaling)

    def make_norm(self, size: int) -> RMSNorm:
        return RMSNorm(size, self.norm_eps / self.residual_multiplier**2, self.dtype)


class GraniteDecoder(Decoder):
    def __init__(self, spec: GraniteSpec, backend: Backend, tp: TensorParallel) -> None:
        super().__init__(spec, backend, tp)
        self.embedding_scale = spec.embedding_multiplier / spec.residual_multiplier

    def embed(self, token_ids: Tensor) -> Tensor:
        return super().embed(token_ids) * self.embedding_scale


class GraniteLM(CausalLM):
    """Divides the logits. This changes samples and log probabilities, but no greedy token."""

    def __init__(self, model: nn.Module, lm_head: Embedding | None, logits_scaling: float) -> None:
        super().__init__(model, lm_head)
        self.logits_scaling = logits_scaling

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return super().compute_logits(hidden) / self.logits_scaling
