"""Paged attention on a CPU, in C++ (decode.h, prefill.h): K/V are read where they lie.

A decode is bound by that reading. A longer query is bound by matrix products; where the processor has no bfloat16
instructions for them, it is left to plain torch.
"""

import torch
from torch import Tensor

from nanovllm.batch import Batch
from nanovllm.kernels.cpu import library
from nanovllm.kernels.cpu.functions import decode_attention, prefill_attention, store_kvcache
from nanovllm.kernels.cpu.packed import can_multiply
from nanovllm.layers.attention import attend_one

__all__ = ["NAME", "PREFERRED_BLOCK_SIZE", "SUPPORTS_CUDA_GRAPHS", "attend", "reason_unavailable", "store_kvcache"]

NAME = "cpp"
PREFERRED_BLOCK_SIZE = 16
SUPPORTS_CUDA_GRAPHS = False


def reason_unavailable(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    return library.reason_unavailable(dtype) if device.type == "cpu" else "it computes on a CPU"


def attend(query: Tensor, kv_cache: Tensor, batch: Batch, scale: float) -> Tensor:
    """Causal attention of `query` [num_tokens, num_heads, head_dim] to each sequence's context; same shape out."""
    output = torch.empty_like(query)
    decode_attention(query, kv_cache, batch, scale, output)
    if batch.max_seqlen_q == 1:
        return output
    if can_multiply(query.dtype) and query.shape[2] % 2 == 0:
        prefill_attention(query, kv_cache, batch, scale, output)
        return output
    bounds = batch.cu_seqlens_q.tolist()
    for start, end, context_len, block_table in zip(bounds, bounds[1:], batch.context_lens.tolist(), batch.block_tables):
        if end - start > 1:
            output[start:end] = attend_one(query[start:end], kv_cache, context_len, block_table, scale)
    return output
