"""Check the attention kernels of every available backend against torch in float32, and time them.

    python -m nanovllm.kernels.bench --dtype float32

attention_check.py makes the inputs. Caches are flushed before each timed call, because in a model
the weights of the other layers evict the K/V between two calls.
"""

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from itertools import product

import torch

from nanovllm.kernels.attention_check import BatchShape, compare_with_torch
from nanovllm.kernels.select import select_backend
from nanovllm.layers.attention import AttentionShape
from nanovllm.layers.backends import BACKENDS
from nanovllm.utils.helpers import run_program

LAYERS = {
    "Qwen3-0.6B": AttentionShape(16, 8, 128, 128**-0.5),
    "Gemma 3 1B, full": AttentionShape(4, 1, 256, 256**-0.5),
    "Gemma 3 1B, window 512": AttentionShape(4, 1, 256, 256**-0.5, window=512),
}
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 8e-2}  # what rounding explains


def time_call(call: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of a call with flushed caches, on a GPU without the launch."""
    if device.type == "cuda":
        # do_bench clears the L2 cache before each call, which also hides the launch.
        from triton.testing import do_bench

        return do_bench(call, return_mode="median") / 1e3
    flush = torch.ones(1 << 26)  # 256 MiB
    seconds: list[float] = []
    end = time.perf_counter() + 0.5
    while len(seconds) < 5 or time.perf_counter() < end:
        flush.sum()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def measure(
    decodes: list[tuple[int, int]], prompt_len: int, dtype_name: str, device: torch.device
) -> None:
    """Check and time all kernels and print a table. Raises RuntimeError if one is wrong.

    `decodes` are numbers of sequences and tokens of their contexts. A prefill has `prompt_len`
    tokens. Rates count the tokens that queries attend to.
    """
    dtype = getattr(torch, dtype_name)
    hardware = platform.processor() or platform.machine()
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    print(f"\n{hardware}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("| kernel | layer | sequences x tokens | backend | dtype | time | rate | max error |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    shapes = list(LAYERS.values())
    for name in reversed(BACKENDS):  # the fastest backend last
        try:
            backend, block_size = select_backend(name, device, dtype, shapes, None)
        except ValueError as error:
            print(error, file=sys.stderr)
            continue
        batches = [BatchShape(1, prompt_len, prompt_len, block_size)]
        batches += [BatchShape(*decode, 1, block_size) for decode in decodes]
        for (layer, shape), batch in product(LAYERS.items(), batches):
            tolerance = TOLERANCES[dtype_name]
            attend, deviation = compare_with_torch(backend, shape, batch, device, dtype, tolerance)
            num_seqs, num_tokens, query_len, _ = batch
            visible = min(num_tokens, shape.window or num_tokens)
            if query_len == 1:
                kernel = "decode"
                unit = "GB/s"
                num_numbers = 2 * num_seqs * visible * shape.num_kv_heads * shape.head_dim
                work = num_numbers * dtype.itemsize / 1e9
            else:
                kernel = "prefill"
                unit = "TFLOP/s"
                num_pairs = visible * (num_tokens - visible / 2)
                work = 2 * 2 * num_pairs * shape.num_heads * shape.head_dim / 1e12
            seconds = time_call(attend, device)
            figures = f"{seconds * 1e3:.4g} ms | {work / seconds:.4g} {unit} | {deviation:.2g}"
            sizes = f"{num_seqs} x {num_tokens}"
            row = f"{kernel} | {layer} | {sizes} | {name} | {dtype_name} | {figures}"
            print(f"| {row} |", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Check and time the attention kernels of all available backends.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--dtype", default="bfloat16", choices=TOLERANCES, help="dtype of K/V and computation"
    )
    args = parser.parse_args(argv)
    if torch.cuda.is_available():
        measure([(256, 1024), (1, 1024), (1, 32768)], 8192, args.dtype, torch.device("cuda"))
    else:
        measure([(32, 256), (1, 1024), (1, 32768)], 2048, args.dtype, torch.device("cpu"))


if __name__ == "__main__":
    run_program(main)
