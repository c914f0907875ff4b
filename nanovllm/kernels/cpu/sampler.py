"""The sampler for CPUs, in C++ (sampler.h)."""

import torch
from torch import Tensor

from nanovllm.batch.batch import Filters, Noise
from nanovllm.kernels.cpu.library import load
from nanovllm.kernels.optimized_layer import OptimizedLayer
from nanovllm.kernels.sampler_fields import has_unknown_fields
from nanovllm.layers.sampler import Sampler


class FastSampler(OptimizedLayer, Sampler):
    """Filters without sorting, like the Triton kernel.

    Penalties and filters return float32. The library of the model's dtype reads these logits too.
    """

    def filter(self, logits: Tensor, filters: Filters) -> Tensor:
        if has_unknown_fields(filters):
            return super().filter(logits, filters)
        logits = logits.contiguous()
        output = torch.empty_like(logits, dtype=torch.float32)
        load(self.dtype).filter_logits(
            logits,
            self._is_float32(logits),
            output,
            filters.rows,
            filters.temperatures,
            filters.top_ks,
            filters.top_ps,
            filters.min_ps,
            *logits.shape,
            len(filters.rows),
        )
        return output

    def draw(self, logits: Tensor, noise: Noise | None) -> Tensor:
        if noise is not None and has_unknown_fields(noise):
            return super().draw(logits, noise)
        logits = logits.contiguous()
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        load(self.dtype).sample(
            logits,
            self._is_float32(logits),
            self.token_hashes,
            noise.keys if noise is not None else None,
            noise.temperatures if noise is not None else None,
            tokens,
            *logits.shape,
        )
        return tokens

    def _is_float32(self, logits: Tensor) -> bool:
        assert logits.dtype in (self.dtype, torch.float32)
        return logits.dtype == torch.float32
