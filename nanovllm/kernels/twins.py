"""Twins of the layers that take torch several passes over the same numbers, for any device that has these functions:

    rms_norm(x, weight, eps)    silu_and_mul(gate_up)    filter_logits(logits, batch)    sample(logits, ...)

kernels/cpu/functions.py has them in C++, kernels/cuda/functions.py in Triton. A twin is a subclass that computes the same
from the same weights, so that a layer becomes its twin by a change of class.
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType

from torch import Tensor, nn

from nanovllm.batch import SamplingBatch
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.sampler import Sampler
from nanovllm.models.decoder import MLP

# Layer class -> what makes its twin, or returns None: not of this layer.
Twins = dict[type[nn.Module], Callable[[nn.Module], nn.Module | None]]


def become(twin: type[nn.Module], layer: nn.Module) -> nn.Module:
    """`layer` as a `twin`, which has nothing but another class."""
    layer.__class__ = twin
    return layer


def make_twins(functions: ModuleType) -> Twins:
    class FastRMSNorm(RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return functions.rms_norm(x, self.weight, self.eps)

    class FastMLP(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(functions.silu_and_mul(self.gate_up_proj(x)))

    class FastSampler(Sampler):
        def filter(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
            return functions.filter_logits(logits, batch)

        def draw(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
            return functions.sample(logits, self.token_hashes, batch.noise_keys, batch.temperatures)

    twins = {RMSNorm: FastRMSNorm, MLP: FastMLP, Sampler: FastSampler}
    return {layer: partial(become, twin) for layer, twin in twins.items()}
