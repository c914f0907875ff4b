"""Paged attention in plain torch: what every other backend must compute, and the one that runs on any device.

A backend is a module with the names of `Backend`, chosen once, when the engine starts; this one is the specification.
One sequence after the other: gather its blocks, then scaled_dot_product_attention. A layer's `kv_cache` is
[2, num_blocks, block_size, num_kv_heads, head_dim]: keys, then values (PagedAttention, Kwon et al. 2023).
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.batch import Batch

NAME = "torch"
PREFERRED_BLOCK_SIZE = 16
SUPPORTS_CUDA_GRAPHS = False

_MASK_SIZE = 1 << 23  # numbers in a mask, of which SDPA makes a copy in the query's dtype: longer queries are halved


class Backend(Protocol):
    """How K/V are stored and attended to. A module with these names is one."""

    NAME: str  # in backends.py, and as the option attention_backend
    PREFERRED_BLOCK_SIZE: int  # tokens in a block, where the user does not say
    SUPPORTS_CUDA_GRAPHS: bool  # its launches depend on shapes alone

    def reason_unavailable(self, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
        """Why it cannot run here; None: it can."""

    def store_kvcache(self, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Write the new tokens' K/V into their slots."""

    def attend(self, query: Tensor, kv_cache: Tensor, batch: Batch, scale: float) -> Tensor:
        """Read each context through its block table."""


def reason_unavailable(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    return None


def store_kvcache(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write `key` and `value` [num_tokens, num_kv_heads, head_dim] to their slots; slot -1 is padding, not written."""
    slot_mapping = slot_mapping.long()  # as index_copy_ wants it
    written = slot_mapping >= 0
    if not written.all():
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    slots = kv_cache.flatten(1, 2)  # [2, num_blocks * block_size, num_kv_heads, head_dim]
    slots[0].index_copy_(0, slot_mapping, key)
    slots[1].index_copy_(0, slot_mapping, value)


def attend(query: Tensor, kv_cache: Tensor, batch: Batch, scale: float) -> Tensor:
    """Causal attention of `query` [num_tokens, num_heads, head_dim] to each sequence's context; same shape out."""
    output = torch.empty_like(query)
    bounds = batch.cu_seqlens_q.tolist()
    for start, end, context_len, block_table in zip(bounds, bounds[1:], batch.context_lens.tolist(), batch.block_tables):
        output[start:end] = attend_one(query[start:end], kv_cache, context_len, block_table, scale)
    return output


def attend_one(query: Tensor, kv_cache: Tensor, context_len: int, block_table: Tensor, scale: float) -> Tensor:
    """The same for the `query` [query_len, num_heads, head_dim] of one sequence, the last tokens of its context."""
    query_len, block_size = len(query), kv_cache.shape[2]
    if 1 < query_len < context_len and query_len * context_len > _MASK_SIZE:
        half = query_len // 2
        first = attend_one(query[:half], kv_cache, context_len - query_len + half, block_table, scale)
        return torch.cat((first, attend_one(query[half:], kv_cache, context_len, block_table, scale)))
    block_ids = block_table[: -(-context_len // block_size)]
    key, value = (cache.index_select(0, block_ids).flatten(0, 1)[:context_len] for cache in kv_cache)
    key, value = key.transpose(0, 1)[None], value.transpose(0, 1)[None]  # [1, num_kv_heads, context_len, head_dim]
    rows = query.transpose(0, 1)[None]  # [1, num_heads, query_len, head_dim]; heads share K/V (GQA, Ainslie et al. 2023)
    mask, is_causal = None, query_len == context_len
    if 1 < query_len < context_len:  # SDPA's is_causal aligns the first query with the first key, but these are the last tokens
        mask = query.new_ones(query_len, context_len, dtype=torch.bool).tril(context_len - query_len)
    output = F.scaled_dot_product_attention(rows, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=True)
    return output[0].transpose(0, 1)
