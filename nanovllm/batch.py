"""The message from the engine to the model: one step as plain tensors.

ModelRunner builds it. The model and its attention read it. Three sequences that compute 3, 1 and 2
tokens look like this (block size 4):

    input_ids      [num_tokens]           | p0 p1 p2 | g7 | p4 p5 |
    positions      [num_tokens]           |  0  1  2 |  7 |  4  5 |
    slot_mapping   [num_tokens]           | block id * block size + offset of each token's K/V
    cu_seqlens_q   [num_seqs + 1]         | 0        3    4       6
    context_lens   [num_seqs]             |     3      8      6
    block_tables   [num_seqs, max_blocks] | physical blocks of each context
    logits_indices [num_logits]           |        2   3       5

`context_lens` counts the tokens that the last query token attends to, itself included. A slot of -1
means that K/V are not stored. Entries of `block_tables` past the end of a context are not read.
`logits_indices` selects the tokens whose logits are wanted. All tensors are int32, so that a batch
can be sent as one concatenated tensor (packing.py).
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    cu_seqlens_q: Tensor
    context_lens: Tensor
    block_tables: Tensor
    max_seqlen_q: int  # 1 if every sequence has one query token
    max_seqlen_k: int
    logits_indices: Tensor
    min_seqlen_q: int = 1  # fewest query tokens of a sequence


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling parameters of each row of logits. A tensor that no row needs is None."""

    temperatures: Tensor | None = None  # float32 [num_rows]
    noise_keys: Tensor | None = None  # int32 [num_rows, 2]
    filtered_rows: Tensor | None = None  # int64 [num_filtered], rows with top-k, top-p or min-p
    filtered_temperatures: Tensor | None = None  # float32 [num_filtered]
    top_ks: Tensor | None = None  # int64 [num_filtered]
    top_ps: Tensor | None = None  # float32 [num_filtered]
    min_ps: Tensor | None = None  # float32 [num_filtered]
    max_top_k: int = 0  # the largest of top_ks
