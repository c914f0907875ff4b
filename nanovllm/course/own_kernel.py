"""Paged attention in Triton, as written in evening 8 of the course. It is no part of the engine.

A kernel is a function that many programs run at the same time, each with its own numbers from
tl.program_id. With TRITON_INTERPRET=1 they run one after another on a CPU, as NumPy would.

    store_kvcache     a program for each token
    attend_whole      a program for each sequence and head, with all scores at once
    attend_split      block by block with an online softmax, and several programs for each of these

All of them read the layout of layers/attention.py: [2, num_blocks, block_size, num_kv_heads,
head_dim]. At the end `attend` is a backend. References: Milakov and Gimelshein 2018 (online
softmax), Dao et al. 2022 (FlashAttention), Dao et al. 2023 (Flash-Decoding, the splits).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.batch.batch import Batch
from nanovllm.layers import attention
from nanovllm.layers.attention import AttentionShape, make_cache  # noqa: F401 part of a backend

NAME = "own"
PREFERRED_BLOCK_SIZE = 16
SUPPORTS_CUDA_GRAPHS = False
MAX_DRAFT_LEN = 7
KNOWN_FIELDS = {"num_heads", "num_kv_heads", "head_dim", "scale"}


def reason_unavailable(
    device: torch.device, dtype: torch.dtype, shape: AttentionShape, block_size: int
) -> str | None:
    """Return why the backend cannot compute such layers here, or None if it can."""
    is_power = block_size & (block_size - 1) == 0
    return None if is_power else f"kvcache_block_size={block_size} is no power of two"


@triton.jit
def store_kernel(key, value, kv_cache, slot_mapping, value_offset, ROW: tl.constexpr):
    """Store the K/V of token tl.program_id(0). Its row has ROW numbers, those of all heads.

    Keys are at kv_cache + slot * ROW, and values `value_offset` numbers later. Slot -1 is not
    written. tl.arange needs a power of two.
    """
    token = tl.program_id(0)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot >= 0:
        numbers = tl.arange(0, triton.next_power_of_2(ROW))
        mask = numbers < ROW
        places = kv_cache + slot * ROW + numbers
        tl.store(places, tl.load(key + token * ROW + numbers, mask=mask), mask=mask)
        values = tl.load(value + token * ROW + numbers, mask=mask)
        tl.store(places + value_offset, values, mask=mask)


def store_kvcache(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """As in layers/attention.py. `key` and `value` can be parts of a larger tensor."""
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens > 0:
        store_kernel[(num_tokens,)](
            key.contiguous(),
            value.contiguous(),
            kv_cache,
            slot_mapping,
            kv_cache[0].numel(),
            num_kv_heads * head_dim,
        )


@triton.jit
def find_rows(
    block_table, positions, head, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr
):
    """Return where the K/V heads of `positions` begin, int64, as numbers from the cache's start.

    A block table maps logical blocks to physical ones. HEADS is num_kv_heads, DIM is head_dim.
    """
    block_ids = tl.load(block_table + positions // BLOCK_SIZE).to(tl.int64)
    slots = block_ids * BLOCK_SIZE + positions % BLOCK_SIZE
    return (slots * HEADS + head) * DIM


@triton.jit
def attend_range(
    query,
    kv_cache,
    value_offset,
    block_table,
    start,
    end,
    scale,
    head,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Attend to positions `start` to `end`, a block at a time, with an online softmax.

    `query` is a pointer to the DIM numbers of one head, and `start` is where a block begins. Return
    the largest score, the sum of exp(score - largest), and the sum of exp(score - largest) * value,
    an array of the next power of two of DIM. Without positions these are -inf, 0 and zeros.
    """
    dims = tl.arange(0, triton.next_power_of_2(DIM))
    is_dim = dims < DIM
    vector = tl.load(query + dims, mask=is_dim, other=0.0).to(tl.float32) * scale
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    output = tl.zeros_like(vector)
    for first in range(start, end, BLOCK_SIZE):
        positions = first + tl.arange(0, BLOCK_SIZE)
        is_visible = positions < end
        rows = find_rows(block_table, positions, head, BLOCK_SIZE, HEADS, DIM)
        mask = is_visible[:, None] & is_dim[None, :]
        places = kv_cache + rows[:, None] + dims[None, :]
        keys = tl.load(places, mask=mask, other=0.0).to(tl.float32)
        scores = tl.where(is_visible, tl.sum(keys * vector[None, :], axis=1), float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, axis=0))
        weights = tl.exp(scores - larger)
        # What was summed up so far was relative to a smaller number.
        factor = tl.exp(largest - larger)
        values = tl.load(places + value_offset, mask=mask, other=0.0).to(tl.float32)
        output = output * factor + tl.sum(weights[:, None] * values, axis=0)
        total = total * factor + tl.sum(weights, axis=0)
        largest = larger
    return largest, total, output


@triton.jit
def attend_whole_kernel(
    query,
    kv_cache,
    value_offset,
    block_tables,
    table_width,
    context_lens,
    output,
    scale,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    LEN: tl.constexpr,
):
    """Attend with head tl.program_id(1) of sequence tl.program_id(0) to its whole context.

    `query` and `output` are [num_seqs, NUM_HEADS, DIM]. NUM_HEADS / HEADS query heads share a K/V
    head. LEN is a power of two, and no context is longer. All scores are computed before any
    weight.
    """
    seq = tl.program_id(0)
    query_head = tl.program_id(1)
    head = query_head // (NUM_HEADS // HEADS)
    context_len = tl.load(context_lens + seq)
    positions = tl.arange(0, LEN)
    is_visible = positions < context_len
    # What lies behind the context is not read, so these positions are moved to 0.
    read = tl.where(is_visible, positions, 0)
    rows = find_rows(block_tables + seq * table_width, read, head, BLOCK_SIZE, HEADS, DIM)
    dims = tl.arange(0, triton.next_power_of_2(DIM))
    is_dim = dims < DIM
    row = (seq * NUM_HEADS + query_head) * DIM
    vector = tl.load(query + row + dims, mask=is_dim, other=0.0).to(tl.float32) * scale
    mask = is_visible[:, None] & is_dim[None, :]
    places = kv_cache + rows[:, None] + dims[None, :]
    keys = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    scores = tl.where(is_visible, tl.sum(keys * vector[None, :], axis=1), float("-inf"))
    weights = tl.exp(scores - tl.max(scores, axis=0))
    values = tl.load(places + value_offset, mask=mask, other=0.0).to(tl.float32)
    attended = tl.sum(weights[:, None] * values, axis=0) / tl.sum(weights, axis=0)
    tl.store(output + row + dims, attended, mask=is_dim)


@triton.jit
def attend_split_kernel(
    query,
    kv_cache,
    value_offset,
    block_tables,
    table_width,
    context_lens,
    largest,
    totals,
    outputs,
    scale,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Store what attend_range returns for split tl.program_id(2) of a context.

    Each split has the same number of blocks, but the last ones have fewer, or none. `largest` and
    `totals` are [num_seqs, NUM_HEADS, NUM_SPLITS], and `outputs` have DIM numbers for each of them.
    """
    seq = tl.program_id(0)
    query_head = tl.program_id(1)
    split = tl.program_id(2)
    head = query_head // (NUM_HEADS // HEADS)
    row = seq * NUM_HEADS + query_head
    context_len = tl.load(context_lens + seq)
    split_len = tl.cdiv(tl.cdiv(context_len, BLOCK_SIZE), NUM_SPLITS) * BLOCK_SIZE
    start = tl.minimum(split * split_len, context_len)
    end = tl.minimum(start + split_len, context_len)
    maximum, total, attended = attend_range(
        query + row * DIM,
        kv_cache,
        value_offset,
        block_tables + seq * table_width,
        start,
        end,
        scale,
        head,
        BLOCK_SIZE,
        HEADS,
        DIM,
    )
    place = row * NUM_SPLITS + split
    dims = tl.arange(0, triton.next_power_of_2(DIM))
    tl.store(largest + place, maximum)
    tl.store(totals + place, total)
    tl.store(outputs + place * DIM + dims, attended, mask=dims < DIM)


@triton.jit
def combine_kernel(largest, totals, outputs, output, DIM: tl.constexpr, NUM_SPLITS: tl.constexpr):
    """Combine the splits of row tl.program_id(0), a head of a sequence. NUM_SPLITS is a power of 2.

    A split without positions has the largest score -inf, and its weight is 0.
    """
    row = tl.program_id(0)
    splits = row * NUM_SPLITS + tl.arange(0, NUM_SPLITS)
    dims = tl.arange(0, triton.next_power_of_2(DIM))
    is_dim = dims < DIM
    maxima = tl.load(largest + splits)
    weights = tl.exp(maxima - tl.max(maxima, axis=0))
    places = outputs + splits[:, None] * DIM + dims[None, :]
    parts = tl.load(places, mask=is_dim[None, :], other=0.0)
    total = tl.sum(weights * tl.load(totals + splits), axis=0)
    attended = tl.sum(weights[:, None] * parts, axis=0) / total
    tl.store(output + row * DIM + dims, attended, mask=is_dim)


# --- The launchers


def list_arguments(query: Tensor, kv_cache: Tensor, batch: Batch) -> tuple[tuple, tuple]:
    """Return what both kernels begin with, and NUM_HEADS, BLOCK_SIZE, HEADS and DIM."""
    tables = batch.block_tables.contiguous()
    first = (query, kv_cache, kv_cache[0].numel(), tables, tables.shape[1], batch.context_lens)
    return first, (query.shape[1], *kv_cache.shape[2:])


def attend_whole(query: Tensor, kv_cache: Tensor, batch: Batch, scale: float) -> Tensor:
    """Attend with one query of each sequence, [num_seqs, num_heads, head_dim]."""
    output = torch.empty_like(query)
    length = triton.next_power_of_2(batch.max_seqlen_k)
    arguments, sizes = list_arguments(query, kv_cache, batch)
    attend_whole_kernel[query.shape[:2]](*arguments, output, scale, *sizes, length)
    return output


def attend_split(
    query: Tensor, kv_cache: Tensor, batch: Batch, scale: float, num_splits: int = 4
) -> Tensor:
    """As attend_whole, for contexts of any length. `num_splits` is a power of two."""
    num_seqs, num_heads, head_dim = query.shape
    output = torch.empty_like(query)
    largest = query.new_empty(num_seqs, num_heads, num_splits, dtype=torch.float32)
    totals = torch.empty_like(largest)
    outputs = query.new_empty(*largest.shape, head_dim, dtype=torch.float32)
    parts = (largest, totals, outputs)
    arguments, sizes = list_arguments(query, kv_cache, batch)
    grid = (num_seqs, num_heads, num_splits)
    attend_split_kernel[grid](*arguments, *parts, scale, *sizes, num_splits)
    combine_kernel[(num_seqs * num_heads,)](*parts, output, head_dim, num_splits)
    return output


def attend(
    query: Tensor,
    kv_cache: Tensor,
    batch: Batch,
    shape: AttentionShape,
    sinks: Tensor | None = None,
) -> Tensor:
    """As in layers/attention.py, with the kernels if each sequence has one query."""
    if batch.max_seqlen_q > 1:
        return attention.attend(query, kv_cache, batch, shape, sinks)
    return attend_split(query.contiguous(), kv_cache, batch, shape.scale)
