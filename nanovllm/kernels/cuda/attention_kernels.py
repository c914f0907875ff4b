"""The kernels of paged attention in Triton. K/V are read in place, through the block table.

Online softmax (FlashAttention-2, Dao 2023): a program reads the context in tiles. With scores s_j
and values v_j seen so far, it keeps the maximum m = max s_j, the sum l = sum exp(s_j - m) and the
output acc = sum exp(s_j - m) v_j. If a tile has a larger maximum m', l and acc are rescaled by
exp(m - m'). The result is acc / l. The kernels use exp2, so log2(e) is part of the scale.

The query heads that share a KV head (GQA) are rows of one tile, so that K/V are read once for all
of them. A tile of the context that every row attends to in full is read without a mask. With a
sliding window, there are masked tiles on both sides of these:

    positions    before all | windows of   | every row      | queries
                 windows    | rows begin   | attends to all | of the tile
    tiles        not read   | masked       | not masked     | masked

A soft-cap c turns a score s into c * tanh(s / c). A sink is one more score of a head, without a
value. It is added to the sum of the first split.

What lies before all windows is not read, because its blocks can belong to other sequences by now,
and a masked NaN is still NaN.

M: rows of queries (TOKENS query tokens of GROUP heads). N: tokens in a tile of the context.
D: head_dim. M and D are rounded up to a power of two and masked.
"""

import triton
import triton.language as tl
from triton.language import constexpr

LOG2_E = constexpr(1.4426950408889634)


@triton.jit(
    do_not_specialize=["table_stride", "num_prefills", "num_splits", "least_tokens"],
    do_not_specialize_on_alignment=[
        "cu_seqlens_ptr",
        "context_lens_ptr",
        "tables_ptr",
        "long_queries_ptr",
    ],
)
def attend_kernel(
    # The layer: queries and output [num_tokens, num_heads, head_dim], and its KV cache.
    query_ptr,
    key_ptr,
    value_ptr,
    output_ptr,
    # What combine_splits_kernel reads, of each sequence with a decode or each token of a longer
    # query, and of each head and split. Unused with one split.
    split_outputs_ptr,
    log_sums_ptr,
    # The batch.
    cu_seqlens_ptr,
    context_lens_ptr,
    tables_ptr,
    long_queries_ptr,
    sinks_ptr,  # [num_heads], or None
    scale,
    table_stride,
    num_prefills,
    num_splits,
    least_tokens,  # of a split
    # The kind of queries, and the shape of the model.
    IS_DECODE: constexpr,
    NUM_KV_HEADS: constexpr,
    GROUP: constexpr,
    # The tile.
    TOKENS: constexpr,
    M: constexpr,
    N: constexpr,
    D: constexpr,
    # The cache.
    HEAD_DIM: constexpr,
    BLOCK_SIZE: constexpr,
    WINDOW: constexpr,  # tokens that a query attends to, or None
    SOFTCAP: constexpr,  # times log2(e), or None
):
    HAS_WINDOW: constexpr = WINDOW is not None
    if IS_DECODE:
        kv_head = tl.program_id(0)
        seq = tl.program_id(1)
        tile = 0
    else:
        # The last tiles of the batch come first. They attend to the longest contexts, and a long
        # program that starts late would leave the rest of the GPU idle.
        index = tl.num_programs(0) - 1 - tl.program_id(0)
        kv_head = tl.program_id(0) % NUM_KV_HEADS
        seq, tile = find_tile(
            index // NUM_KV_HEADS, cu_seqlens_ptr, long_queries_ptr, num_prefills, TOKENS
        )
    split = tl.program_id(2)
    query_start = tl.load(cu_seqlens_ptr + seq)
    query_len = tl.load(cu_seqlens_ptr + seq + 1) - query_start
    if (tile * TOKENS >= query_len) | ((query_len == 1) != IS_DECODE):
        return
    rows = tl.arange(0, M)
    dims = tl.arange(0, D)
    # The rows of a token are the heads of the group.
    tokens = tile * TOKENS + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_row = (rows < TOKENS * GROUP) & (tokens < query_len)
    query_rows = (query_start + tokens).to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    query_ptrs = query_ptr + query_rows[:, None] * HEAD_DIM + dims[None, :]
    query = tl.load(query_ptrs, mask=mask, other=0.0)

    # The queries are the last tokens of the context, and each attends up to its own position.
    context_len = tl.load(context_lens_ptr + seq)
    first_position = context_len - query_len + tile * TOKENS  # the tile's first token
    last_visible = context_len - query_len + tokens  # [M]
    visible_end = tl.minimum(context_len, first_position + TOKENS)  # to any row
    first_tile = 0
    if HAS_WINDOW:
        visible_start = tl.maximum(0, first_position + 1 - WINDOW)  # to any row
        # Tiles start at multiples of N, because the compiler then knows where blocks begin in them,
        # and needs fewer registers.
        first_tile = visible_start // N * N
    num_visible = visible_end - first_tile
    tokens_per_split = tl.maximum(tl.cdiv(num_visible, num_splits), least_tokens)
    tokens_per_split = tl.cdiv(tokens_per_split, N) * N
    is_whole = num_visible <= tokens_per_split  # not split
    if is_whole & (split > 0):
        return
    first = first_tile + split * tokens_per_split
    end = tl.minimum(first + tokens_per_split, visible_end)
    unmasked_start = first
    if HAS_WINDOW:
        # The window of the last row begins last.
        num_before = tl.maximum(0, visible_end - WINDOW - first)
        unmasked_start = first + tl.cdiv(num_before, N) * N
    num_seen_by_all = tl.maximum(0, tl.minimum(end, first_position + 1) - unmasked_start)
    num_unmasked = num_seen_by_all // N * N
    unmasked_end = unmasked_start + num_unmasked

    key_ptr += kv_head * HEAD_DIM
    value_ptr += kv_head * HEAD_DIM
    table_ptr = tables_ptr + tl.cast(seq, tl.int64) * table_stride
    acc = tl.zeros([M, D], dtype=tl.float32)
    row_sum = tl.zeros([M], dtype=tl.float32)
    row_max = tl.full([M], float("-inf"), dtype=tl.float32)
    # First the tiles that all rows attend to in full, then the others, in one loop: those on the
    # left are shifted next to those on the right. Two loops would need more registers.
    for IS_MASKED in tl.static_range(2):
        tiles_start = first + num_unmasked if IS_MASKED else unmasked_start
        tiles_end = end if IS_MASKED else unmasked_end
        for tile_start in range(tiles_start, tiles_end, N):
            start = tile_start
            if HAS_WINDOW and IS_MASKED:
                start = tl.where(tile_start < unmasked_end, tile_start - num_unmasked, tile_start)
            positions = start + tl.arange(0, N)
            exists = (positions < end) | (not IS_MASKED)
            if HAS_WINDOW and IS_MASKED:
                exists &= positions >= visible_start
            unsigned = positions.to(tl.uint32)  # divided by a power of two with a shift
            blocks = tl.load(table_ptr + unsigned // BLOCK_SIZE, mask=exists, other=0)
            slots = blocks * BLOCK_SIZE + (unsigned % BLOCK_SIZE).to(tl.int32)
            rows_of_cache = slots.to(tl.int64) * (NUM_KV_HEADS * HEAD_DIM)
            offsets = rows_of_cache[:, None] + dims[None, :]  # [N, D]
            # Slots past the end of a context or before all windows can be NaN, and NaN * 0 is NaN,
            # so they are not loaded.
            is_read = exists[:, None] & (dims < HEAD_DIM)[None, :]
            key = tl.load(key_ptr + offsets, mask=is_read, other=0.0)
            # The precision is that of float32, and has no effect on 16-bit operands.
            scores = tl.dot(query, tl.trans(key), input_precision="ieee")  # [M, N]
            if SOFTCAP is not None:
                scores = SOFTCAP / scale * (2 * tl.sigmoid(scores * (2 / SOFTCAP) * scale) - 1)
            if IS_MASKED:
                is_visible = positions[None, :] <= last_visible[:, None]
                if HAS_WINDOW and IS_DECODE:
                    is_visible = exists[None, :]  # all rows are of one query
                elif HAS_WINDOW:
                    is_visible &= positions[None, :] > last_visible[:, None] - WINDOW
                scores = tl.where(is_visible, scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale)
            # The maximum is finite if the row attends to a token so far. With a window, or in a
            # later split, some rows of a longer query do not, and -inf - -inf is NaN.
            base = new_max
            if IS_MASKED and (HAS_WINDOW or not IS_DECODE):
                base = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.exp2(tl.fma(scores, scale, -base[:, None]))
            rescale = tl.exp2(row_max - base)
            value = tl.load(value_ptr + offsets, mask=is_read, other=0.0)
            acc = acc * rescale[:, None]
            acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
            row_sum = row_sum * rescale + tl.sum(weights, axis=1)
            row_max = new_max

    if sinks_ptr is not None and split == 0:
        sinks = tl.load(sinks_ptr + heads).to(tl.float32) * LOG2_E
        new_max = tl.maximum(row_max, sinks)
        rescale = tl.exp2(row_max - new_max)
        acc = acc * rescale[:, None]
        row_sum = row_sum * rescale + tl.exp2(sinks - new_max)
        row_max = new_max

    # The sum is 0 for an empty split, which a short context or a padding row of a CUDA graph
    # can have. Its weight is exp2(-inf) = 0.
    normalized = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    split_rows = query_rows
    if IS_DECODE:
        split_rows = tl.cast(seq, tl.int64) * (NUM_KV_HEADS * GROUP) + heads
    split_rows = split_rows * num_splits + split
    if is_whole:
        output_ptrs = output_ptr + query_rows[:, None] * HEAD_DIM + dims[None, :]
        tl.store(output_ptrs, normalized.to(output_ptr.dtype.element_ty), mask=mask)
        if num_splits > 1:  # infinity says that there is nothing to combine
            infinity = tl.full([M], float("inf"), dtype=tl.float32)
            tl.store(log_sums_ptr + split_rows, infinity, mask=is_row)
    else:
        split_ptrs = split_outputs_ptr + split_rows[:, None] * HEAD_DIM + dims[None, :]
        tl.store(split_ptrs, normalized, mask=mask)
        tl.store(log_sums_ptr + split_rows, row_max + tl.log2(row_sum), mask=is_row)


@triton.jit
def find_tile(index, cu_seqlens_ptr, seqs_ptr, num_seqs, TOKENS: constexpr):
    """Return the sequence that tile `index` belongs to, and the index of the tile in the sequence.

    Only the tiles of the sequences in seqs_ptr are counted, or those of all sequences if it is
    None. All other sequences have one token. The batch does not list tiles. Those of the i-th of
    these sequences are counted from num_tokens // TOKENS + i, where num_tokens are the tokens of
    these sequences before it. This leaves room for an incomplete tile of every sequence. With
    TOKENS = 4, queries of 3, 1 and 6 tokens, and tiles of the long queries only:

        prefill    0    1
        sequence   0    2
        tiles      0  | 1  2  3        tile 3 has no token
    """
    # The last sequence whose first tile is at or before `index` is between low and high.
    low = 0
    high = num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        _, first_tile = _find_first_tile(middle, cu_seqlens_ptr, seqs_ptr, TOKENS)
        if first_tile <= index:
            low = middle
        else:
            high = middle - 1
    seq, first_tile = _find_first_tile(low, cu_seqlens_ptr, seqs_ptr, TOKENS)
    return seq, index - first_tile


@triton.jit
def _find_first_tile(i, cu_seqlens_ptr, seqs_ptr, TOKENS: constexpr):
    seq = i if seqs_ptr is None else tl.load(seqs_ptr + i)
    num_others = seq - i  # before it, of a token each
    return seq, (tl.load(cu_seqlens_ptr + seq) - num_others) // TOKENS + i


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["cu_seqlens_ptr"])
def combine_splits_kernel(
    split_outputs_ptr,
    log_sums_ptr,
    cu_seqlens_ptr,
    output_ptr,
    num_splits,
    NUM_HEADS: constexpr,
    D: constexpr,
    HEAD_DIM: constexpr,
    MAX_SPLITS: constexpr,
    IS_DECODE: constexpr,
):
    """Combine the splits of a decode, or of a token.

    Tokens are those of all sequences, so the rows of `output` that belong to decodes are undefined
    until decodes have run.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    token = row
    if IS_DECODE:
        token = tl.load(cu_seqlens_ptr + row).to(tl.int64)
        if tl.load(cu_seqlens_ptr + row + 1) - token != 1:
            return
    first = (row * NUM_HEADS + head) * num_splits
    if tl.load(log_sums_ptr + first) == float("inf"):
        return
    splits = tl.arange(0, MAX_SPLITS)
    dims = tl.arange(0, D)
    exists = splits < num_splits
    is_dim = dims < HEAD_DIM
    log_sums = tl.load(log_sums_ptr + first + splits, mask=exists, other=float("-inf"))
    mask = exists[:, None] & is_dim[None, :]
    split_ptrs = split_outputs_ptr + (first + splits)[:, None] * HEAD_DIM + dims[None, :]
    outputs = tl.load(split_ptrs, mask=mask, other=0.0)
    largest = tl.max(log_sums, axis=0)
    weights = tl.exp2(log_sums - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(weights, axis=0)
    output = tl.sum(outputs * weights[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    output_ptrs = output_ptr + (token * NUM_HEADS + head) * HEAD_DIM + dims
    tl.store(output_ptrs, output.to(output_ptr.dtype.element_ty), mask=is_dim)


# slot_mapping_ptr can have any alignment in a packed batch.
@triton.jit(do_not_specialize_on_alignment=["slot_mapping_ptr"])
def store_kvcache_kernel(
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
    # 64 bits, because slot * row_size overflows 32 bits in large caches.
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot >= 0:
        offsets = tl.arange(0, BLOCK)
        mask = offsets < row_size
        key = tl.load(key_ptr + token * key_stride + offsets, mask=mask)
        tl.store(key_cache_ptr + slot * row_size + offsets, key, mask=mask)
        value = tl.load(value_ptr + token * value_stride + offsets, mask=mask)
        tl.store(value_cache_ptr + slot * row_size + offsets, value, mask=mask)
