"""The message from the engine to the model: one step as plain arrays.

ModelRunner builds it from sequences, and the worker makes dummies for profile and warm-up runs,
both with make_batch. The model and its attention read it. On the host its arrays are numpy's,
because a step makes and packs a dozen small ones, for which torch takes longer. The model receives
them as tensors.

Three sequences that compute 3, 1 and 2 tokens look like this (block size 4):

    input_ids      | p0 p1 p2 | g7 | p4 p5 |
    positions      |  0  1  2 |  7 |  4  5 |
    slot_mapping   | 20 21 22 | 27 | 36 37 |
    cu_seqlens_q   | 0          3    4       6
    context_lens   |    3     |  8 |   6   |
    block_tables   |    5     | 2 6|  1 9  |
    logits_indices |        2    3       5
    read_slots     |    2     |  3 |   4   |
    write_slots    |    2     |  3 |   4   |
    long_queries   | 0, 2

`slot_mapping` has the slot of each token's K/V: block id * block size + offset. A slot of -1 means
that K/V are not stored. `context_lens` counts the tokens that the last query token attends to,
itself included. `block_tables` has the physical blocks of each context, and entries past its end
are not read. `logits_indices` selects the tokens whose logits are wanted. Layers with a recurrent
state read that of a sequence from state slot `read_slots` and write it to state slot `write_slots`.
State slot 0 is for padding (worker/state_slots.py). Layers with a window have `window_slots` and
`window_tables` in place of `slot_mapping` and `block_tables` if there is a second pool of blocks
(features/windows.py). Otherwise both are empty. `long_queries` are the sequences with more than one
query token, because kernels compute the others differently. All arrays of a Batch are int32, so
that it can be sent as one concatenated tensor.

A negative id in `input_ids` is a pending token: ~id is its row in the step before, whose tokens the
host has not read yet (engine/sequence.py). The worker fills it in on the device.

batch/packing.py iterates over the fields to send a batch to other ranks and to copy it into CUDA
graphs. A new field therefore needs one line below and one in make_batch. (A number, or an array of
a new shape, also needs an entry in find_sizes of graphs.py.) An array is declared with its shape.
`padding` is what a graph reads past the end of an array, and 0 if not given
(kernels/cuda/graphs_kernels.py). Numbers are fixed when a graph is captured, see graphs.py.

Noise and Filters say how to sample. They go to the sampler only, on rank 0.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Annotated, Any, Generic, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Array = TypeVar("Array", bound=Any)  # np.ndarray on the host, or Tensor


@dataclass(frozen=True)
class Batch(Generic[Array]):
    input_ids: Annotated[Array, "num_tokens"]
    positions: Annotated[Array, "num_tokens"]
    slot_mapping: Annotated[Array, "num_tokens", {"padding": -1}]
    cu_seqlens_q: Annotated[Array, "num_seqs + 1", {"padding": "last entry"}]
    context_lens: Annotated[Array, "num_seqs"]
    block_tables: Annotated[Array, "num_seqs, max_blocks"]
    logits_indices: Annotated[Array, "num_logits"]
    read_slots: Annotated[Array, "num_seqs"]
    write_slots: Annotated[Array, "num_seqs"]
    window_slots: Annotated[Array, "num_window_tokens", {"padding": -1}]
    window_tables: Annotated[Array, "num_seqs, max_window_blocks"]
    long_queries: Annotated[Array, "num_long_queries", {"padding": "next sequences"}]
    max_seqlen_q: int  # 1 if every sequence has one query token
    max_seqlen_k: int

    @cached_property
    def cu_seqlens_k(self) -> Tensor:
        """Where each context begins if all are concatenated, and their length [num_seqs + 1].

        Computed once for all layers.
        """
        return F.pad(self.context_lens.cumsum(0, dtype=torch.int32), (1, 0))

    @cached_property
    def for_windows(self) -> "Batch":
        """The batch for layers with a window. Made once for all of them."""
        if self.window_slots.numel() == 0:
            return self
        return replace(self, slot_mapping=self.window_slots, block_tables=self.window_tables)


def make_batch(
    query_lens: list[int],
    context_lens: list[int],
    block_tables: np.ndarray,
    block_size: int,
    input_ids: list[int] | None = None,
    num_logits: list[int] | None = None,
    state_slots: np.ndarray | None = None,
) -> Batch[np.ndarray]:
    """Make the arrays of a step, in one pool of blocks.

    By default token ids and state slots are 0, and the last token of each sequence needs logits.
    """
    lens = np.array(query_lens, np.int32)
    contexts = np.array(context_lens, np.int32)
    cu_seqlens_q = np.array([0, *accumulate(query_lens)], np.int32)
    # For each token: its sequence, 0 0 0 1 2 2 in the picture, and its offset in the query.
    seq_index = np.repeat(np.arange(len(lens)), lens)
    query_offsets = np.arange(len(seq_index), dtype=np.int32) - cu_seqlens_q[seq_index]
    positions = (contexts - lens)[seq_index] + query_offsets
    blocks, offsets = np.divmod(positions, block_size)
    has_logits = query_offsets >= (lens - (1 if num_logits is None else num_logits))[seq_index]
    ids = np.zeros_like(positions) if input_ids is None else np.array(input_ids, np.int32)
    slots = np.zeros_like(lens) if state_slots is None else state_slots
    return Batch(
        input_ids=ids,
        positions=positions,
        slot_mapping=block_tables[seq_index, blocks] * block_size + offsets,
        cu_seqlens_q=cu_seqlens_q,
        context_lens=contexts,
        block_tables=block_tables,
        logits_indices=np.flatnonzero(has_logits).astype(np.int32),
        read_slots=slots,
        write_slots=slots,
        # A feature fills both if there is a second pool of blocks.
        window_slots=positions[:0],
        window_tables=block_tables[:, :0],
        long_queries=np.flatnonzero(lens > 1).astype(np.int32),
        max_seqlen_q=max(query_lens),
        max_seqlen_k=int(contexts.max()),
    )


@dataclass(frozen=True)
class Noise:
    """Makes samples random, see layers/noise.py."""

    temperatures: Tensor  # float32 [num_rows], 0 for greedy rows
    keys: Tensor  # int32 [num_rows, 2]


@dataclass(frozen=True)
class Filters:
    """The rows of logits with top-k, top-p or min-p."""

    rows: Tensor  # int64 [num_filtered], their indices
    temperatures: Tensor  # float32 [num_filtered]
    top_ks: Tensor  # int64 [num_filtered]
    top_ps: Tensor  # float32 [num_filtered]
    min_ps: Tensor  # float32 [num_filtered]
    max_top_k: int  # the largest of top_ks


@dataclass(frozen=True)
class SamplingBatch:
    """How to sample from the rows of logits of a step. What no row needs is None."""

    noise: Noise | None = None
    filters: Filters | None = None
