"""Weight-only quantization: integer codes, with a scale and a zero for each group of inputs.

    weight[row, i] = (code[row, i] - zero[row, i // group_size]) * scale[row, i // group_size]

              group 0           group 1
    row 0   c c c c c c c c | c c c c c c c c      codes of 4 or 8 bits, from 0 to 2^bits - 1
            s z             | s z                  scale float32, zero int16
    row 1   c c c c c c c c | c c c c c c c c

Groups are small so that one large weight does not make all others of its row coarse. A zero lets a
group use all codes for the range that it has. Scales are float32 because checkpoints store them in
float16, bfloat16 or float32, and no smaller dtype holds all of these.

This is plain torch and the specification of all kernels: a layer dequantizes its weight to the
model's dtype and multiplies by it. Activations, K/V and biases are not quantized.

checkpoints/quantization.py decides which layers are quantized, before their memory is allocated. A
QuantizedWeight then takes the place of the Parameter:

    QuantizableLayer.quantize(scheme) -> QuantizedWeight.empty_like(parameter, scheme)
    loading                           -> weight.copy_(float tensor)      `quantize`, then copy
                                         weight.copy_(QuantizedWeight)   copy stored codes
    a layer's `multiply`              -> weight.dequantize()

`copy_` quantizes, so the float weights of a model are never all in memory at once.

References: Frantar et al. 2022 (GPTQ); Lin et al. 2023 (AWQ); llama.cpp's Q4_1 and Q8_0.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.utils.helpers import cdiv

_CHUNK = 1 << 18  # weights that are quantized at once, which bounds temporary float32 copies


@dataclass(frozen=True)
class Scheme:
    bits: int  # bits of a code: 4 or 8
    group_size: int  # inputs that share a scale and a zero

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of a code, and its fraction of the scale and the zero of its group."""
        return self.bits / 8 + (4 + 2) / self.group_size


# Those of the option `quantization`.
INT8 = Scheme(bits=8, group_size=128)
INT4 = Scheme(bits=4, group_size=64)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return the codes in the last dimension of a uint8 tensor, one per element."""
    if bits == 8:
        return packed
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


class QuantizedWeight(nn.Module):
    """A weight [..., out_features, in_features]. `dtype` is what it is dequantized to."""

    codes: Tensor  # uint8 [..., out_features, bytes of a row], of two 4-bit codes the first is low
    scales: Tensor  # float32 [..., out_features, num_groups]
    zeros: Tensor  # int16 [..., out_features, num_groups], from 0 to 2^bits

    def __init__(
        self,
        scheme: Scheme,
        in_features: int,
        dtype: torch.dtype,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor,
    ) -> None:
        super().__init__()
        self.scheme = scheme
        self.in_features = in_features
        self.dtype = dtype
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", zeros)

    @classmethod
    def from_codes(
        cls, scheme: Scheme, dtype: torch.dtype, codes: Tensor, scales: Tensor, zeros: Tensor
    ) -> "QuantizedWeight":
        """Pack codes, one per element: uint8 [..., out_features, in_features]."""
        in_features = codes.shape[-1]
        if scheme.bits == 4:
            codes = F.pad(codes, (0, in_features % 2))
            codes = codes[..., ::2] | codes[..., 1::2] << 4
        return cls(scheme, in_features, dtype, codes, scales.float(), zeros.to(torch.int16))

    @classmethod
    def empty_like(cls, weight: Tensor, scheme: Scheme) -> "QuantizedWeight":
        """Allocate what `quantize` returns for a weight of this shape, dtype and device."""
        *rows, in_features = weight.shape
        num_groups = cdiv(in_features, scheme.group_size)
        codes = weight.new_empty(*rows, cdiv(in_features * scheme.bits, 8), dtype=torch.uint8)
        scales = weight.new_empty(*rows, num_groups, dtype=torch.float32)
        zeros = weight.new_empty(*rows, num_groups, dtype=torch.int16)
        return cls(scheme, in_features, weight.dtype, codes, scales, zeros)

    @classmethod
    def quantize(cls, weight: Tensor, scheme: Scheme) -> "QuantizedWeight":
        """Round each weight to the nearest code of its group. 0 stays 0."""
        in_features = weight.shape[-1]
        padding = (0, -in_features % scheme.group_size)
        groups = F.pad(weight.float(), padding).unflatten(-1, (-1, scheme.group_size))
        low = groups.amin(-1, keepdim=True).clamp_(max=0.0)
        high = groups.amax(-1, keepdim=True).clamp_(min=0.0)
        largest_code = (1 << scheme.bits) - 1
        scales = (high - low) / largest_code
        inverse = (1 / scales).masked_fill_(scales == 0, 0.0)
        zeros = (-low * inverse).round_()
        rounded = (groups * inverse).round_().add_(zeros).clamp_(0, largest_code)
        codes = rounded.to(torch.uint8).flatten(-2)[..., :in_features].contiguous()  # for kernels
        return cls.from_codes(scheme, weight.dtype, codes, scales.squeeze(-1), zeros.squeeze(-1))

    def unpack(self) -> Tensor:
        """Return the codes, one per element: uint8 [..., out_features, in_features]."""
        return unpack(self.codes, self.scheme.bits)[..., : self.in_features]

    def dequantize(self) -> Tensor:
        """Compute in float32 and round once, to `dtype`."""
        centered = self.unpack().float() - self._for_each_input(self.zeros)
        return (centered * self._for_each_input(self.scales)).to(self.dtype)

    def _for_each_input(self, per_group: Tensor) -> Tensor:
        repeated = per_group.repeat_interleave(self.scheme.group_size, dim=-1)
        return repeated[..., : self.in_features]

    # What models/weights.py needs of a weight that it fills, as a Tensor has it:

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.codes.shape[:-1], self.in_features))

    def new_empty(self, shape: list[int]) -> Tensor:
        """Make a float tensor of the weight's dtype and device."""
        return self.scales.new_empty(shape, dtype=self.dtype)

    def __getitem__(self, index: Any) -> "QuantizedWeight":
        """Index as a tensor. Inputs can only be sliced, in whole groups."""
        others = list(index) if isinstance(index, tuple) else [index]
        columns = others.pop() if len(others) == self.codes.dim() else slice(None)
        start, end, _ = columns.indices(self.in_features)
        bits, size = self.scheme.bits, self.scheme.group_size
        packed = (*others, ..., slice(start * bits // 8, cdiv(end * bits, 8)))
        groups = (*others, ..., slice(start // size, cdiv(end, size)))
        parts = (self.codes[packed], self.scales[groups], self.zeros[groups])
        return type(self)(self.scheme, end - start, self.dtype, *parts)

    def copy_(self, source: "Tensor | QuantizedWeight") -> None:
        """Quantize a float tensor, or copy codes of the same scheme."""
        if isinstance(source, QuantizedWeight):
            assert source.scheme == self.scheme
            for part, given in zip(self.buffers(), source.buffers()):
                part.copy_(given)
            return
        rows_at_once = max(1, _CHUNK // self.in_features)
        for start in range(0, len(source), rows_at_once):
            rows = slice(start, start + rows_at_once)
            part = source[rows].to(self.codes.device)
            self[rows].copy_(QuantizedWeight.quantize(part, self.scheme))


class QuantizableLayer(nn.Module):
    """A layer whose matrices can be quantized, because it multiplies by them with `multiply`."""

    targets: Any  # a method that yields where checkpoint tensors go, as in layers/linear.py

    @torch.no_grad()
    def quantize(self, scheme: Scheme) -> None:
        """Replace the matrices by quantized ones. On `meta` this allocates nothing."""
        for name, parameter in list(self.named_parameters(recurse=False)):
            if parameter.dim() > 1:
                delattr(self, name)
                quantized = QuantizedWeight.empty_like(parameter, scheme)
                if not parameter.is_meta:
                    quantized.copy_(parameter)
                setattr(self, name, quantized)


def multiply(x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Compute x W^T + bias. W can be quantized."""
    if isinstance(weight, QuantizedWeight):
        weight = weight.dequantize()
    return F.linear(x, weight, bias)
