"""Quantizes weights in C++ while they are loaded, with the codes of layers/quantized.py."""

from torch import Tensor

from nanovllm.kernels.cpu.library import DEFINES, load
from nanovllm.kernels.optimized_layer import OptimizedLayer
from nanovllm.layers.quantized import QuantizedWeight


class FastQuantizedWeight(OptimizedLayer, QuantizedWeight):
    replaces = QuantizedWeight

    def copy_(self, source: Tensor | QuantizedWeight) -> None:
        parts = (self.codes, self.scales, self.zeros)
        is_whole = all(part.is_contiguous() for part in parts)
        if isinstance(source, QuantizedWeight) or source.dtype not in DEFINES or not is_whole:
            super().copy_(source)
            return
        load(self.dtype).quantize_weight(
            source.contiguous(),
            list(DEFINES).index(source.dtype),
            *parts,
            source.numel() // self.in_features,
            self.in_features,
            self.scheme.bits,
            self.scheme.group_size,
        )
