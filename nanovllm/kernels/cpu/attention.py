"""Paged attention on a CPU, in C++ (decode.h, prefill.h). K/V are read in place.

Decode is bound by memory bandwidth, prefill by compute. Queries of up to SHORT_QUERY tokens are
computed as separate decodes, with bitwise identical results. With prepacked linear layers, drafts
therefore change no token in 16-bit dtypes either.
"""

from functools import cache

import torch
from torch import Tensor

from nanovllm.batch.batch import Batch
from nanovllm.kernels.cpu import library
from nanovllm.kernels.cpu.declarations import Heads, Sequences, Struct
from nanovllm.kernels.cpu.library import SHORT_QUERY, load
from nanovllm.layers.attention import AttentionShape
from nanovllm.layers.attention import make_cache as make_cache

NAME = "cpp"
PREFERRED_BLOCK_SIZE = 16
SUPPORTS_CUDA_GRAPHS = False
MAX_DRAFT_LEN = SHORT_QUERY - 1  # a draft follows the newest token
# FastDecoderLayers attends with these fields, too.
KNOWN_FIELDS = {field[0] for field in Heads._fields_}


def reason_unavailable(
    device: torch.device, dtype: torch.dtype, shape: AttentionShape, block_size: int
) -> str | None:
    if device.type != "cpu":
        return "it needs a CPU device"
    if shape.head_dim % 2 != 0:
        return f"head_dim must be even, not {shape.head_dim}"
    return library.reason_unavailable(dtype)


def store_kvcache(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write `key` and `value` [num_tokens, num_kv_heads, head_dim] to their slots.

    A token with slot -1 is padding and is not written.
    """
    assert key[:1].is_contiguous() and value[:1].is_contiguous()
    assert slot_mapping.dtype == torch.int32
    num_tokens, num_kv_heads, head_dim = key.shape
    load(key.dtype).store_kvcache(
        key.data_ptr(),
        value.data_ptr(),
        key.stride(0),
        value.stride(0),
        slot_mapping,
        num_tokens,
        num_kv_heads * head_dim,
        *kv_cache,
    )


def attend(query: Tensor, kv_cache: Tensor, batch: Batch, shape: AttentionShape) -> Tensor:
    """Causal attention of `query` [num_tokens, num_heads, head_dim] to each sequence's context.

    Returns a tensor of the same shape.
    """
    output = torch.empty_like(query)
    kernels = load(query.dtype)
    block_size, num_kv_heads = kv_cache.shape[2:4]
    sequences = describe_sequences(batch, block_size)
    heads = describe_heads(shape, query.shape[1], num_kv_heads)
    arguments = (query, *kv_cache, output, sequences, heads)
    kernels.decode_attention(*arguments)  # writes the rows of short queries
    if batch.max_seqlen_q > SHORT_QUERY:
        kernels.prefill_attention(*arguments)  # writes all other rows
    return output


@cache
def describe_heads(shape: AttentionShape, num_heads: int, num_kv_heads: int) -> Struct:
    """Describe the heads of this rank. Without a window, it is 0."""
    window = shape.window or 0
    return Heads(shape, num_heads=num_heads, num_kv_heads=num_kv_heads, window=window)


def describe_sequences(batch: Batch, block_size: int) -> Struct:
    num_seqs, table_width = batch.block_tables.shape
    return Sequences(batch, num_seqs=num_seqs, table_width=table_width, block_size=block_size)
