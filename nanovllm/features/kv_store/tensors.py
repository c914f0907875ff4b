"""The tensors of a stored entry, and their copies between the KV cache and the host.

There are three kinds of entries, each for some layers of a model:

    kv       a block of the first pool: K/V of layers that attend to all tokens
    window   a block of the second pool: K/V of layers with a window
    state    a state slot: the recurrent states after a block

An entry is one flat tensor on the host, the layers one after the other.
"""

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.worker.worker import Worker


class Entry(NamedTuple):
    """K/V of a block, or states after it."""

    token_ids: list[int]  # of the block
    content: Tensor  # [num_elements], on the host
    copied: torch.cuda.Event | None = None  # when the content has arrived from a GPU

    def is_finite(self) -> bool:
        """Wait for the content. Return False if it has NaN or infinity, as after an overflow."""
        if self.copied is not None:
            self.copied.synchronize()
        return bool(self.content.sum(dtype=torch.float32).isfinite())


class EntryKind:
    """The layers whose K/V or states an entry has. There can be none."""

    def __init__(self, name: str, worker: Worker, layers: list[int], dtype: torch.dtype) -> None:
        self.name = name
        self.worker = weakref.proxy(worker)  # has other tensors after it has slept
        self.layers = layers
        self.dtype = dtype
        self.sizes = [part.numel() for part in self._list_parts(0)]
        self.num_bytes = sum(self.sizes) * dtype.itemsize

    def _list_parts(self, index: int) -> list[Tensor]:
        """List views of block or slot `index` in all layers."""
        caches = [self.worker.kv_caches[layer] for layer in self.layers]
        # K/V are [2, num_blocks, ...], and states [num_slots, size].
        return [cache[index] if cache.dim() == 2 else cache[:, index] for cache in caches]

    def key(self, block_hash: int) -> str:
        return f"{block_hash:032x}.{self.name}"

    @torch.inference_mode()
    def read(self, index: int, token_ids: list[int]) -> Entry:
        """Copy block or slot `index` to the host. On a GPU, the copy follows what writes it."""
        on_gpu = self.worker.device.type == "cuda"
        content = torch.empty(sum(self.sizes), dtype=self.dtype, device="cpu", pin_memory=on_gpu)
        for part, piece in self._match(index, content):
            piece.copy_(part, non_blocking=True)
        copied = None
        if on_gpu:
            copied = torch.cuda.Event()
            copied.record()
        return Entry(token_ids, content, copied)

    @torch.inference_mode()
    def write(self, index: int, content: Tensor) -> None:
        """Copy an entry to a block or slot. On a GPU, later steps follow the copy."""
        for part, piece in self._match(index, content):
            part.copy_(piece, non_blocking=True)

    def _match(self, index: int, content: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Pair the parts of a block or slot with those of an entry."""
        pairs = zip(self._list_parts(index), content.split(self.sizes))
        return [(part, piece.view(part.shape)) for part, piece in pairs]
