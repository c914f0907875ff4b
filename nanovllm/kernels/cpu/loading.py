"""Quantizes weights in C++ while they are loaded, with the codes of layers/quantized.py."""

from torch import Tensor

from nanovllm.kernels.cpu.library import DEFINES, load
from nanovllm.kernels.optimized_layer import OptimizedLayer
from nanovllm.layers.quantized import QuantizedWeight


class FastQuantizedWeight(OptimizedLayer, QuantizedWeight):
    def copy_(self, source: Tensor | QuantizedWeight) -> None:
        if isinstance(source, QuantizedWeight) or not self._can_quantize(source):
            super().copy_(source)
            return
        load(self.dtype).quantize_weight(
            source.contiguous(),
            list(DEFINES).index(source.dtype),
            *self.buffers(),
            source.numel() // self.in_features,
            self.in_features,
            self.scheme.bits,
            self.scheme.group_size,
        )

    def _can_quantize(self, source: Tensor) -> bool:
        """Return whether the C++ code, which has no checks, can quantize `source` into this."""
        is_whole = all([part.is_contiguous() for part in self.buffers()])
        fits = source.shape == self.shape and source.device == self.codes.device
        return is_whole and fits and source.dtype in DEFINES
