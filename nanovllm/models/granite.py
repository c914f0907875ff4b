"""Granite 3: a decoder of Llama's structure with four constant factors.

    e * embedding -> [ x + r * attention(norm(x)); x + r * mlp(norm(x)) ] per layer -> norm
    scores of attention * a
    logits / l

Here the residual stream is y = x / r. The layers are then those of decoder.py, and their optimized
versions apply:

    e / r * embedding -> [ y + attention(norm(y)); y + mlp(norm(y)) ] per layer -> norm

A norm computes x / sqrt(mean(x^2) + eps). Its result for y is the same if eps is divided by r^2.
The values of y are larger than those of x (4.5 times in Granite 3), so float16 overflows earlier.

Reference: the model cards of Granite 3.
"""

from dataclasses import dataclass

from torch import Tensor

from nanovllm.batch.batch import Batch
from nanovllm.layers.attention import Backend
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.tensor_parallel import TensorParallel
from nanovllm.models.decoder import Decoder, DecoderSpec


class GraniteDecoder(Decoder):
    def __init__(self, spec: "GraniteSpec", backend: Backend, tp: TensorParallel) -> None:
        super().__init__(spec, backend, tp)
        self.logits_scaling = spec.logits_scaling

    def forward(self, batch: Batch, kv_caches: list[Tensor]) -> Tensor:
        """Divide the hidden states, which divides the logits."""
        return super().forward(batch, kv_caches) / self.logits_scaling


@dataclass(frozen=True, kw_only=True)
class GraniteSpec(DecoderSpec):
    """A decoder with the factors e, r and l. The factor a is the field `scale`."""

    embedding_multiplier: float
    residual_multiplier: float
    logits_scaling: float

    decoder_class = GraniteDecoder

    @property
    def embedding_scale(self) -> float:
        return self.embedding_multiplier / self.residual_multiplier

    def make_norm(self, size: int) -> RMSNorm:
        return RMSNorm(size, self.norm_eps / self.residual_multiplier**2, self.dtype)
