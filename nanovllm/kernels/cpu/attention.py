"""Paged attention on a CPU, in C++ (decode.h, prefill.h): K/V are read where they lie.

A decode is bound by that reading, and a longer query by matrix products. A short one is computed as so many decodes, to the bit:
so a draft's tokens are those of steps without drafts, in 16 bits as well.
"""

import torch
from torch import Tensor

from nanovllm.batch import Batch
from nanovllm.kernels.cpu import library
from nanovllm.kernels.cpu.library import call, can_multiply, load
from nanovllm.layers.attention import attend_one

NAME = "cpp"
PREFERRED_BLOCK_SIZE = 16
SUPPORTS_CUDA_GRAPHS = False
_SHORT_QUERY = 8  # tokens, as in decode.h


def reason_unavailable(
    device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
) -> str | None:
    return library.reason_unavailable(dtype) if device.type == "cpu" else "it computes on a CPU"


def store_kvcache(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write `key` and `value` [num_tokens, num_kv_heads, head_dim] to their slots; slot -1 is padding, not written."""
    assert (
        key[:1].is_contiguous() and value[:1].is_contiguous() and slot_mapping.dtype == torch.int32
    )
    sources = key.data_ptr(), value.data_ptr(), key.stride(0), value.stride(0)
    call(
        load(key.dtype).store_kvcache,
        *sources,
        slot_mapping,
        len(key),
        key.shape[1] * key.shape[2],
        *kv_cache,
    )


def attend(query: Tensor, kv_cache: Tensor, batch: Batch, scale: float) -> Tensor:
    """Causal attention of `query` [num_tokens, num_heads, head_dim] to each sequence's context; same shape out."""
    output, kernels = torch.empty_like(query), load(query.dtype)
    block_size, num_kv_heads, head_dim = kv_cache.shape[2:]
    contexts = batch.cu_seqlens_q, batch.context_lens, batch.block_tables, *batch.block_tables.shape
    heads = num_kv_heads, query.shape[1] // num_kv_heads, head_dim
    arguments = query, *kv_cache, output, *contexts, block_size, *heads, scale
    call(kernels.decode_attention, *arguments)  # writes the rows of short queries
    if batch.max_seqlen_q <= _SHORT_QUERY:
        return output
    if can_multiply(query.dtype) and head_dim % 2 == 0:
        call(kernels.prefill_attention, *arguments)  # writes the others
        return output
    bounds = batch.cu_seqlens_q.tolist()
    for start, end, context_len, block_table in zip(
        bounds, bounds[1:], batch.context_lens.tolist(), batch.block_tables
    ):
        if end - start > _SHORT_QUERY:
            output[start:end] = attend_one(
                query[start:end], kv_cache, context_len, block_table, scale
            )
    return output
