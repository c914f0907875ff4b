"""Times tiles, warps, stages and splits of the Triton attention kernel, each checked first.

Take a choice that is faster than the present one by more than the spread of that one's three runs.
Without a GPU, a few tiny shapes run in Triton's interpreter.
"""

from functools import partial
from itertools import product

from attempts import attempt
from internals import ON_GPU, Shape, time_attention

BLOCK_SIZE = 16
DTYPE = "bfloat16" if ON_GPU else "float32"  # the interpreter cannot multiply bfloat16
NUM_KV_HEADS = 8 if ON_GPU else 1
# Rows, tokens, warps, stages
DECODE_TILES = [
    *[(16, 16, 1, 2), (16, 16, 2, 2), (16, 32, 1, 2), (16, 32, 2, 2), (16, 32, 1, 5)],
    *[(16, 64, 4, 3), (16, 64, 2, 3), (16, 128, 4, 3), (16, 128, 8, 3)],
]
PREFILL_TILES = list(product([64, 128], [64, 128], [4, 8], [2, 5]))
# Not 32 tokens, because such tiles fault on Hopper with Triton 3.6 and 3.7 (issue 11366).
WIDE_HEAD_TILES = list(product([64], [64], [4, 8], [2, 3, 5]))
PROGRAMS = [2, 4, 16]  # per multiprocessor; the present number is 8
BEFORE = {"tile": (16, 64, 4, 3), "programs": 4, "min_tokens": 256}  # up to November 2026


def time_choice(shape: Shape, **choice) -> str:
    seconds, error = time_attention(shape, DTYPE, **choice)
    num_tokens = shape.num_seqs * shape.context_len
    if shape.query_len == 1:
        work = 4 * num_tokens * NUM_KV_HEADS * shape.head_dim  # bytes
        rate = f"{work / seconds / 1e9:.0f} GB/s"
    else:
        work = 2 * num_tokens * shape.context_len * shape.num_heads * shape.head_dim  # FLOPs
        rate = f"{work / seconds / 1e12:.0f} TFLOP/s"
    return f"{1e3 * seconds:.4f} ms, {rate}, error {error:.1g}"


def sweep(name: str, shape: Shape, tiles: list, programs: list[int]) -> None:
    choices: list[dict] = [{}]
    choices += [{"tile": tile} for tile in tiles]
    choices += [{"programs": number} for number in programs]
    if programs:
        choices += [{"min_tokens": 256}, {"programs": 4, "min_tokens": 256}, BEFORE]
    for choice in [*choices, {}, {}]:
        title = f"{name} {shape.num_seqs} x {shape.context_len}, {choice or 'present'}"
        attempt(title, partial(time_choice, shape, **choice))


def make_shape(num_seqs: int, context_len: int, query_len: int, group: int, head_dim: int) -> Shape:
    num_heads = NUM_KV_HEADS * group
    return Shape(num_seqs, context_len, query_len, num_heads, NUM_KV_HEADS, head_dim, BLOCK_SIZE)


if not ON_GPU:
    sweep("decode", make_shape(2, 40, 1, 2, 32), [(16, 32, 4, 3)], [2])
    sweep("prefill", make_shape(1, 40, 40, 2, 32), [(32, 16, 4, 2)], [])
else:
    for num_seqs, context_len in (
        (1, 1024),
        (2, 1024),
        (4, 1024),
        (8, 1024),
        (32, 1024),
        (256, 1024),
        (32, 4096),
        (1, 4096),
    ):
        sweep("decode", make_shape(num_seqs, context_len, 1, 2, 128), DECODE_TILES, PROGRAMS)
    sweep("prefill", make_shape(1, 8192, 8192, 2, 128), PREFILL_TILES, [])
    sweep("prefill, head_dim 256", make_shape(1, 8192, 8192, 1, 256), WIDE_HEAD_TILES, [])
