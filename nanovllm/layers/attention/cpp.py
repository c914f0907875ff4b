"""Paged attention on a CPU, in C++ (layers/cpu_kernels/): K/V are read where they lie.

A decode is bound by that reading. A longer query is bound by matrix products; where the processor has no bfloat16
instructions for them, it is left to the torch backend.
"""

import torch
from torch import Tensor

from nanovllm.engine.batch import Batch
from nanovllm.layers import cpu_kernels
from nanovllm.layers.attention.torch import attend_each
from nanovllm.layers.cpu_kernels import store_kvcache

__all__ = ["NEVER_WAITS", "PREFERRED_BLOCK_SIZE", "attend", "reason_unavailable", "store_kvcache"]

PREFERRED_BLOCK_SIZE = 16
NEVER_WAITS = False


def reason_unavailable(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    if device.type != "cpu":
        return "it computes on a CPU"
    return cpu_kernels.reason_unavailable(dtype)


def attend(query: Tensor, kv_cache: Tensor, batch: Batch, scale: float) -> Tensor:
    """Causal attention of `query` [num_tokens, num_heads, head_dim] to each sequence's context; same shape out."""
    output = torch.empty_like(query)
    cpu_kernels.decode_attention(query, kv_cache, batch, scale, output)
    if batch.max_seqlen_q > 1 and cpu_kernels.can_multiply(query.dtype) and query.shape[2] % 2 == 0:
        cpu_kernels.prefill_attention(query, kv_cache, batch, scale, output)
    elif batch.max_seqlen_q > 1:
        attend_each(query, kv_cache, batch, scale, output, min_query_len=2)
    return output
