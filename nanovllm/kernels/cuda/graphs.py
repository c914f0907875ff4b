"""Decode steps as CUDA graphs: a step's several hundred kernels are launched at once, since a GPU that decodes is faster
than Python that launches.

A graph repeats what was recorded: the same kernels on the same addresses and shapes. So there is one per batch size of
a list, all on the same static memory, into which a batch is copied in one piece, laid out as the next larger graph wants
it: with rows that write and read nothing, and block tables as wide as max_model_len allows.

Recorded is everything up to the last hidden states. The output head and the sampler know what they are asked only then.
"""

from bisect import bisect_left
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.cuda import CUDAGraph

from nanovllm.batch import Batch, find_lengths


class CudaGraphs:
    def __init__(self, decoder: nn.Module, kv_caches: list[Tensor], sizes: list[int], block_table_width: int) -> None:
        """Record `decoder`(batch, kv_caches), which returns hidden states [num_logits, hidden_size], for these batch sizes."""
        device, max_seqlen_k = kv_caches[0].device, block_table_width * kv_caches[0].shape[2]
        self.sizes = sizes
        self.layouts = {size: [size, size, size, block_table_width, 1, max_seqlen_k, 1] for size in sizes}
        # Recorded are rows of zeros: token 0, whose K/V go to slot 0, where nothing is yet, and contexts of no tokens.
        self.packed = torch.zeros(sum(find_lengths(self.layouts[sizes[-1]])), dtype=torch.int32, device=device)
        self.recorded: dict[int, tuple[CUDAGraph, Tensor]] = {}
        graph: CUDAGraph | None = None
        for size in reversed(sizes):  # the largest first: the smaller ones find all their memory in its pool
            graph, hidden = record(partial(decoder, Batch.unpack(self.packed, self.layouts[size]), kv_caches), device, graph)
            self.recorded[size] = graph, hidden

    def run(self, batch: Batch) -> Tensor:
        """The hidden states [num_logits, hidden_size] of a batch on the host with one query token per sequence. Valid until
        the next."""
        size = self.sizes[bisect_left(self.sizes, len(batch.context_lens))]
        packed = pack_padded(batch, self.layouts[size], pin_memory=self.packed.is_cuda)
        self.packed[: len(packed)].copy_(packed, non_blocking=True)
        graph, hidden = self.recorded[size]
        graph.replay()
        return hidden[: len(batch.logits_indices)]


def pack_padded(batch: Batch, sizes: list[int], pin_memory: bool = False) -> Tensor:
    """A decode, packed on the host in the layout of a larger one of these `sizes`.

    The surplus rows write nothing (slot -1) and read nothing (context 0); the surplus of the block tables, which nobody reads,
    is left as it comes.
    """
    packed = torch.empty(sum(find_lengths(sizes)), dtype=torch.int32, device="cpu", pin_memory=pin_memory)
    padded = Batch.unpack(packed, sizes)
    for name in ("input_ids", "positions", "slot_mapping", "context_lens", "logits_indices"):
        own, place = getattr(batch, name).numpy(), getattr(padded, name).numpy()
        place[: len(own)], place[len(own) :] = own, -1 if name == "slot_mapping" else 0
    padded.cu_seqlens_q.numpy()[:] = np.arange(sizes[2] + 1)
    num_seqs, width = batch.block_tables.shape
    padded.block_tables.numpy()[:num_seqs, :width] = batch.block_tables.numpy()
    return packed


def record(step: Callable[[], Tensor], device: torch.device, last: CUDAGraph | None) -> tuple[CUDAGraph, Tensor]:
    """A graph that repeats `step`, and the tensor in which it leaves the result. It has the memory that `last`, the one recorded
    before it, and those before that have left."""
    step()  # what is compiled or set up at a first call cannot be while recording
    graph = CUDAGraph()
    with torch.cuda.graph(graph, pool=None if last is None else last.pool(), stream=find_stream(device)):
        output = step()
    return graph, output


@cache
def find_stream(device: torch.device) -> torch.cuda.Stream:
    """The GPU's stream for recording. One, since cuBLAS keeps memory for each; torch's own is on the GPU that was first."""
    return torch.cuda.Stream(device)


def batch_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, and on in steps of 8, of a sixteenth where that is more; the last one is max_num_seqs."""
    sizes = [1]
    while (size := sizes[-1]) < max_num_seqs:
        sizes.append(min(max_num_seqs, 2 * size if size < 8 else size + max(8, size // 16)))
    return sizes
