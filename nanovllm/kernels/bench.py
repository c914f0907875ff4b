"""Check the attention kernels of every backend that runs here against the torch backend in float32, and time them.

    python -m nanovllm.kernels.bench --num-seqs 32 --context-len 512 --dtype float32

They work on random numbers in blocks of random order, in a KV cache that holds NaN everywhere else: what is read too much
shows. They are timed with nothing of their data in a cache, as in a model, whose weights have passed through in between.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from itertools import product

import torch

from nanovllm.batch import Batch
from nanovllm.kernels import BACKENDS, select_backend
from nanovllm.layers import attention as oracle
from nanovllm.layers.attention import Backend

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 8, 128  # of Qwen3-0.6B
# The largest error that rounding explains, in units of the root mean square of a head's numbers.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}


def make_batch(num_seqs: int, context_len: int, query_len: int, block_size: int, device: torch.device) -> Batch:
    """Sequences in random blocks of a pool twice as large as they need; slot_mapping covers the whole contexts."""
    blocks = torch.randperm(2 * num_seqs * -(-context_len // block_size), dtype=torch.int32, device=device)
    tables = blocks.view(2, num_seqs, -1)[0]
    positions = torch.arange(context_len, dtype=torch.int32, device=device)
    slots = (tables[:, positions // block_size] * block_size + positions % block_size).flatten()
    bounds = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * query_len
    context_lens = torch.full((num_seqs,), context_len, dtype=torch.int32, device=device)
    return Batch(positions, positions, slots, bounds, context_lens, tables, query_len, context_len, bounds[1:] - 1, query_len)


def check(
    kernel: str, backend: Backend, num_seqs: int, num_tokens: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Callable[[], object], float]:
    """The kernel as a call to time, and its largest error. Raises RuntimeError if that is more than rounding."""
    randn = partial(torch.randn, device=device)
    batch = make_batch(num_seqs, num_tokens, 1 if kernel == "decode" else num_tokens, block_size, device)
    query = randn(num_seqs * batch.max_seqlen_q, NUM_HEADS, HEAD_DIM).to(dtype)
    key, value = randn(2, num_seqs * num_tokens, NUM_KV_HEADS, HEAD_DIM).to(dtype)
    shape = 2, 2 * batch.block_tables.numel(), block_size, NUM_KV_HEADS, HEAD_DIM
    kv_cache, expected_cache = (torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(2))
    oracle.store_kvcache(key, value, expected_cache, batch.slot_mapping)
    call: Callable[[], object] = partial(backend.store_kvcache, key, value, kv_cache, batch.slot_mapping)
    call()
    if not torch.equal(kv_cache.view(torch.uint8), expected_cache.view(torch.uint8)):  # as bytes: NaN equals NaN
        raise RuntimeError(f"{backend.NAME}: store_kvcache writes other slots than it is told, or other numbers")
    error = 0.0
    if kernel != "store_kvcache":
        call = attend = partial(backend.attend, query, kv_cache, batch, HEAD_DIM**-0.5)
        expected = oracle.attend(query.float(), kv_cache.float(), batch, HEAD_DIM**-0.5)
        error = ((attend() - expected).abs() / expected.square().mean(-1, keepdim=True).sqrt()).max().item()
    if not error <= TOLERANCE[dtype]:  # nor if it is NaN
        raise RuntimeError(f"{backend.NAME}: {kernel} in {dtype} is off by {error:.2g}")
    return call, error


def time_call(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call whose data are in no cache; on a GPU its own time, without the host's launch."""
    if device.type == "cuda":
        from triton.testing import do_bench  # it clears the L2 cache before each call, and the launch hides behind that

        return do_bench(call, return_mode="median") / 1e3
    flush, seconds, end = torch.ones(1 << 26), list[float](), time.perf_counter() + 0.5  # 256 MiB
    while len(seconds) < 5 or time.perf_counter() < end:
        flush.sum()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def measure(args: argparse.Namespace, device: torch.device) -> list[dict[str, object]]:
    """Check and time all kernels and print a table. Returns its rows."""
    dtype, backends = getattr(torch, args.dtype), dict[str, tuple[Backend, int]]()
    for name in reversed(BACKENDS):  # the torch backend first
        try:
            backends[name] = select_backend(name, device, dtype, HEAD_DIM, None)
        except ValueError as error:
            print(error)
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    print(f"\n{hardware}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("| kernel | sequences x tokens | backend | dtype | time | rate | max error |")
    print(f"|{' --- |' * 7}", flush=True)
    token_bytes = 2 * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize
    cases = [  # kernel, sequences, tokens of each; GB to move or TFLOP to do
        ("store_kvcache", 1, args.prompt_len, 2 * args.prompt_len * token_bytes / 1e9, "GB/s"),  # read and written
        ("decode", args.num_seqs, args.context_len, args.num_seqs * args.context_len * token_bytes / 1e9, "GB/s"),
        ("prefill", 1, args.prompt_len, 2 * 2 * NUM_HEADS * HEAD_DIM * args.prompt_len**2 / 2 / 1e12, "TFLOP/s"),
    ]
    rows: list[dict[str, object]] = []
    for (kernel, seqs, tokens, work, unit), (name, (backend, block_size)) in product(cases, backends.items()):
        call, off = check(kernel, backend, seqs, tokens, block_size, dtype, device)
        seconds = time_call(call, device)
        row = {"kernel": kernel, "shape": f"{seqs} x {tokens}", "backend": name, "dtype": args.dtype}
        figures = f"{seconds * 1e3:.4g} ms", f"{work / seconds:.4g} {unit}", f"{off:.2g}"
        print(f"| {' | '.join([*row.values(), *figures])} |", flush=True)
        rows.append({**row, "seconds": seconds, "rate": work / seconds, "unit": unit, "max_error": off})
    return rows


def main(argv: list[str] | None = None) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = {"num_seqs": 256, "context_len": 1024, "prompt_len": 8192}  # sequences that decode, and a prompt that is prefilled
    if device.type == "cpu":
        sizes = {"num_seqs": 32, "context_len": 256, "prompt_len": 2048}
    parser = argparse.ArgumentParser(description="Check and time the attention kernels that run here.")
    for name, size in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size, metavar="N", help=f"at least 1 ({size})")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--json", action="store_true", help="print one line of JSON, and everything else on stderr")
    args = parser.parse_args(argv)
    for name in sizes:
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    with redirect_stdout(sys.stderr if args.json else sys.stdout):
        rows = measure(args, device)
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
