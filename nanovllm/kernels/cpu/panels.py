"""Panels, the layout of weights that the GEMM kernels read (panels.h, quantized.h).

loading.h prepacks a weight into panels.

A panel has all inputs of 32 outputs, which are rows of the weight. Drawn with 4 outputs in place of
32, for a weight of 6 rows and 4 inputs, where 5.2 is the weight of row 5 for input 2, and - a zero:

    float32    panel 0 | 0.0 1.0 2.0 3.0 | 0.1 1.1 2.1 3.1 | 0.2 1.2 2.2 3.2 | 0.3 1.3 2.3 3.3 |
               panel 1 | 4.0 5.0  -   -  | 4.1 5.1  -   -  | 4.2 5.2  -   -  | 4.3 5.3  -   -  |
    16 bits    panel 0 | 0.0 0.1  1.0 1.1  2.0 2.1  3.0 3.1 | 0.2 0.3  1.2 1.3  2.2 2.3  3.2 3.3 |
               panel 1 | 4.0 4.1  5.0 5.1   -   -    -   -  | 4.2 4.3  5.2 5.3   -   -    -   -  |

If a weight is gated, its first half is gate_proj and its second half up_proj. A panel has 2 (of 16)
rows of both, because they are multiplied by each other. The rows of the panels are then

               panel 0 | 0 1 3 4 |
               panel 1 | 2 - 5 - |

A panel of a quantized weight has a block for each group of inputs. A line has the codes of two
inputs for all outputs, in the order of 16 bits. 4-bit codes are interleaved, see quantized.h.

               panel 0 | scales zeros line line ... | scales zeros line line ... | ...
                         group 0                      group 1
"""

from torch import Tensor

from nanovllm.kernels.cpu.library import load
from nanovllm.layers.quantized import QuantizedWeight
from nanovllm.utils.helpers import cdiv

_WIDTH = 32  # as in panels.h
_CACHE_LINE = 64  # bytes
_LARGEST_GROUP = 128  # MAX_GROUP_SIZE of quantized.h


def can_prepack(weight: Tensor | QuantizedWeight) -> bool:
    if isinstance(weight, QuantizedWeight):
        group_size = weight.scheme.group_size
        if group_size % _WIDTH != 0 or group_size > _LARGEST_GROUP:
            return False
    has_pairs = weight.dtype.itemsize == 2
    return not has_pairs or weight.shape[-1] % 2 == 0


def prepack(weight: Tensor | QuantizedWeight, num_parts: int) -> Tensor:
    """Return the panels of a weight. It has two parts if it is gated, and otherwise one.

    Panels of floats are [num_panels, depth * 32], where depth is a whole number of cache lines.
    Panels of codes are bytes [num_panels, num_groups, block].
    """
    num_rows, in_features = weight.shape
    num_panels = cdiv(num_rows // num_parts, _WIDTH // num_parts)
    sizes = (num_rows, in_features, num_parts)
    kernels = load(weight.dtype)
    if isinstance(weight, QuantizedWeight):
        scheme = weight.scheme
        parts = [part.contiguous() for part in weight.buffers()]  # codes, scales, zeros
        bytes_per_row = scheme.group_size * scheme.bits // 8
        bytes_per_row += weight.scales.itemsize + weight.zeros.itemsize
        num_groups = weight.scales.shape[1]
        panels = weight.codes.new_empty(num_panels, num_groups, _WIDTH * bytes_per_row)
        kernels.prepack_codes(*parts, panels, *sizes, scheme.bits, scheme.group_size)
        return panels
    line = _CACHE_LINE // weight.itemsize
    depth = cdiv(in_features, line) * line
    panels = weight.new_empty(num_panels, depth * _WIDTH)
    kernels.prepack(weight.detach().contiguous(), panels, *sizes)
    return panels
