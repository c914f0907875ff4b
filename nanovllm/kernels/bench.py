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

import torch

from nanovllm.backends import BACKENDS
from nanovllm.kernels.attention_check import BatchShape, compare_with_torch
from nanovllm.kernels.select import select_backend
from nanovllm.layers.attention import AttentionShape
from nanovllm.utils.terminal import run_program

QWEN3 = AttentionShape(16, 8, 128, 128**-0.5)  # Qwen3-0.6B
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
    num_seqs: int, context_len: int, prompt_len: int, dtype_name: str, device: torch.device
) -> None:
    """Check and time all kernels and print a table. Raises RuntimeError if one is wrong.

    Decodes have `num_seqs` contexts of `context_len` tokens. A prefill has `prompt_len` tokens.
    """
    dtype = getattr(torch, dtype_name)
    hardware = platform.processor() or platform.machine()
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    print(f"\n{hardware}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("| kernel | sequences x tokens | backend | dtype | time | rate | max error |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    token_gb = 2 * QWEN3.num_kv_heads * QWEN3.head_dim * dtype.itemsize / 1e9
    prompt_tflop = 2 * 2 * QWEN3.num_heads * QWEN3.head_dim * prompt_len**2 / 2 / 1e12
    tolerance = TOLERANCES[dtype_name]
    for name in reversed(BACKENDS):  # the fastest backend last
        try:
            backend, block_size = select_backend(name, device, dtype, [QWEN3], None)
        except ValueError as error:
            print(error, file=sys.stderr)
            continue
        decodes = BatchShape(num_seqs, context_len, 1, block_size)
        prompt = BatchShape(1, prompt_len, prompt_len, block_size)
        _, decode, decode_error = compare_with_torch(
            backend, QWEN3, decodes, device, dtype, tolerance
        )
        store, prefill, prefill_error = compare_with_torch(
            backend, QWEN3, prompt, device, dtype, tolerance
        )

        stored_gb = 2 * prompt_len * token_gb  # read and written
        context_gb = num_seqs * context_len * token_gb
        kernels = [
            ("store_kvcache", f"1 x {prompt_len}", store, stored_gb, "GB/s", 0.0),
            ("decode", f"{num_seqs} x {context_len}", decode, context_gb, "GB/s", decode_error),
            ("prefill", f"1 x {prompt_len}", prefill, prompt_tflop, "TFLOP/s", prefill_error),
        ]
        for kernel, shape, call, work, unit, off_by in kernels:
            seconds = time_call(call, device)
            figures = f"{seconds * 1e3:.4g} ms | {work / seconds:.4g} {unit} | {off_by:.2g}"
            print(f"| {kernel} | {shape} | {name} | {dtype_name} | {figures} |", flush=True)


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
        measure(256, 1024, 8192, args.dtype, torch.device("cuda"))
    else:
        measure(32, 256, 2048, args.dtype, torch.device("cpu"))


if __name__ == "__main__":
    run_program(main)
