"""What crosses from the engine to the model: one step's work as plain numbers, flat, without padding and without phases.

ModelRunner builds it, the model and its attention read it. Three sequences that compute 3, 1 and 2 tokens look like this
(block size 4):

    input_ids      [num_tokens]           | p0 p1 p2 | g7 | p4 p5 |
    positions      [num_tokens]           |  0  1  2 |  7 |  4  5 |
    slot_mapping   [num_tokens]           | where each token's K/V goes: block id * block size + offset; -1: nowhere
    cu_seqlens_q   [num_seqs + 1]         | 0        3    4       6
    context_lens   [num_seqs]             |     3      8      6      tokens that the last query token sees, itself included
    block_tables   [num_seqs, max_blocks] | physical blocks of each context; what lies behind its end is not read
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Sizes(NamedTuple):
    """The numbers that the shapes of a batch's tensors follow from, and the three that are no tensors."""

    num_tokens: int
    num_logits: int
    num_seqs: int
    max_blocks: int
    max_seqlen_q: int
    max_seqlen_k: int
    min_seqlen_q: int

    @property
    def lengths(self) -> list[int]:
        """Of the tensors in a packed batch: four of int64, then three of int32."""
        num_seqs = self.num_seqs
        return [self.num_tokens] * 3 + [self.num_logits, num_seqs + 1, num_seqs, num_seqs * self.max_blocks]

    def find_starts(self) -> list[int]:
        """Where these begin, and the end, in numbers of 8 bytes. Each begins at a multiple of 16 bytes, as a tensor of its own
        would: Triton compiles a kernel once more for pointers that do not."""
        sizes = [-(-length // per_16_bytes) * 2 for length, per_16_bytes in zip(self.lengths, [2] * 4 + [4] * 3)]
        return list(accumulate(sizes, initial=-(-len(self) // 2) * 2))


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
    min_seqlen_q: int = 1  # above 1: no decode among them

    @property
    def sizes(self) -> Sizes:
        num_tokens, num_logits = len(self.input_ids), len(self.logits_indices)
        return Sizes(num_tokens, num_logits, *self.block_tables.shape, self.max_seqlen_q, self.max_seqlen_k, self.min_seqlen_q)

    def pack(self, sizes: Sizes | None = None, pin_memory: bool = False) -> Tensor:
        """All of it as one int64 tensor on the host, where the batch must be: the sizes, then one tensor after the other.

        A decode can be laid out in the `sizes` of a larger one. The surplus rows write nothing (slot -1) and read nothing
        (context 0); the surplus of the block tables, which nobody reads, is left as it comes.
        """
        sizes = sizes or self.sizes
        *_, start_of_tables, end = sizes.find_starts()
        packed = torch.empty(end, dtype=torch.int64, device="cpu", pin_memory=pin_memory)
        numbers = packed.numpy()
        numbers[:start_of_tables] = 0
        numbers[: len(sizes)] = sizes
        places = _divide(numbers, sizes, np.int32)
        longs = self.input_ids, self.positions, self.slot_mapping, self.logits_indices
        for place, tensor in zip(places, (*longs, self.cu_seqlens_q, self.context_lens, self.block_tables)):
            place[tuple(map(slice, tensor.shape))] = tensor.numpy()
        _, _, slot_mapping, _, cu_seqlens_q, _, _ = places
        num_tokens = len(self.input_ids)
        slot_mapping[num_tokens:] = -1
        cu_seqlens_q[len(self.cu_seqlens_q) :] = np.arange(num_tokens + 1, sizes.num_tokens + 1)
        return packed

    @classmethod
    def unpack(cls, packed: Tensor, sizes: Sizes | None = None) -> "Batch":
        """The batch that `pack` made this of: views of it. Without `sizes` the host reads them off, and waits for a GPU."""
        sizes = sizes or Sizes(*packed[: len(Sizes._fields)].tolist())
        *longs, logits_indices, cu_seqlens_q, context_lens, block_tables = _divide(packed, sizes, torch.int32)
        tensors = *longs, cu_seqlens_q, context_lens, block_tables
        return cls(*tensors, sizes.max_seqlen_q, sizes.max_seqlen_k, logits_indices, sizes.min_seqlen_q)

    def to(self, device: torch.device) -> "Batch":
        """From the host to `device`: to a GPU by one copy, for which the host does not wait."""
        if device.type == "cpu":
            return self
        return Batch.unpack(self.pack(pin_memory=True).to(device, non_blocking=True), self.sizes)


def _divide(packed: Any, sizes: Sizes, int32: Any) -> list[Any]:
    """The tensors of a packed batch as views of it; or NumPy's arrays, on which the host works faster."""
    places = list(zip(sizes.find_starts(), sizes.lengths))
    longs = [packed[start : start + length] for start, length in places[:4]]
    halves = packed.view(int32)
    *ints, tables = [halves[2 * start : 2 * start + length] for start, length in places[4:]]
    return [*longs, *ints, tables.reshape(sizes.num_seqs, sizes.max_blocks)]


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A tensor of the same numbers. The host does not wait for a copy to a GPU: it goes from pinned memory."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class SamplingBatch:
    """What the rows of a step's logits ask for. A tensor that no row needs is None, and its work is not done."""

    temperatures: Tensor | None = None  # float32 [num_rows]
    noise_keys: Tensor | None = None  # int32 [num_rows, 2]
    filtered_rows: Tensor | None = None  # int64 [num_filtered], the rows that have one of the following filters
    filtered_temperatures: Tensor | None = None  # these four [num_filtered]
    top_ks: Tensor | None = None
    top_ps: Tensor | None = None
    min_ps: Tensor | None = None
    max_top_k: int = 0  # no filtered row keeps more tokens than this
