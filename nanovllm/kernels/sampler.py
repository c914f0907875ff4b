"""What the optimized samplers for CPUs and GPUs have in common."""

from dataclasses import fields

from torch import Tensor

from nanovllm.batch import Filters, Noise
from nanovllm.kernels.optimized_layer import OptimizedLayer
from nanovllm.layers.sampler import Sampler

KNOWN_FIELDS = {
    Noise: {"temperatures", "keys"},
    Filters: {"rows", "temperatures", "top_ks", "top_ps", "min_ps", "max_top_k"},
}


class OptimizedSampler(OptimizedLayer, Sampler):
    replaces = Sampler

    token_hashes: Tensor

    def convert(self) -> bool:
        """Raise NotImplementedError if there are fields that the kernels would ignore."""
        for kind, known in KNOWN_FIELDS.items():
            unknown = {field.name for field in fields(kind)} - known
            if unknown:
                raise NotImplementedError(
                    f"{type(self).__module__}.{type(self).__name__} ignores {sorted(unknown)} of"
                    f" {kind.__name__}: implement them there, or set enable_kernels=False"
                )
        return True
