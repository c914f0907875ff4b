"""The first kernel of a CUDA graph. It lays out the batch of a step for the kernels after it.

A step arrives as batch/packing.py packs it, without gaps. A graph reads each array at a fixed
address. There, arrays are longer than those of the step, and block tables are as wide as
max_model_len allows:

    packed    | sizes | input_ids | positions | ... | block_tables | ...
    static    | sizes | input_ids   0 0 | positions   0 0 | ... | block_tables           | ...
"""

import triton
import triton.language as tl
from triton.language import constexpr

# What the last entries of an array are, if not a number of batch.py.
LAST_ENTRY = constexpr(1)  # the step's last entry
NEXT_SEQUENCES = constexpr(2)  # the sequences after those of the step
PADDING = {"last entry": LAST_ENTRY.value, "next sequences": NEXT_SEQUENCES.value}


@triton.jit
def lay_out_kernel(
    packed_ptr,
    static_ptr,
    # A row of 5 numbers for each array: which of the sizes is its length in packed_ptr, where it
    # begins in static_ptr, its length there, the stride of its rows there, and what its last
    # entries are. The length of block tables is 0 here, because their entries are not padded.
    arrays_ptr,
    NUM_SIZES: constexpr,
    NUM_SEQS: constexpr,  # where the number of sequences is among the sizes
    ARRAYS: constexpr,  # how many, rounded up to a power of two
    BLOCK: constexpr,
):
    index = tl.program_id(0)
    others = tl.arange(0, ARRAYS)
    sizes = tl.load(arrays_ptr + 5 * others, mask=others < index, other=0)
    lengths = tl.load(packed_ptr + sizes, mask=others < index, other=0)
    source_ptr = packed_ptr + NUM_SIZES + tl.sum(lengths)
    length = tl.load(packed_ptr + tl.load(arrays_ptr + 5 * index))
    arrays_ptr += 5 * index
    static_ptr += tl.load(arrays_ptr + 1)
    static_length = tl.load(arrays_ptr + 2)
    stride = tl.load(arrays_ptr + 3)
    padding = tl.load(arrays_ptr + 4)
    num_seqs = tl.load(packed_ptr + NUM_SEQS)
    width = tl.where(stride == 1, 1, tl.maximum(length // tl.maximum(num_seqs, 1), 1))
    last = tl.load(source_ptr + length - 1, mask=length > 0, other=0)
    start = tl.program_id(1) * BLOCK
    for first in range(start, tl.maximum(length, static_length), tl.num_programs(1) * BLOCK):
        entries = first + tl.arange(0, BLOCK)
        exists = entries < length
        values = tl.load(source_ptr + entries, mask=exists, other=0)
        padded = tl.where(padding == NEXT_SEQUENCES, num_seqs + entries - length, padding)
        padded = tl.where(padding == LAST_ENTRY, last, padded)
        targets = entries // width * stride + entries % width
        is_written = exists | (entries < static_length)
        tl.store(static_ptr + targets, tl.where(exists, values, padded), mask=is_written)
