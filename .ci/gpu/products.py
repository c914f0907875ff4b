"""Times products of few rows and the sampler, old and new side by side, in microseconds.

    products.py            products of the shapes of Qwen3 models, beside cuBLAS
    products.py sampler    sampling for 1, 32 and 256 rows

A CUDA graph computes the layers of a model, so no weight is in the L2 cache. Quantized weights are
timed with the kernel for many rows and with the one for few. The last line of a shape names the
fastest tile for one row and the most rows for which it is faster than cuBLAS. Each result is
compared with plain torch, and a row must have the same numbers beside any others. Without a GPU,
everything is tiny.
"""

import json
import sys
from functools import partial
from itertools import product

from attempts import attempt
from internals import DEVICE, ON_GPU, Products, describe_hardware, time_in_graph, time_sampler

ROWS = [1, 2, 4]
TILES = list(product([1, 2], [4, 8]))  # outputs, warps
SHAPES = [  # qkv, o, gate_up and down of Qwen3-0.6B, 1.7B, 4B and 8B
    *[(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)],
    *[(4096, 2048), (2048, 2048), (12288, 2048), (2048, 6144)],
    *[(6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728)],
    *[(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)],
]
COLD_BYTES = 300e6  # several times an L2 cache
NUM_ROWS = [1, 32, 256]
BLOCKS = list(product([1024, 2048, 4096, 8192], [4, 8]))  # tokens, warps
VOCAB_SIZE = 151936
if not ON_GPU:
    TILES, SHAPES, COLD_BYTES = [(2, 4)], [(32, 80)], 1
    NUM_ROWS, BLOCKS, VOCAB_SIZE = [2], [(1024, 4)], 3000


def compare_products(shape: tuple[int, int]) -> str:
    num_layers = max(1, int(COLD_BYTES / (2 * shape[0] * shape[1])))
    best: tuple = ()
    max_rows = 0
    pairs = []
    for num_rows in ROWS:
        products = Products(shape, num_rows, num_layers)
        old = time_in_graph(products.list_calls(None))
        times = {}
        for tile in TILES:
            products.check(tile)
            times[tile] = time_in_graph(products.list_calls(tile))
        best = best or min(times, key=times.__getitem__)
        new = times[best]
        shown = ", ".join([f"{tile} {us:.2f}" for tile, us in times.items()])
        codes = []
        for bits in (8, 4) if ON_GPU else ():  # the interpreter cannot multiply bfloat16
            products = Products(shape, num_rows, 2 * num_layers, bits)
            products.check(best)
            other, this = [time_in_graph(products.list_calls(tile)) for tile in (None, best)]
            codes.append(f"int{bits} {other:.2f}, {this:.2f}")
        print(f"| {shape}, {num_rows} rows | cuBLAS {old:.2f} | {shown} | {' | '.join(codes)} |")
        pairs.append(f"{old:.1f}, {new:.1f}")
        if new < old and num_rows // 2 <= max_rows:
            max_rows = num_rows
    print(json.dumps({"measured": str(shape), "hardware": describe_hardware(DEVICE), "us": pairs}))
    return f"{shape}: {max_rows} rows, {best[0]} outputs, {best[1]} warps; {'   '.join(pairs)}"


def compare_samplers(num_rows: int) -> str:
    """Time logits of a model with random weights, those of a real one, and the worst case.

    With equal logits and a tiny temperature the noise of all tokens is computed, as before.
    """
    fastest: dict = {}
    for block, num_warps in BLOCKS:
        kinds = {"all noise": (0.0, 1e-9), "random weights": (0.64, 0.6), "peaked": (3.0, 0.6)}
        times = []
        for name, (spread, temperature) in kinds.items():
            us = time_sampler(num_rows, VOCAB_SIZE, spread, temperature, block, num_warps)
            times.append(f"{name} {us:.1f}")
            fastest[us] = (name, block, num_warps)
        print(
            f"| sampler, {num_rows} rows, {block} tokens, {num_warps} warps | {', '.join(times)} |"
        )
    return f"fastest {fastest[min(fastest)]}"


if __name__ == "__main__":
    results = []
    if sys.argv[1:] == ["sampler"]:
        for number in NUM_ROWS:
            results.append(attempt(f"sampler {number} rows", partial(compare_samplers, number)))
    else:
        for shape in SHAPES:
            results.append(attempt(f"product {shape}", partial(compare_products, shape)))
    sys.exit(0 if all(results) else 1)
