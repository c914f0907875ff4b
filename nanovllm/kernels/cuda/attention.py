"""Paged attention in Triton: three kernels that read K/V through the block table where they lie, and copy nothing.

Softmax over a context that is met piece by piece (FlashAttention-2, Dao 2023): with scores s_j and values v_j seen so far,
keep the maximum m = max s_j, the sum l = sum exp(s_j - m) and the output acc = sum exp(s_j - m) v_j. When a piece brings a
larger maximum m', everything before it is rescaled by exp(m - m'); at the end the output is acc / l. The kernels work
with exp2, so log2(e) is part of the scale.

The query heads that share a KV head (GQA) are rows of one tile, so that one read of K/V serves them all. A step may have
decodes and longer queries. They go through one kernel, launched once for each kind, whose programs take one KV head and

    decode    the query token of one sequence, and one split of its context; a second kernel joins the splits
    prefill   a tile of TOKENS query tokens of one sequence, and all of the context that they see

The context comes in pieces of N tokens. Those that every row sees in full are read without a mask, the last ones with it.

Legend: M rows of queries (TOKENS query tokens of GROUP heads), N tokens of the context, D head_dim, M and D rounded up to
a power of two (masked).
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from nanovllm.batch import Batch
from nanovllm.kernels.cuda.launch import Launch, is_aligned, prepare

NAME = "triton"
PREFERRED_BLOCK_SIZE = 16
SUPPORTS_CUDA_GRAPHS = True

_LOG2_E = 1.4426950408889634
_MIN_TOKENS_PER_SPLIT, _MAX_SPLITS = 256, 64
_PROGRAMS_PER_PROCESSOR = (
    4  # decode: split contexts until there are this many programs per multiprocessor
)


def reason_unavailable(
    device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
) -> str | None:
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        return "it needs a CUDA device, or TRITON_INTERPRET=1 for a slow run on the CPU"
    if block_size < 16 or block_size & (block_size - 1):
        return f"kvcache_block_size must be a power of two and at least 16, not {block_size}"
    if not 16 <= head_dim <= 256:
        return f"head_dim must be between 16 and 256, not {head_dim}"
    return None


def store_kvcache(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write `key` and `value` [num_tokens, num_kv_heads, head_dim] to their slots; slot -1 is padding, not written."""
    num_tokens, num_kv_heads, head_dim = key.shape
    row_size = num_kv_heads * head_dim
    assert key.stride()[1:] == value.stride()[1:] == (head_dim, 1) and kv_cache.is_contiguous()
    sizes = key.stride(0), value.stride(0), row_size
    launch_key = key.device, key.dtype, *sizes, is_aligned(key), is_aligned(value)
    store = prepare(
        _store_kvcache_kernel, *launch_key, BLOCK=min(1024, triton.next_power_of_2(row_size))
    )
    store((num_tokens, 1, 1), key, value, *kv_cache, slot_mapping, *sizes)


@triton.jit(
    do_not_specialize_on_alignment=["slot_mapping_ptr"]
)  # it may lie anywhere in a packed batch
def _store_kvcache_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    key_stride,
    value_stride,
    row_size,
    BLOCK: constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(
        tl.int64
    )  # slot * row_size overflows 32 bits in large caches
    if slot >= 0:
        for start in range(0, row_size, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            mask = offsets < row_size
            key = tl.load(key_ptr + token * key_stride + offsets, mask=mask)
            tl.store(key_cache_ptr + slot * row_size + offsets, key, mask=mask)
            value = tl.load(value_ptr + token * value_stride + offsets, mask=mask)
            tl.store(value_cache_ptr + slot * row_size + offsets, value, mask=mask)


def attend(query: Tensor, kv_cache: Tensor, batch: Batch, scale: float) -> Tensor:
    """Causal attention of `query` [num_tokens, num_heads, head_dim] to each sequence's context; same shape out."""
    query = query.contiguous()
    output = torch.empty_like(query)
    if batch.min_seqlen_q == 1:
        _attend(query, kv_cache, batch, scale, output, is_decode=True)
    if batch.max_seqlen_q > 1:
        _attend(query, kv_cache, batch, scale, output, is_decode=False)
    return output


def _attend(
    query: Tensor, kv_cache: Tensor, batch: Batch, scale: float, output: Tensor, is_decode: bool
) -> None:
    """The rows of `output` that belong to decodes, or the others."""
    num_tokens, num_heads, head_dim = query.shape
    block_size, num_kv_heads = kv_cache.shape[2:4]
    num_seqs, sizes = len(batch.context_lens), (num_heads, num_kv_heads, head_dim, block_size)
    kernels = _prepare(is_decode, query.device, query.dtype, *sizes, is_aligned(query))
    # Per split: the normalized output, and log2 of its sum of exponentials, by which the splits are weighed.
    num_splits, split_outputs, log_sums = 1, kernels.no_splits, kernels.no_splits
    if is_decode:
        num_splits = _count_splits(
            num_seqs * num_kv_heads, batch.max_seqlen_k, kernels.num_processors
        )
        grid = (
            num_kv_heads,
            num_seqs,
            num_splits,
        )  # KV heads first: programs that run together read neighbouring memory
    else:
        grid = (num_tokens // kernels.tokens + num_seqs) * num_kv_heads, 1, 1
    if num_splits > 1:
        split_outputs = query.new_empty(
            num_seqs, num_heads, num_splits, head_dim, dtype=torch.float32
        )
        log_sums = split_outputs.new_empty(num_seqs, num_heads, num_splits)
    kernels.attend(
        grid, query, *kv_cache, output, split_outputs, log_sums, batch.cu_seqlens_q, batch.context_lens, batch.block_tables,
        scale * _LOG2_E, batch.block_tables.stride(0), num_seqs, num_splits,
    )  # fmt: skip
    if num_splits > 1:
        kernels.join(
            (num_seqs, num_heads, 1),
            split_outputs,
            log_sums,
            batch.cu_seqlens_q,
            output,
            num_splits,
        )


class _Kernels(NamedTuple):
    attend: Launch
    join: Launch
    tokens: int  # query tokens of a program
    num_processors: int
    no_splits: Tensor  # stands for the buffers where there is one split


@cache
def _prepare(
    is_decode: bool, device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int,
    aligned: bool,
) -> _Kernels:  # fmt: skip
    group_size, dim = num_heads // num_kv_heads, triton.next_power_of_2(head_dim)
    if dtype != torch.float32:
        dim = max(
            dim, 64
        )  # on Hopper, Triton 3.6 and 3.7 fault with tiles of 32 (issues 10486, 10573 and 11366)
    capability, num_processors = _describe_gpu(device)
    rows, piece, num_warps, num_stages = _choose_tile(is_decode, dim, dtype, capability)
    tokens = 1 if is_decode else max(1, rows // group_size)
    attend = Launch(
        _attend_kernel, IS_DECODE=is_decode, NUM_KV_HEADS=num_kv_heads, GROUP=group_size, TOKENS=tokens,
        M=max(16, triton.next_power_of_2(tokens * group_size)), N=piece, D=dim, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        PRECISION="ieee" if dtype == torch.float32 else "tf32",  # the second is ignored for 16-bit operands
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    join = Launch(
        _join_splits_kernel, NUM_HEADS=num_heads, D=dim, HEAD_DIM=head_dim, MAX_SPLITS=_MAX_SPLITS
    )
    return _Kernels(
        attend, join, tokens, num_processors, torch.empty(0, dtype=torch.float32, device=device)
    )


@triton.jit(
    do_not_specialize=["table_stride", "num_seqs", "num_splits"],
    do_not_specialize_on_alignment=["cu_seqlens_ptr", "context_lens_ptr", "tables_ptr"],
)
def _attend_kernel(
    query_ptr, key_ptr, value_ptr, output_ptr, split_outputs_ptr, log_sums_ptr, cu_seqlens_ptr, context_lens_ptr, tables_ptr,
    scale, table_stride, num_seqs, num_splits, IS_DECODE: constexpr, NUM_KV_HEADS: constexpr, GROUP: constexpr, TOKENS: constexpr,
    M: constexpr, N: constexpr, D: constexpr, HEAD_DIM: constexpr, BLOCK_SIZE: constexpr, PRECISION: constexpr,
):  # fmt: skip
    if IS_DECODE:
        kv_head, seq, split, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2), 0
    else:
        kv_head, seq, tile = _find_tile(cu_seqlens_ptr, num_seqs, NUM_KV_HEADS, TOKENS)
        split = 0
    query_start = tl.load(cu_seqlens_ptr + seq)
    query_len = tl.load(cu_seqlens_ptr + seq + 1) - query_start
    if (tile * TOKENS < query_len) & ((query_len == 1) == IS_DECODE):
        rows, dims = tl.arange(0, M), tl.arange(0, D)
        tokens = (
            tile * TOKENS + rows // GROUP
        )  # row -> query token and head: the group's heads stand side by side
        heads = kv_head * GROUP + rows % GROUP
        is_row = (rows < TOKENS * GROUP) & (tokens < query_len)
        query_rows = (query_start + tokens).to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
        mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
        query = tl.load(
            query_ptr + query_rows[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0
        )

        # The queries are the context's last tokens: token i sees the context up to its own position.
        context_len = tl.load(context_lens_ptr + seq)
        num_before = (
            context_len - query_len + tile * TOKENS
        )  # tokens that every row sees, and itself
        last_visible = context_len - query_len + tokens  # [M]
        visible = tl.minimum(context_len, num_before + TOKENS)  # to any row
        tokens_per_split = tl.cdiv(tl.cdiv(visible, num_splits), N) * N
        first = split * tokens_per_split
        end = tl.minimum(first + tokens_per_split, visible)
        unmasked_end = first + tl.maximum(0, tl.minimum(end, num_before + 1) - first) // N * N

        key_ptr += kv_head * HEAD_DIM
        value_ptr += kv_head * HEAD_DIM
        table_ptr = tables_ptr + tl.cast(seq, tl.int64) * table_stride
        acc = tl.zeros([M, D], dtype=tl.float32)
        row_sum = tl.zeros([M], dtype=tl.float32)
        row_max = tl.full([M], float("-inf"), dtype=tl.float32)
        for start in range(first, unmasked_end, N):
            acc, row_sum, row_max = _attend_to_piece(
                acc, row_sum, row_max, query, key_ptr, value_ptr, table_ptr, start, end, last_visible, scale,
                False, NUM_KV_HEADS, N, D, HEAD_DIM, BLOCK_SIZE, PRECISION,
            )  # fmt: skip
        for start in range(unmasked_end, end, N):
            acc, row_sum, row_max = _attend_to_piece(
                acc, row_sum, row_max, query, key_ptr, value_ptr, table_ptr, start, end, last_visible, scale,
                True, NUM_KV_HEADS, N, D, HEAD_DIM, BLOCK_SIZE, PRECISION,
            )  # fmt: skip

        # An empty split (a short context, or a padding row of a CUDA graph) has sum 0: it weighs exp2(-inf) = 0.
        normalized = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
        if num_splits == 1:
            output_ptrs = output_ptr + query_rows[:, None] * HEAD_DIM + dims[None, :]
            tl.store(output_ptrs, normalized.to(output_ptr.dtype.element_ty), mask=mask)
        else:
            split_rows = (
                tl.cast(seq, tl.int64) * (NUM_KV_HEADS * GROUP) + heads
            ) * num_splits + split
            tl.store(
                split_outputs_ptr + split_rows[:, None] * HEAD_DIM + dims[None, :],
                normalized,
                mask=mask,
            )
            tl.store(log_sums_ptr + split_rows, row_max + tl.log2(row_sum), mask=is_row)


@triton.jit
def _attend_to_piece(
    acc, row_sum, row_max, query, key_ptr, value_ptr, table_ptr, start, end, last_visible, scale, IS_MASKED: constexpr,
    NUM_KV_HEADS: constexpr, N: constexpr, D: constexpr, HEAD_DIM: constexpr, BLOCK_SIZE: constexpr, PRECISION: constexpr,
):  # fmt: skip
    """acc, row_sum and row_max after N more tokens of the context, from `start` on."""
    positions, dims = start + tl.arange(0, N), tl.arange(0, D)
    exists = positions < end
    unsigned = positions.to(tl.uint32)  # divided by a power of two with a shift
    entries = table_ptr + unsigned // BLOCK_SIZE
    blocks = tl.load(entries, mask=exists, other=0) if IS_MASKED else tl.load(entries)
    slots = blocks * BLOCK_SIZE + (unsigned % BLOCK_SIZE).to(tl.int32)
    offsets = (slots.to(tl.int64) * (NUM_KV_HEADS * HEAD_DIM))[:, None] + dims[None, :]  # [N, D]
    # What lies behind a context's end may be NaN, and NaN * 0 is NaN: it is not loaded.
    is_read = (exists[:, None] | (not IS_MASKED)) & (dims < HEAD_DIM)[None, :]
    key = tl.load(key_ptr + offsets, mask=is_read, other=0.0)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)  # [M, N]
    if IS_MASKED:
        scores = tl.where(positions[None, :] <= last_visible[:, None], scores, float("-inf"))
    # Every row sees the first piece's first token, so that the maximum is finite from there on.
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(tl.fma(scores, scale, -new_max[:, None]))
    rescale = tl.exp2(row_max - new_max)
    value = tl.load(value_ptr + offsets, mask=is_read, other=0.0)
    acc = acc * rescale[:, None]
    acc = tl.dot(weights.to(value.dtype), value, acc, input_precision=PRECISION)
    return acc, row_sum * rescale + tl.sum(weights, axis=1), new_max


@triton.jit
def _find_tile(cu_seqlens_ptr, num_seqs, NUM_KV_HEADS: constexpr, TOKENS: constexpr):
    """This program's KV head, its sequence, and which of that sequence's tiles.

    The batch's last tiles come first: they see the most context, and a long program that starts late leaves the GPU waiting.
    Sequence i's tiles are counted from cu_seqlens[i] // TOKENS + i on: room for every rest, so some hold no token.
    """
    index = (tl.num_programs(0) - 1 - tl.program_id(0)) // NUM_KV_HEADS
    low, high = 0, num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(cu_seqlens_ptr + middle) // TOKENS + middle <= index:
            low = middle
        else:
            high = middle - 1
    return (
        tl.program_id(0) % NUM_KV_HEADS,
        low,
        index - tl.load(cu_seqlens_ptr + low) // TOKENS - low,
    )


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["cu_seqlens_ptr"])
def _join_splits_kernel(
    split_outputs_ptr, log_sums_ptr, cu_seqlens_ptr, output_ptr, num_splits, NUM_HEADS: constexpr, D: constexpr,
    HEAD_DIM: constexpr, MAX_SPLITS: constexpr,
):  # fmt: skip
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query_start = tl.load(cu_seqlens_ptr + seq).to(tl.int64)
    if tl.load(cu_seqlens_ptr + seq + 1) - query_start == 1:
        splits, dims = tl.arange(0, MAX_SPLITS), tl.arange(0, D)
        exists, is_dim = splits < num_splits, dims < HEAD_DIM
        rows = (seq * NUM_HEADS + head) * num_splits + splits
        log_sums = tl.load(log_sums_ptr + rows, mask=exists, other=float("-inf"))
        mask = exists[:, None] & is_dim[None, :]
        outputs = tl.load(
            split_outputs_ptr + rows[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0
        )
        largest = tl.max(log_sums, axis=0)
        weights = tl.exp2(log_sums - tl.where(largest == float("-inf"), 0.0, largest))
        total = tl.sum(weights, axis=0)
        output = tl.sum(outputs * weights[:, None], axis=0) / tl.where(total > 0, total, 1.0)
        output_row = query_start * NUM_HEADS + head
        tl.store(
            output_ptr + output_row * HEAD_DIM + dims,
            output.to(output_ptr.dtype.element_ty),
            mask=is_dim,
        )


def _choose_tile(
    is_decode: bool, dim: int, dtype: torch.dtype, major: int
) -> tuple[int, int, int, int]:
    """Rows of queries, tokens of a piece of the context, warps, stages: as many as the registers hold, so that the compiler
    spills none of them to memory."""
    if dtype == torch.float32:  # no matrix instructions: a product of tiles is spelled out
        return 16, 16, 4, 2
    if is_decode:
        return 16, 64 if dim <= 128 else 16, 4, 3
    # Hopper and Blackwell (wgmma, tcgen05) multiply with K/V from shared memory, others from registers. 5 stages are the
    # fewest with which the next piece is fetched ahead, as it waits for its entries of the block table.
    numbers_per_piece = 8192 if major in (9, 10) else 4096
    return 128 if dim <= 128 else 64, min(64, numbers_per_piece // dim), 8, 5


def _count_splits(num_programs: int, max_context_len: int, num_processors: int) -> int:
    """As many as fill the GPU, each long enough to be worth joining."""
    wanted = triton.cdiv(num_processors * _PROGRAMS_PER_PROCESSOR, num_programs)
    return max(1, min(wanted, triton.cdiv(max_context_len, _MIN_TOKENS_PER_SPLIT), _MAX_SPLITS))


@cache
def _describe_gpu(device: torch.device) -> tuple[int, int]:
    """Its major compute capability and the number of its multiprocessors; for the interpreter those of an H100."""
    if device.type == "cpu":
        return 9, 132
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.multi_processor_count
