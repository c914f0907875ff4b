"""Decode steps as CUDA graphs: a step's several hundred kernels are launched at once, since a GPU that decodes is faster
than Python that launches.

A graph repeats what was recorded: the same kernels on the same addresses and shapes. So there is one per batch size of
a list, all on the same static batch, of which it takes the first rows; a batch takes the next larger graph. What makes the
rows that are left over harmless: slot -1 (nothing is written) and context 0 (nothing is read); nobody looks at their
outputs. The static batch has room for every block table that max_model_len allows.

Recorded is everything up to the last hidden states. The output head and the sampler know what they are asked only then.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from nanovllm.batch import Batch

Replay = Callable[[], None]


class CudaGraphs:
    def __init__(self, decoder: nn.Module, kv_caches: list[Tensor], max_num_seqs: int, block_table_width: int) -> None:
        """Record `decoder`(batch, kv_caches), which returns hidden states [num_seqs, hidden_size], for all batch sizes."""
        self.sizes = batch_sizes(max_num_seqs)
        largest, device, block_size = self.sizes[-1], kv_caches[0].device, kv_caches[0].shape[2]
        rows = torch.arange(largest + 1, device=device)
        zeros = partial(torch.zeros, dtype=torch.int64, device=device)
        self.batch = Batch(
            input_ids=zeros(largest),
            positions=zeros(largest),
            slot_mapping=zeros(largest) - 1,
            cu_seqlens_q=rows.int(),
            context_lens=zeros(largest, dtype=torch.int32),
            block_tables=zeros(largest, block_table_width, dtype=torch.int32),
            max_seqlen_q=1,
            max_seqlen_k=block_table_width * block_size,
            logits_indices=rows[:-1],
        )
        self.recorded: dict[int, tuple[Replay, Tensor]] = {}
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.sizes):  # the largest first: the smaller ones find all their memory in its pool
            first = {name: value[:size] for name, value in vars(self.batch).items() if isinstance(value, Tensor)}
            first["cu_seqlens_q"] = self.batch.cu_seqlens_q[: size + 1]
            self.recorded[size] = record(partial(decoder, replace(self.batch, **first), kv_caches), pool)

    def run(self, batch: Batch) -> Tensor:
        """The hidden states of a batch with one query token per sequence, [num_logits, hidden_size]. Valid until the next."""
        num_seqs, width = batch.block_tables.shape
        size = self.sizes[bisect_left(self.sizes, num_seqs)]
        for name in ("input_ids", "positions", "slot_mapping", "context_lens"):
            getattr(self.batch, name)[:num_seqs].copy_(getattr(batch, name))
        self.batch.block_tables[:num_seqs, :width].copy_(batch.block_tables)
        self.batch.slot_mapping[num_seqs:size].fill_(-1)
        self.batch.context_lens[num_seqs:size].fill_(0)
        replay, hidden = self.recorded[size]
        replay()
        return hidden[batch.logits_indices]


def record(function: Callable[[], Tensor], pool: tuple[int, int]) -> tuple[Replay, Tensor]:
    """A call that repeats `function`, and the tensor in which it leaves its result."""
    function()  # what is compiled or set up at a first call cannot be while recording
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        output = function()
    return graph.replay, output


def batch_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, and on in steps of 8, of a sixteenth where that is more; the last one is max_num_seqs."""
    sizes = [1]
    while sizes[-1] < max_num_seqs:
        size = sizes[-1]
        sizes.append(min(max_num_seqs, 2 * size if size < 8 else size + max(8, size // 16)))
    return sizes
