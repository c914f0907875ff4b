"""Paged attention in Triton: three kernels that read K/V through the block table where they lie, and copy nothing.

Softmax over a context that is met piece by piece (FlashAttention-2, Dao 2023): with scores s_j and values v_j seen so far,
keep the maximum m = max s_j, the sum l = sum exp(s_j - m) and the output acc = sum exp(s_j - m) v_j. When a piece brings a
larger maximum m', everything before it is rescaled by exp(m - m'); at the end the output is acc / l. The kernels work
with exp2, so log2(e) is part of the scale.

The query heads that share a KV head (GQA) are rows of one tile, so that one read of K/V serves them all. Prefill and
decode are one kernel, whose programs take one KV head and

    prefill   a few query tokens of one sequence, and all of the context that they see
    decode    the query token of one sequence, and one split of its context; a second kernel joins the splits

Legend: M rows of queries (TOKENS query tokens of GROUP heads), N tokens of the context, D head_dim rounded up to a power of
two (masked).
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.batch import Batch
from nanovllm.kernels.cuda.functions import try_out
from nanovllm.layers import attention as torch_backend

NAME = "triton"
PREFERRED_BLOCK_SIZE = 16
SUPPORTS_CUDA_GRAPHS = True

_LOG2_E = 1.4426950408889634
_BYTES_PER_PIECE = 16384  # of keys, and as much of values: a few of them must fit in a multiprocessor's shared memory
_MIN_TOKENS_PER_SPLIT = 256
_PROGRAMS_PER_PROCESSOR = 4  # decode: split contexts until there are this many programs per multiprocessor


def reason_unavailable(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        return "it needs a CUDA device, or TRITON_INTERPRET=1 for a slow run on the CPU"
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"it computes in float16, bfloat16 and float32, not {dtype}"
    if block_size < 16 or block_size & (block_size - 1):
        return f"kvcache_block_size must be a power of two and at least 16, not {block_size}"
    if not 16 <= head_dim <= 256:
        return f"head_dim must be between 16 and 256, not {head_dim}"
    return try_out(partial(_check, device, dtype, head_dim, block_size)) if device.type == "cuda" else None


def _check(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> None:
    """Raises RuntimeError if the kernels compute something else than the torch backend."""
    generator = torch.Generator(device).manual_seed(0)
    kv_cache = torch.full((2, 4, block_size, 2, head_dim), torch.nan, dtype=dtype, device=device)
    tables = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32, device=device)
    context_lens = torch.tensor([block_size + 1, 2 * block_size - 1], dtype=torch.int32, device=device)
    positions = torch.arange(2 * block_size, device=device)
    slots = tables[:, positions // block_size].long() * block_size + positions % block_size  # [2, 2 * block_size]
    slots = slots.masked_fill(positions >= context_lens[:, None], -1).flatten()
    key, value = torch.randn(2, len(slots), 2, head_dim, device=device, generator=generator).to(dtype)
    store_kvcache(key, value, kv_cache, slots)
    for query_len in (1, block_size):
        query = torch.randn(2 * query_len, 4, head_dim, device=device, generator=generator).to(dtype)
        bounds = torch.arange(3, dtype=torch.int32, device=device) * query_len
        batch = Batch(positions, positions, slots, bounds, context_lens, tables, query_len, 2 * block_size - 1, bounds)
        expected = torch_backend.attend(query.float(), kv_cache.float(), batch, head_dim**-0.5)
        error = (attend(query, kv_cache, batch, head_dim**-0.5).float() - expected).abs().max().item()
        if not error < 0.05:
            raise RuntimeError(f"results are off by {error}")


def store_kvcache(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write `key` and `value` [num_tokens, num_kv_heads, head_dim] to their slots; slot -1 is padding, not written."""
    num_tokens, num_kv_heads, head_dim = key.shape
    row_size = num_kv_heads * head_dim
    assert key.stride()[1:] == value.stride()[1:] == (head_dim, 1) and kv_cache.is_contiguous()
    _store_kvcache_kernel[(num_tokens,)](
        key, value, *kv_cache, slot_mapping, key.stride(0), value.stride(0), row_size,
        BLOCK=min(1024, triton.next_power_of_2(row_size)),
    )  # fmt: skip


@triton.jit
def _store_kvcache_kernel(
    key_ptr, value_ptr, key_cache_ptr, value_cache_ptr, slot_mapping_ptr, key_stride, value_stride, row_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)  # int64: slot * row_size overflows 32 bits in large caches
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
    num_heads, head_dim = query.shape[1:]
    block_size, num_kv_heads = kv_cache.shape[2:4]
    num_seqs, group_size = len(batch.context_lens), num_heads // num_kv_heads
    dim = triton.next_power_of_2(head_dim)
    output = torch.empty_like(query)
    is_decode = batch.max_seqlen_q == 1
    if is_decode:
        tokens_per_tile, num_warps, num_stages = 1, 4, 3
        num_splits = _count_splits(num_seqs * num_kv_heads, batch.max_seqlen_k, query.device)
        grid = (num_kv_heads, num_seqs, num_splits)  # KV heads first: programs that run together read neighbouring memory
        # Per split: the normalized output, and log2 of its sum of exponentials, by which the splits are weighed.
        split_outputs = query.new_empty(num_seqs, num_heads, num_splits, head_dim, dtype=torch.float32)
        log_sums = query.new_empty(num_seqs, num_heads, num_splits, dtype=torch.float32)
    else:
        rows_per_tile = 128 if dim * query.dtype.itemsize <= 256 else 64  # what the registers of 8 or 4 warps hold
        tokens_per_tile, num_warps, num_stages = max(1, rows_per_tile // group_size), rows_per_tile // 16, 2
        num_splits, split_outputs, log_sums = 1, output, None
        grid = (triton.cdiv(batch.max_seqlen_q, tokens_per_tile), num_kv_heads, num_seqs)
    _attend_kernel[grid](
        query, *kv_cache, split_outputs, log_sums, batch.cu_seqlens_q, batch.context_lens, batch.block_tables, scale * _LOG2_E,
        batch.block_tables.stride(0), num_heads, num_kv_heads, num_splits,
        IS_DECODE=is_decode, GROUP=group_size, TOKENS=tokens_per_tile,
        M=max(16, triton.next_power_of_2(tokens_per_tile * group_size)),
        N=min(64, max(16, _BYTES_PER_PIECE // (dim * query.dtype.itemsize))), D=dim, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",  # the second is ignored for 16-bit operands
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    if is_decode:
        _join_splits_kernel[(num_seqs * num_heads,)](split_outputs, log_sums, output, num_splits, D=dim, HEAD_DIM=head_dim)
    return output


@triton.jit(do_not_specialize=["table_stride", "num_splits"])  # they change from step to step: one compilation for all values
def _attend_kernel(
    query_ptr, key_ptr, value_ptr, output_ptr, log_sums_ptr, cu_seqlens_ptr, context_lens_ptr, tables_ptr, scale,
    table_stride, num_heads, num_kv_heads, num_splits,
    IS_DECODE: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    if IS_DECODE:
        kv_head, seq, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        tile, query_start, query_len = 0, seq, 1
    else:
        tile, kv_head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        split, query_start = 0, tl.load(cu_seqlens_ptr + seq)
        query_len = tl.load(cu_seqlens_ptr + seq + 1) - query_start
    if tile * TOKENS < query_len:
        rows, dims = tl.arange(0, M), tl.arange(0, D)
        tokens = tile * TOKENS + rows // GROUP  # row -> query token and head: the group's heads stand side by side
        heads = kv_head * GROUP + rows % GROUP
        is_row = (rows < TOKENS * GROUP) & (tokens < query_len)
        query_rows = (query_start + tokens).to(tl.int64) * num_heads + heads
        mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
        query = tl.load(query_ptr + query_rows[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)

        # The queries are the context's last tokens: token i sees the context up to its own position.
        context_len = tl.load(context_lens_ptr + seq)
        last_visible = context_len - query_len + tokens  # [M]
        visible = tl.minimum(context_len, context_len - query_len + (tile + 1) * TOKENS)  # to any row
        tokens_per_split = tl.cdiv(tl.cdiv(visible, num_splits), N) * N
        first = split * tokens_per_split
        end = tl.minimum(first + tokens_per_split, visible)

        acc = tl.zeros([M, D], dtype=tl.float32)
        row_sum = tl.zeros([M], dtype=tl.float32)
        row_max = tl.full([M], float("-inf"), dtype=tl.float32)
        for start in range(first, end, N):
            positions = start + tl.arange(0, N)
            exists = positions < end
            blocks = tl.load(tables_ptr + seq.to(tl.int64) * table_stride + positions // BLOCK_SIZE, mask=exists, other=0)
            slots = blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
            offsets = ((slots * num_kv_heads + kv_head) * HEAD_DIM)[:, None] + dims[None, :]  # [N, D]
            # What lies behind a context's end may be NaN, and NaN * 0 is NaN: it is not loaded.
            is_read = exists[:, None] & (dims < HEAD_DIM)[None, :]
            key = tl.load(key_ptr + offsets, mask=is_read, other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale  # [M, N]
            scores = tl.where(positions[None, :] <= last_visible[:, None], scores, float("-inf"))
            # Every row sees the first piece's first token, so that the maximum is finite from there on.
            new_max = tl.maximum(row_max, tl.max(scores, axis=1))
            weights = tl.exp2(scores - new_max[:, None])
            rescale = tl.exp2(row_max - new_max)
            value = tl.load(value_ptr + offsets, mask=is_read, other=0.0)
            acc = acc * rescale[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
            row_sum, row_max = row_sum * rescale + tl.sum(weights, axis=1), new_max

        # An empty split (a short context, or a padding row of a CUDA graph) has sum 0: it weighs exp2(-inf) = 0.
        output = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
        output_rows = query_rows * num_splits + split
        output_ptrs = output_ptr + output_rows[:, None] * HEAD_DIM + dims[None, :]
        tl.store(output_ptrs, output.to(output_ptr.dtype.element_ty), mask=mask)
        if IS_DECODE:
            tl.store(log_sums_ptr + output_rows, row_max + tl.log2(row_sum), mask=is_row)


@triton.jit(do_not_specialize=["num_splits"])
def _join_splits_kernel(
    split_outputs_ptr, log_sums_ptr, output_ptr, num_splits, D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # sequence and head
    dims = tl.arange(0, D)
    acc = tl.zeros([D], dtype=tl.float32)
    total, largest = 0.0, float("-inf")
    for split in range(0, num_splits):
        log_sum = tl.load(log_sums_ptr + row * num_splits + split)
        partial = tl.load(split_outputs_ptr + (row * num_splits + split) * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
        new_largest = tl.maximum(largest, log_sum)
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight, rescale = tl.exp2(log_sum - base), tl.exp2(largest - base)
        acc, total, largest = acc * rescale + partial * weight, total * rescale + weight, new_largest
    output = acc / tl.where(total > 0, total, 1.0)
    tl.store(output_ptr + row * HEAD_DIM + dims, output.to(output_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


def _count_splits(num_programs: int, max_context_len: int, device: torch.device) -> int:
    """As many as fill the GPU, each long enough to be worth joining."""
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    wanted = triton.cdiv(num_processors * _PROGRAMS_PER_PROCESSOR, num_programs)
    return max(1, min(wanted, triton.cdiv(max_context_len, _MIN_TOKENS_PER_SPLIT)))
