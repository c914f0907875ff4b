"""Paged attention in plain torch: what every other backend must compute, and the one that runs on any device.

One sequence after the other: gather its blocks, then scaled_dot_product_attention. Nothing is padded, and no more of
the cache is read than the contexts that the batch attends to.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.engine.batch import Batch

PREFERRED_BLOCK_SIZE = 16
NEVER_WAITS = False

_MASK_SIZE = 1 << 23  # numbers in a mask, of which SDPA makes a copy in the query's dtype; its own triangle takes no memory


def reason_unavailable(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    return None


def store_kvcache(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write `key` and `value` [num_tokens, num_kv_heads, head_dim] to their slots; slot -1 is padding, not written."""
    written = slot_mapping >= 0
    if not written.all():
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    slots = kv_cache.flatten(1, 2)  # [2, num_blocks * block_size, num_kv_heads, head_dim]
    slots[0].index_copy_(0, slot_mapping, key)
    slots[1].index_copy_(0, slot_mapping, value)


def attend(query: Tensor, kv_cache: Tensor, batch: Batch, scale: float) -> Tensor:
    """Causal attention of `query` [num_tokens, num_heads, head_dim] to each sequence's context; same shape out."""
    output = torch.empty_like(query)
    attend_each(query, kv_cache, batch, scale, output)
    return output


def attend_each(
    query: Tensor, kv_cache: Tensor, batch: Batch, scale: float, output: Tensor, min_query_len: int = 1
) -> None:
    """Write the rows of `output` that belong to sequences of at least `min_query_len` query tokens."""
    block_size, num_kv_heads, head_dim = kv_cache.shape[2:]
    group_size = query.shape[1] // num_kv_heads  # query heads that share a KV head (GQA, Ainslie et al. 2023)
    keys, values = kv_cache.flatten(2)  # each [num_blocks, numbers in a block]: gathering a block is one copy
    # One buffer for all sequences: new memory for each would cost a CPU more, in page faults, than the copies do.
    buffer = keys.new_empty(2, -(-batch.max_seqlen_k // block_size), keys.shape[1])
    key_buffer, value_buffer = buffer
    key_context, value_context = buffer.view(2, 1, -1, num_kv_heads, head_dim).transpose(2, 3)
    bounds = batch.cu_seqlens_q.tolist()
    for start, end, context_len, block_table in zip(bounds, bounds[1:], batch.context_lens.tolist(), batch.block_tables):
        query_len = end - start
        if query_len < min_query_len:
            continue
        num_blocks = -(-context_len // block_size)
        block_ids = block_table[:num_blocks]
        torch.index_select(keys, 0, block_ids, out=key_buffer[:num_blocks])
        torch.index_select(values, 0, block_ids, out=value_buffer[:num_blocks])
        key = key_context[:, :, :context_len]  # [1, num_kv_heads, context_len, head_dim]
        value = value_context[:, :, :context_len]
        if query_len == 1:  # it sees everything; the heads of a group are rows of one query, so that K/V are read once
            rows = query[start].view(1, num_kv_heads, group_size, head_dim)
            output[start] = F.scaled_dot_product_attention(rows, key, value, scale=scale).view(-1, head_dim)
            continue
        # SDPA's own triangle stands at the top left. That of a context's last tokens stands at the bottom right: a mask.
        is_whole = query_len == context_len
        tokens_at_once = query_len if is_whole else max(1, _MASK_SIZE // context_len)
        for first in range(start, end, tokens_at_once):
            piece = slice(first, min(first + tokens_at_once, end))
            rows = query[piece].transpose(0, 1).unsqueeze(0)  # [1, num_heads, num_tokens, head_dim]
            seen = context_len - end + piece.stop
            mask = None if is_whole else query.new_ones(rows.shape[2], seen, dtype=torch.bool).tril(context_len - end + first)
            attended = F.scaled_dot_product_attention(
                rows, key[:, :, :seen], value[:, :, :seen], mask, is_causal=is_whole, scale=scale, enable_gqa=True
            )
            output[piece] = attended[0].transpose(0, 1)
