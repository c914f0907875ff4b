"""Check the attention kernels of every backend that runs here against the torch backend in float32, and time them.

    python -m nanovllm.kernels.bench --num-seqs 32 --context-len 512 --dtype float32

trial.py says what they work on. They are timed with nothing of their data in a cache, as in a model, whose weights have passed
through in between.
"""

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable

import torch

from nanovllm.backends import BACKENDS
from nanovllm.kernels import select_backend
from nanovllm.kernels.trial import check

HEADS = NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 8, 128  # of Qwen3-0.6B
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 8e-2}  # what rounding explains


def time_call(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call whose data are in no cache; on a GPU its own time, without the host's launch."""
    if device.type == "cuda":
        from triton.testing import (
            do_bench,
        )  # it clears the L2 cache before each call, and the launch hides behind that

        return do_bench(call, return_mode="median") / 1e3
    flush, seconds, end = torch.ones(1 << 26), list[float](), time.perf_counter() + 0.5  # 256 MiB
    while len(seconds) < 5 or time.perf_counter() < end:
        flush.sum()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def measure(
    num_seqs: int, context_len: int, prompt_len: int, dtype_name: str, device: torch.device
) -> None:
    """Check and time all kernels and print a table. Raises RuntimeError if one is wrong."""
    dtype = getattr(torch, dtype_name)
    hardware = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or platform.machine()
    )
    print(f"\n{hardware}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("| kernel | sequences x tokens | backend | dtype | time | rate | max error |")
    print(f"|{' --- |' * 7}", flush=True)
    token_gb = 2 * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize / 1e9
    prompt_tflop = 2 * 2 * NUM_HEADS * HEAD_DIM * prompt_len**2 / 2 / 1e12
    for name in reversed(BACKENDS):  # the fastest backend last
        try:
            backend, block_size = select_backend(name, device, dtype, HEAD_DIM, None)
        except ValueError as error:
            print(error, file=sys.stderr)
            continue
        settings = block_size, dtype, device, HEADS, TOLERANCE[dtype_name]
        _, decode, decode_off = check(backend, num_seqs, context_len, 1, *settings)
        store, prefill, prefill_off = check(backend, 1, prompt_len, prompt_len, *settings)
        for kernel, call, shape, work, unit, off in (
            (
                "store_kvcache",
                store,
                f"1 x {prompt_len}",
                2 * prompt_len * token_gb,
                "GB/s",
                0.0,
            ),  # read and written
            (
                "decode",
                decode,
                f"{num_seqs} x {context_len}",
                num_seqs * context_len * token_gb,
                "GB/s",
                decode_off,
            ),
            ("prefill", prefill, f"1 x {prompt_len}", prompt_tflop, "TFLOP/s", prefill_off),
        ):
            seconds = time_call(call, device)
            figures = f"{seconds * 1e3:.4g} ms | {work / seconds:.4g} {unit} | {off:.2g}"
            print(f"| {kernel} | {shape} | {name} | {dtype_name} | {figures} |", flush=True)


def main(argv: list[str] | None = None) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = (256, 1024, 8192) if device.type == "cuda" else (32, 256, 2048)
    parser = argparse.ArgumentParser(
        description="Check and time the attention kernels that run here."
    )
    for name, size in zip(
        ("num-seqs", "context-len", "prompt-len"), sizes
    ):  # of the decodes; of the prefill
        parser.add_argument(
            f"--{name}", type=int, default=size, metavar="N", help=f"{size} if not given"
        )
    parser.add_argument("--dtype", default="bfloat16", choices=TOLERANCE)
    args = parser.parse_args(argv)
    if min(args.num_seqs, args.context_len, args.prompt_len) < 1:
        parser.error("--num-seqs, --context-len and --prompt-len must be at least 1")
    measure(args.num_seqs, args.context_len, args.prompt_len, args.dtype, device)


if __name__ == "__main__":
    main()
