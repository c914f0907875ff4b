"""One step's work, flat: no padding, no phases. Built by ModelRunner, read by the model and the attention backends.

Three sequences that compute 3, 1 and 2 tokens look like this (block size 4):

    input_ids      [num_tokens]           | p0 p1 p2 | g7 | p4 p5 |
    positions      [num_tokens]           |  0  1  2 |  7 |  4  5 |
    slot_mapping   [num_tokens]           | where each token's K/V goes: block id * block size + offset; -1: nowhere
    cu_seqlens_q   [num_seqs + 1]         | 0        3    4       6
    context_lens   [num_seqs]             |     3      8      6      tokens that the last query token sees, itself included
    block_tables   [num_seqs, max_blocks] | physical blocks of each context; what lies behind its end is not read
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    input_ids: Tensor  # int64
    positions: Tensor  # int64
    slot_mapping: Tensor  # int64
    cu_seqlens_q: Tensor  # int32
    context_lens: Tensor  # int32
    block_tables: Tensor  # int32
    max_seqlen_q: int  # 1: pure decode
    max_seqlen_k: int
    logits_indices: Tensor  # int64 [num_logits], the rows of input_ids whose next token is wanted


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A tensor of the same numbers. The host does not wait for a copy to a GPU: it goes from pinned memory."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
