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
    min_seqlen_q: int = 1  # above 1: no decodes

    def pack(self) -> Tensor:
        """All of it as one int32 tensor: six sizes, then the numbers. No slot and no token id needs more than 31 bits."""
        tables = self.block_tables
        parts = (
            self.input_ids, self.positions, self.slot_mapping, self.logits_indices, self.cu_seqlens_q, self.context_lens, tables
        )  # fmt: skip
        sizes = len(self.input_ids), *tables.shape, len(self.logits_indices), self.max_seqlen_q, self.max_seqlen_k
        return torch.cat((tables.new_tensor(sizes), *[part.flatten().int() for part in parts]))

    @classmethod
    def unpack(cls, packed: Tensor) -> "Batch":
        """The batch that `pack` made this of."""
        num_tokens, num_seqs, width, num_logits, max_seqlen_q, max_seqlen_k = packed[:6].tolist()
        lengths = [num_tokens, num_tokens, num_tokens, num_logits, num_seqs + 1, num_seqs, num_seqs * width]
        input_ids, positions, slot_mapping, logits_indices, *others = packed[6:].split(lengths)
        cu_seqlens_q, context_lens, tables = others
        return cls(
            input_ids=input_ids.long(),
            positions=positions.long(),
            slot_mapping=slot_mapping.long(),
            cu_seqlens_q=cu_seqlens_q,
            context_lens=context_lens,
            block_tables=tables.view(num_seqs, width),
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            logits_indices=logits_indices.long(),
        )


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
