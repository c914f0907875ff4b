"""Check the attention kernels of every available backend against torch in float32, and time them.

    python -m nanovllm.kernels.bench --dtype float32

self_tests.py makes the inputs. Caches are flushed before each timed call, because in a model
the weights of the other layers evict the K/V between two calls.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from itertools import product

import torch

from nanovllm.kernels.select import BACKENDS, select_backend
from nanovllm.kernels.self_tests import BatchShape, compare_with_torch
from nanovllm.layers.attention import AttentionShape
from nanovllm.utils.helpers import run_program

LAYERS = {
    "Qwen3-0.6B": AttentionShape(16, 8, 128, 128**-0.5),
    "Gemma 3 1B, window 512": AttentionShape(4, 1, 256, 256**-0.5, window=512),
}
# For each type of device: a prefill and decodes, as num_seqs, context_len and query_len.
BATCHES = {
    "cuda": [(1, 8192, 8192), (256, 1024, 1), (1, 1024, 1), (1, 32768, 1)],
    "cpu": [(1, 2048, 2048), (32, 256, 1), (1, 1024, 1), (1, 32768, 1)],
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
    while len(seconds) < 3 or time.perf_counter() < end:
        flush.sum()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def measure(dtype_name: str, device: torch.device) -> None:
    """Check and time all kernels and print a table. Raises RuntimeError if one is wrong."""
    dtype = getattr(torch, dtype_name)
    print("| layer | sequences x tokens | query | backend | dtype | time | max error |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for name in reversed(BACKENDS):  # the fastest backend last
        try:
            shapes = list(LAYERS.values())
            backend, block_size = select_backend(name, device, dtype, shapes, None)
        except ValueError as error:
            print(error, file=sys.stderr)
            continue
        for (layer, shape), sizes in product(LAYERS.items(), BATCHES[device.type]):
            batch = BatchShape(*sizes, block_size)
            tolerance = TOLERANCES[dtype_name]
            attend, deviation = compare_with_torch(backend, shape, batch, device, dtype, tolerance)
            figures = f"{time_call(attend, device) * 1e3:.4g} ms | {deviation:.2g}"
            what = f"{layer} | {batch.num_seqs} x {batch.context_len} | {batch.query_len}"
            print(f"| {what} | {name} | {dtype_name} | {figures} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dtype", default="bfloat16", choices=TOLERANCES)
    measure(parser.parse_args().dtype, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


if __name__ == "__main__":
    run_program(main)
