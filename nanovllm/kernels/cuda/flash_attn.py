"""flash-attn's kernels over the paged cache (Dao 2023).

Importing this module needs the package flash-attn. The kernels require a 16-bit dtype and blocks
of a multiple of 256 tokens. Their causal masks are aligned at the bottom right, as in
layers/attention.py.

With a sliding window, the kernels start at the tile of the context in which the window of a query
tile's first token begins. A tile has 64, 128 or 256 tokens and lies within one block. Blocks that
lie before the window are therefore never read, whatever they hold. Values before the window in the
same tile are multiplied by 0, so they must be finite. They are, unless the model computes NaN: a
block that is still in use holds K/V of its sequence in all slots up to the newest token.
"""

import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from torch import Tensor

from nanovllm.batch.batch import Batch
from nanovllm.kernels.cuda.attention import store_kvcache as store_kvcache
from nanovllm.layers.attention import MAX_DRAFT_LEN as MAX_DRAFT_LEN
from nanovllm.layers.attention import AttentionShape
from nanovllm.layers.attention import make_cache as make_cache

NAME = "flash_attn"
PREFERRED_BLOCK_SIZE = 256
SUPPORTS_CUDA_GRAPHS = True
KNOWN_FIELDS = {"num_heads", "num_kv_heads", "head_dim", "scale", "window"}
GRAPHS_HAVE_DECODES_ONLY = True  # other launches take lengths from the host


def reason_unavailable(
    device: torch.device, dtype: torch.dtype, shape: AttentionShape, block_size: int
) -> str | None:
    """A GPU that is too old is found by check_backend."""
    if device.type != "cuda":
        return "it needs a CUDA device"
    if dtype.itemsize != 2:
        return f"dtype must be bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
    if shape.head_dim % 8 != 0 or shape.head_dim > 256:
        return f"head_dim must be a multiple of 8 and at most 256, not {shape.head_dim}"
    if block_size % 256 != 0:
        return f"kvcache_block_size must be a multiple of 256, not {block_size}"
    return None


def attend(query: Tensor, kv_cache: Tensor, batch: Batch, shape: AttentionShape) -> Tensor:
    """Causal attention of `query` [num_tokens, num_heads, head_dim] to each sequence's context.

    Returns a tensor of the same shape.
    """
    # The number of tokens before and after a query that it attends to. -1 is for all.
    window_size = (-1, -1) if shape.window is None else (shape.window - 1, 0)
    if batch.max_seqlen_q == 1:
        output = flash_attn_with_kvcache(
            query.unsqueeze(1),  # [num_seqs, 1, num_heads, head_dim]
            *kv_cache,
            cache_seqlens=batch.context_lens,
            block_table=batch.block_tables,
            softmax_scale=shape.scale,
            causal=True,
            window_size=window_size,
        )
        return output.squeeze(1)
    return flash_attn_varlen_func(
        query,
        *kv_cache,
        batch.cu_seqlens_q,
        batch.cu_seqlens_k,
        batch.max_seqlen_q,
        batch.max_seqlen_k,
        block_table=batch.block_tables,
        softmax_scale=shape.scale,
        causal=True,
        window_size=window_size,
    )
