"""Prepacks weights into panels, the layout that the GEMM kernels read (panels.h, quantized.h).

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
inputs for all outputs, in the order of 16 bits. 4-bit codes are interleaved, see `_interleave`.

               panel 0 | scales zeros line line ... | scales zeros line line ... | ...
                         group 0                      group 1
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.layers.quantized import QuantizedWeight
from nanovllm.utils.arithmetic import cdiv

_WIDTH = 32  # as in panels.h
_CACHE_LINE = 64  # bytes
_LARGEST_GROUP = 128  # MAX_GROUP_SIZE of quantized.h
_CHUNK = 1 << 18  # bytes of codes that are prepacked at once, so that temporary copies stay cached


def can_prepack(weight: Tensor | QuantizedWeight) -> bool:
    if isinstance(weight, QuantizedWeight):
        group_size = weight.scheme.group_size
        if group_size % _WIDTH != 0 or group_size > _LARGEST_GROUP:
            return False
    return weight.shape[-1] % _inputs_per_pair(weight.dtype) == 0


def prepack(weight: Tensor | QuantizedWeight, num_parts: int) -> Tensor:
    """Return the panels of a weight. It has two parts if it is gated, and otherwise one.

    Panels of floats are [num_panels, depth / pair, 32, pair]. Panels of codes are bytes
    [num_panels, num_groups, block].
    """
    num_panels = cdiv(weight.shape[0] // num_parts, _WIDTH // num_parts)
    if isinstance(weight, QuantizedWeight):
        return _prepack_codes(weight, num_parts, num_panels)
    padding = -weight.shape[1] % (_CACHE_LINE // weight.itemsize)
    rows = _divide(_pad(weight.detach(), padding), num_parts, 0, num_panels)
    panels = rows.unflatten(2, (-1, _inputs_per_pair(weight.dtype)))
    return panels.transpose(1, 2).contiguous()


def _prepack_codes(weight: QuantizedWeight, num_parts: int, num_panels: int) -> Tensor:
    bits = weight.scheme.bits
    num_groups = weight.scales.shape[1]
    bytes_per_group = weight.scheme.group_size * bits // 8  # bytes of codes in a row
    bytes_per_row = bytes_per_group + weight.scales.itemsize + weight.zeros.itemsize
    panels = weight.codes.new_empty(num_panels, num_groups, _WIDTH * bytes_per_row)
    padding = num_groups * bytes_per_group - weight.codes.shape[1]
    at_once = max(1, _CHUNK // (_WIDTH * num_groups * bytes_per_group))
    for first in range(0, num_panels, at_once):
        end = min(first + at_once, num_panels)
        scales = _divide(weight.scales, num_parts, first, end).transpose(1, 2)
        zeros = _divide(weight.zeros, num_parts, first, end).transpose(1, 2)
        codes = _pad(_divide(weight.codes, num_parts, first, end), padding)
        if bits == 8:
            zeros = zeros - 128
            words = (codes ^ 128).view(torch.int16)
        else:
            words = _interleave(codes)
        lines = words.unflatten(2, (num_groups, -1)).permute(0, 2, 3, 1).flatten(2)
        parts = [part.contiguous().view(torch.uint8) for part in (scales, zeros, lines)]
        torch.cat(parts, dim=2, out=panels[first:end])
    return panels


def _divide(rows: Tensor, num_parts: int, first: int, end: int) -> Tensor:
    """Return the rows of panels `first` to `end`, padded with zeros: [num_panels, 32, n]."""
    width = _WIDTH // num_parts  # rows of each part in a panel
    parts = rows.unflatten(0, (num_parts, -1))[:, first * width : end * width]
    parts = _pad(parts, 0, -parts.shape[1] % width)
    return parts.unflatten(1, (-1, width)).transpose(0, 1).flatten(1, 2)


def _pad(x: Tensor, columns: int, rows: int = 0) -> Tensor:
    """Append zeros. F.pad copies the tensor also if there is nothing to append."""
    return F.pad(x, (0, columns, 0, rows)) if columns or rows else x


def _interleave(codes: Tensor) -> Tensor:
    """Interleave 4-bit codes [num_panels, 32, n], where a byte has two inputs of an output.

    Return int32 [num_panels, 8, n]. A number has the inputs of four outputs, from its lowest bits:

        outputs       k k   k+8 k+8   k+16 k+16   k+24 k+24      before: as a byte of each
        inputs        0 1    0   1      0    1      0    1
        outputs       k k+8 k+16 k+24   k k+8 k+16 k+24          after: a shift and a mask select
        inputs        0  0    0    0    1  1    1    1           input 0 or 1 of all outputs
    """
    outputs = codes.unflatten(1, (4, 8)).permute(0, 2, 3, 1).contiguous()
    numbers = outputs.view(torch.int32).squeeze(-1)
    # Swap nibbles 1 with 2 and 5 with 6, then bytes 1 and 2.
    for shift, mask in ((4, 0x00F000F0), (8, 0x0000FF00)):
        swapped = (numbers ^ numbers >> shift) & mask
        numbers = numbers ^ swapped ^ swapped << shift
    return numbers


def _inputs_per_pair(dtype: torch.dtype) -> int:
    """PAIR of panels.h: how many inputs of one output are adjacent in a panel."""
    return 2 if dtype.itemsize == 2 else 1
