"""Paged attention in plain torch. It specifies what every other backend must compute.

A backend is a module that is chosen when the engine starts. It has the constants and the functions
that this module begins with: reason_unavailable, make_cache, store_kvcache and attend. (For one
more constant, of flash-attn only, see kernels/cuda/graphs.py.) An AttentionShape tells it what
distinguishes the attention of one layer from that of another.

This backend runs on any device: it gathers the blocks of one sequence after another, and calls
scaled_dot_product_attention. Its `kv_cache` of a layer is [2, num_blocks, block_size, num_kv_heads,
head_dim], keys and then values (PagedAttention, Kwon et al. 2023). Only a backend knows the layout
of its caches.
"""

from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.batch.batch import Batch
from nanovllm.utils.helpers import cdiv

Backend = ModuleType
NAME = "torch"  # in kernels/select.py, and as the option attention_backend
PREFERRED_BLOCK_SIZE = 16  # tokens in a block if the user does not choose
SUPPORTS_CUDA_GRAPHS = False  # True if kernel launches depend on shapes only
# The limit on draft tokens per sequence and step. Longer drafts are rarely accepted. If a backend's
# verification is bitwise identical to decodes up to some length, this is that length.
MAX_DRAFT_LEN = 7
# The names of the fields of AttentionShape with which `attend` computes. A layer where another one
# differs from its default cannot use the backend. None: all, because this module specifies them.
KNOWN_FIELDS: set[str] | None = None

TILE = 256  # queries that are computed together, which bounds the size of a mask
ZEROED_TOKENS = 8192  # the default of max_num_batched_tokens


@dataclass(frozen=True)
class AttentionShape:
    """The attention of one layer, on all ranks together."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # factor on scores
    window: int | None = None  # tokens that a query attends to, itself included. None: all
    softcap: float | None = None  # scores become softcap * tanh(score / softcap) (Gemma 2)
    has_sinks: bool = False  # the softmax of a head has one more score, without a value (gpt-oss)


def find_first_visible(position: int, window: int | None) -> int:
    """Return the first position that a query at `position` attends to."""
    return 0 if window is None else max(0, position + 1 - window)


def reason_unavailable(
    device: torch.device, dtype: torch.dtype, shape: AttentionShape, block_size: int
) -> str | None:
    """Return why the backend cannot compute such layers here, or None if it can."""
    return None


def make_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Make the KV cache of one layer. Block 0 starts as zeros, because warm-up steps read it.

    The bytes of a block follow from this tensor. The worker makes it on the meta device to count
    them.
    """
    shape = (2, num_blocks, block_size, num_kv_heads, head_dim)
    kv_cache = torch.empty(shape, dtype=dtype, device=device)
    # More than block 0 is zeroed because Linux allocates pages at the first write, and the first
    # large step should not wait for that.
    kv_cache[:, : cdiv(ZEROED_TOKENS, block_size)].zero_()
    return kv_cache


def store_kvcache(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write the K/V of the new tokens into their slots. Slot -1 is not written.

    `key` and `value` are [num_tokens, num_kv_heads, head_dim].
    """
    slot_mapping = slot_mapping.long()  # index_copy_ needs int64
    written = slot_mapping >= 0
    if not written.all():
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    slots = kv_cache.flatten(1, 2)  # [2, num_blocks * block_size, num_kv_heads, head_dim]
    slots[0].index_copy_(0, slot_mapping, key)
    slots[1].index_copy_(0, slot_mapping, value)


def attend(
    query: Tensor,
    kv_cache: Tensor,
    batch: Batch,
    shape: AttentionShape,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of `query` [num_tokens, num_heads, head_dim] to each sequence's context.

    Each context is read through its block table, from the window of the first query on. What lies
    before it may belong to other sequences. It must not be gathered and masked, because a masked
    NaN is still NaN. `sinks` [num_heads] are given if the shape has them.
    """
    output = torch.empty_like(query)
    block_size = kv_cache.shape[2]
    bounds = batch.cu_seqlens_q.tolist()
    context_lens = batch.context_lens.tolist()
    for i, context_len in enumerate(context_lens):
        own = slice(bounds[i], bounds[i + 1])  # the tokens of the sequence
        queries = query[own]
        results = output[own]
        position = context_len - len(queries)  # the queries are the last tokens of their context
        first_block = find_first_visible(position, shape.window) // block_size
        block_ids = batch.block_tables[i, first_block : cdiv(context_len, block_size)]
        # [num_gathered, num_kv_heads, head_dim], then [1, num_kv_heads, num_gathered, head_dim]
        keys, values = kv_cache.index_select(1, block_ids).flatten(1, 2)
        keys = keys.transpose(0, 1)[None]
        values = values.transpose(0, 1)[None]
        for tile, result in zip(queries.split(TILE), results.split(TILE)):
            start = find_first_visible(position, shape.window)  # for the tile's first query
            end = position + len(tile)
            visible = slice(start - first_block * block_size, end - first_block * block_size)
            mask = torch.ones(len(tile), end - start, dtype=torch.bool, device=query.device)
            mask = mask.tril(position - start)  # the last query attends to the last key
            if shape.window is not None:
                mask = mask.triu(position - start - shape.window + 1)
            attended = attend_masked(
                tile.transpose(0, 1)[None],  # [1, num_heads, tokens of the tile, head_dim]
                keys[:, :, visible],
                values[:, :, visible],
                mask,
                shape,
                sinks,
            )
            result.copy_(attended[0].transpose(0, 1))
            position = end
    return output


def attend_masked(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    shape: AttentionShape,
    sinks: Tensor | None,
) -> Tensor:
    """Attend where `mask` is true. Several query heads share a K/V head (Ainslie et al. 2023)."""
    if shape.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=shape.scale, enable_gqa=True
        )
    num_sharing = query.shape[1] // keys.shape[1]
    keys = keys.repeat_interleave(num_sharing, dim=1)
    values = values.repeat_interleave(num_sharing, dim=1)
    scores = (query @ keys.mT).float() * shape.scale
    if shape.softcap is not None:
        scores = shape.softcap * (scores / shape.softcap).tanh()
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[2]]
    return weights.to(values.dtype) @ values
