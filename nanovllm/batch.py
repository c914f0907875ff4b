"""What crosses from the engine to the model: one step's work as plain numbers, flat, without padding and without phases.

ModelRunner builds it, the model and its attention read it. Three sequences that compute 3, 1 and 2 tokens look like this
(block size 4):

    input_ids      [num_tokens]           | p0 p1 p2 | g7 | p4 p5 |
    positions      [num_tokens]           |  0  1  2 |  7 |  4  5 |
    slot_mapping   [num_tokens]           | where each token's K/V goes: block id * block size + offset; -1: nowhere
    cu_seqlens_q   [num_seqs + 1]         | 0        3    4       6
    context_lens   [num_seqs]             |     3      8      6      tokens that the last query token sees, itself included
    block_tables   [num_seqs, max_blocks] | physical blocks of each context; what lies behind its end is not read
    logits_indices [num_logits]           |        2   3       5     the tokens whose logits are wanted

All tensors are int32, so that the message to another rank, or to a GPU, is their concatenation.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    cu_seqlens_q: Tensor
    context_lens: Tensor
    block_tables: Tensor
    max_seqlen_q: int  # 1: pure decode
    max_seqlen_k: int
    logits_indices: Tensor
    min_seqlen_q: int = 1  # above 1: no decode among them

    @property
    def sizes(self) -> list[int]:
        """The numbers that `unpack` needs: of tokens, logits, sequences and blocks in a table, then the lengths above."""
        numbers = [len(self.input_ids), len(self.logits_indices), *self.block_tables.shape]
        return [*numbers, self.max_seqlen_q, self.max_seqlen_k, self.min_seqlen_q]

    def pack(self, pin_memory: bool = False) -> Tensor:
        """All of it as one int32 tensor on the host, where the batch must be: the sizes, then one tensor after the other."""
        tokens = self.input_ids, self.positions, self.slot_mapping, self.logits_indices
        seqs = self.cu_seqlens_q, self.context_lens, self.block_tables.flatten()
        tensors = [torch.tensor(self.sizes, dtype=torch.int32, device="cpu"), *tokens, *seqs]
        packed = torch.empty(sum(map(len, tensors)), dtype=torch.int32, device="cpu", pin_memory=pin_memory)
        return torch.cat(tensors, out=packed)

    @classmethod
    def unpack(cls, packed: Tensor, sizes: list[int] | None = None) -> "Batch":
        """The batch that `pack` made this of: views of it. Without `sizes` the host reads them off, and waits for a GPU."""
        sizes = sizes or packed[:7].tolist()
        lengths = find_lengths(sizes)
        _, input_ids, positions, slots, logits_indices, bounds, lens, tables = packed[: sum(lengths)].split(lengths)
        _, _, num_seqs, width, max_q, max_k, min_q = sizes
        return cls(input_ids, positions, slots, bounds, lens, tables.view(num_seqs, width), max_q, max_k, logits_indices, min_q)

    def to(self, device: torch.device) -> "Batch":
        """From the host to `device`: to a GPU by one copy, for which the host does not wait."""
        if device.type == "cpu":
            return self
        return Batch.unpack(self.pack(pin_memory=True).to(device, non_blocking=True), self.sizes)


def find_lengths(sizes: list[int]) -> list[int]:
    """Of the parts of a packed batch: the sizes, then the tensors."""
    num_tokens, num_logits, num_seqs, width = sizes[:4]
    return [len(sizes), num_tokens, num_tokens, num_tokens, num_logits, num_seqs + 1, num_seqs, num_seqs * width]


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
