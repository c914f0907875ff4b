"""Paged attention in Triton: chooses tiles and splits, and launches the kernels.

attention_kernels.py has the kernels and explains the algorithm. Decodes and longer queries run in
the same kernel, launched once for each kind. A program computes one KV head,

    decode    the query token of one sequence,
    prefill   or a tile of query tokens of one sequence,

and one split of the context they attend to. A second kernel combines the splits.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from nanovllm.batch.batch import Batch
from nanovllm.kernels.cuda.attention_kernels import (
    LOG2_E,
    attend_kernel,
    combine_splits_kernel,
    store_kvcache_kernel,
)
from nanovllm.layers.attention import MAX_DRAFT_LEN as MAX_DRAFT_LEN
from nanovllm.layers.attention import AttentionShape
from nanovllm.layers.attention import make_cache as make_cache

NAME = "triton"
PREFERRED_BLOCK_SIZE = 16
SUPPORTS_CUDA_GRAPHS = True
KNOWN_FIELDS = {
    "num_heads", "num_kv_heads", "head_dim", "scale", "window", "softcap", "has_sinks"
}  # fmt: skip

_LOG2_E = LOG2_E.value


class _Tile(NamedTuple):
    rows: int  # query rows
    tokens: int  # context tokens
    num_warps: int
    num_stages: int


# Decodes of head_dim 128, on an H200. Microseconds of a layer of Qwen3-0.6B in bfloat16:
#
#     sequences x tokens      1 x 1,000   8 x 1,000   32 x 1,000   32 x 4,000   256 x 1,000
#     _Tile(16, 64, 4, 3)          11.3        16.7         45.0          142           243
#     _Tile(16, 128, 4, 3)          7.8
#     _Tile(16, 16, 1, 2)                                   38.5          124
#     _Tile(16, 32, 1, 2)                      15.0         38.9          125           239
#
# The last one spills registers. Small tiles keep few bytes in flight, so that a long context beside
# many short ones takes 2.7 times as long as with (16, 64, 4, 3), by a model of these figures.
# (16, 64, 2, 2) has the same bytes in flight in half of the warps. It and all other numbers from
# here to `reason_unavailable` were chosen without a GPU, so that the compiler spills none
# (tests/kernels/compiled.py).
_MAX_SPLITS = 64
# Contexts of decodes are split until there are this many programs per multiprocessor, each with at
# least so many tokens.
_PROGRAMS_PER_PROCESSOR = 8
_LEAST_TOKENS = 128
# If there are as many without splits, a long context beside short ones would still take longest.
# Programs of splits that a context does not have take time, too, so there are few.
_LONG_CONTEXT = 2048
_SPLITS_OF_LONG_CONTEXT = 4
# Contexts of longer queries are split if their tiles leave multiprocessors idle, as those of drafts
# or of a few tokens behind a cached prefix do.
_LEAST_PREFILL_TOKENS = 1024
_MAX_PREFILL_SPLITS = 8
# With fewer programs per multiprocessor, before contexts are split, decodes are "few": one or two
# sequences of Qwen3-0.6B. A program then reads a short split at once.
_FEW_PROGRAMS = 1 / 8
_PLAIN_TILE = _Tile(16, 16, 4, 2)  # without matrix instructions
# Tiles of 16-bit numbers, by head_dim, which is rounded up to one of these. Hopper and Blackwell
# (wgmma, tcgen05) multiply with K/V from shared memory, others from registers. With fewer than 5
# stages the next tile is not fetched ahead, because it waits for its entries of the block table.
_TILES = {
    "decode": {64: _Tile(16, 64, 4, 3), 128: _Tile(16, 64, 2, 2), 256: _Tile(16, 16, 4, 3)},
    "few decodes": {128: _Tile(16, 128, 4, 3)},  # exactly 128, because 80 would spill
    "prefill": {64: _Tile(128, 64, 8, 5), 128: _Tile(128, 32, 8, 5), 256: _Tile(64, 16, 8, 5)},
    "prefill, Hopper": {
        64: _Tile(128, 64, 8, 5),
        128: _Tile(128, 64, 8, 5),
        256: _Tile(64, 64, 8, 3),  # not 32 tokens, because of the faults that _attend avoids
    },
}


def reason_unavailable(
    device: torch.device, dtype: torch.dtype, shape: AttentionShape, block_size: int
) -> str | None:
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        return "it needs a CUDA device, or TRITON_INTERPRET=1 for a slow run on the CPU"
    if block_size < 16 or block_size & (block_size - 1):
        return f"kvcache_block_size must be a power of two and at least 16, not {block_size}"
    if not 16 <= shape.head_dim <= 256:
        return f"head_dim must be between 16 and 256, not {shape.head_dim}"
    return None


def store_kvcache(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write `key` and `value` [num_tokens, num_kv_heads, head_dim] to their slots.

    A token with slot -1 is padding and is not written.
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    row_size = num_kv_heads * head_dim
    assert key.stride()[1:] == value.stride()[1:] == (head_dim, 1) and kv_cache.is_contiguous()
    store_kvcache_kernel[(num_tokens,)](
        key,
        value,
        *kv_cache,
        slot_mapping,
        key.stride(0),
        value.stride(0),
        row_size,
        BLOCK=triton.next_power_of_2(row_size),
        enable_fp_fusion=True,
    )


def attend(
    query: Tensor,
    kv_cache: Tensor,
    batch: Batch,
    shape: AttentionShape,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of `query` [num_tokens, num_heads, head_dim] to each sequence's context.

    Returns a tensor of the same shape. `sinks` [num_heads] are given if the shape has them.
    """
    query = query.contiguous()
    output = torch.empty_like(query)
    num_prefills = len(batch.long_queries)
    # Decodes come last, because combining splits of longer queries writes to all rows.
    if num_prefills > 0:
        _attend(query, kv_cache, batch, shape, sinks, output, is_decode=False)
    if num_prefills < len(batch.context_lens):
        _attend(query, kv_cache, batch, shape, sinks, output, is_decode=True)
    return output


def _attend(
    query: Tensor,
    kv_cache: Tensor,
    batch: Batch,
    shape: AttentionShape,
    sinks: Tensor | None,
    output: Tensor,
    is_decode: bool,
) -> None:
    """Compute the rows of `output` that belong to decodes, or all other rows."""
    num_tokens, num_heads, head_dim = query.shape
    block_size, num_kv_heads = kv_cache.shape[2:4]
    group_size = num_heads // num_kv_heads
    num_seqs = len(batch.context_lens)
    num_prefills = len(batch.long_queries)
    capability, num_processors = describe_gpu(query.device)
    dim = triton.next_power_of_2(head_dim)
    if query.dtype != torch.float32:
        # On Hopper, Triton 3.6 and 3.7 fault with tiles of 32 (issues 10486, 10573 and 11366).
        dim = max(dim, 64)
    max_visible = min(batch.max_seqlen_k, shape.window or batch.max_seqlen_k)
    if is_decode:
        num_rows = min(num_seqs, num_tokens)  # others are padding of a CUDA graph
        num_programs = num_rows * num_kv_heads
        is_few = num_programs <= _FEW_PROGRAMS * num_processors
        kind = "few decodes" if is_few and head_dim in _TILES["few decodes"] else "decode"
        tile = _choose_tile(kind, dim, query.dtype, capability)
        tokens = 1  # of the query of a program
        num_splits, least_tokens = _count_splits(num_programs, max_visible, num_processors)
        # KV heads come first, so that programs that run together read adjacent memory.
        grid = (num_kv_heads, num_rows, num_splits)
    else:
        num_rows = num_tokens
        tile = _choose_tile("prefill", dim, query.dtype, capability)
        tokens = max(1, tile.rows // group_size)
        # As if all tokens were in these sequences, because in a CUDA graph they can be.
        num_tiles = num_tokens // tokens
        wanted = num_processors // ((num_tiles + 1) * num_kv_heads)
        least_tokens = _LEAST_PREFILL_TOKENS
        useful = triton.cdiv(max_visible, least_tokens)
        num_splits = max(1, min(wanted, useful, _MAX_PREFILL_SPLITS))
        # A tile of each sequence can be incomplete, and each has two tokens or more.
        num_tiles += min(num_prefills, num_tokens // 2)
        grid = (num_tiles * num_kv_heads, 1, num_splits)
    # Of each split: the normalized output, and log2 of its sum of exponentials.
    sizes = (num_rows if num_splits > 1 else 0, num_heads, num_splits)
    split_outputs = query.new_empty(*sizes, head_dim, dtype=torch.float32)
    log_sums = split_outputs.new_empty(sizes)
    attend_kernel[grid](
        query,
        *kv_cache,
        output,
        split_outputs,
        log_sums,
        batch.cu_seqlens_q,
        batch.context_lens,
        batch.block_tables,
        batch.long_queries,
        sinks,
        shape.scale * _LOG2_E,
        batch.block_tables.stride(0),
        num_prefills,
        num_splits,
        least_tokens,
        IS_DECODE=is_decode,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group_size,
        TOKENS=tokens,
        M=max(16, triton.next_power_of_2(tokens * group_size)),
        N=tile.tokens,
        D=dim,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=shape.window,
        SOFTCAP=None if shape.softcap is None else shape.softcap * _LOG2_E,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,
    )
    if num_splits > 1:
        combine_splits_kernel[(num_rows, num_heads)](
            split_outputs,
            log_sums,
            batch.cu_seqlens_q,
            output,
            num_splits,
            NUM_HEADS=num_heads,
            D=dim,
            HEAD_DIM=head_dim,
            MAX_SPLITS=_MAX_SPLITS if is_decode else _MAX_PREFILL_SPLITS,
            IS_DECODE=is_decode,
            enable_fp_fusion=True,
        )


@cache
def describe_gpu(device: torch.device) -> tuple[int, int]:
    """Return the major compute capability and the number of multiprocessors.

    In the interpreter they are those of an H100.
    """
    if device.type == "cpu":
        return 9, 132
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.multi_processor_count


def has_matrix_instructions(dtype: torch.dtype, major: int) -> bool:
    """Triton has none for Turing. Those for float32 round to fewer bits."""
    return dtype != torch.float32 and major >= 8


def _choose_tile(kind: str, dim: int, dtype: torch.dtype, major: int) -> _Tile:
    if not has_matrix_instructions(dtype, major):
        return _PLAIN_TILE
    if kind == "prefill" and major in (9, 10):
        kind = "prefill, Hopper"
    return _TILES[kind][dim]


def _count_splits(num_programs: int, max_visible: int, num_processors: int) -> tuple[int, int]:
    """Return the most splits of a decode, and the fewest tokens that are worth a split."""
    wanted = triton.cdiv(num_processors * _PROGRAMS_PER_PROCESSOR, num_programs)
    least = _LEAST_TOKENS
    if wanted == 1:
        wanted = _SPLITS_OF_LONG_CONTEXT
        least = _LONG_CONTEXT
    return min(wanted, triton.cdiv(max_visible, least), _MAX_SPLITS), least
