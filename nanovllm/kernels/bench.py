"""Check the attention kernels of every backend that runs here against the torch backend in float32, and time them.

    python -m nanovllm.kernels.bench --num-seqs 32 --context-len 512 --dtype float32

They work on random numbers in blocks of random order, in a KV cache that holds NaN everywhere else: what is read too much
shows. They are timed with nothing of their data in a cache, as in a model, whose weights have passed through in between.

bench.py at the root sets whole runs against the ceilings of the roofline (Williams et al. 2009), which are measured here: the
bandwidth of the memory and the rate of a large matrix product.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from nanovllm.batch import Batch
from nanovllm.kernels import BACKENDS, select_backend
from nanovllm.layers import attention as oracle
from nanovllm.layers.attention import Backend

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 8, 128  # of Qwen3-0.6B
# The largest error that rounding explains, in units of the root mean square of a head's numbers.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}
ABOVE = "a share above 100% (null in JSON) means that caches or kernels outrun the measured ceilings"


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
    print(f"\n{describe_hardware(device)}; {find_versions(['torch', 'triton', 'flash_attn'])}\n")
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


class Ceilings(NamedTuple):
    bytes_per_second: float
    flops_per_second: float

    def __str__(self) -> str:
        return f"{self.bytes_per_second / 1e9:.4g} GB/s, {self.flops_per_second / 1e12:.4g} TFLOP/s"


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """The best of some large copies (GPU: read, write) or reductions (CPU: read), and of matrix products in `dtype`."""

    def best(statement: str, **tensors: Tensor) -> float:
        timer = Timer(statement, globals=tensors, num_threads=torch.get_num_threads())
        return min(timer.blocked_autorange(min_run_time=0.3).times)

    on_gpu = device.type == "cuda"
    source = torch.rand(1 << 26, device=device)  # 256 MiB, more than a cache holds
    read = best("target.copy_(source)", source=source, target=source.clone()) if on_gpu else best("source.max()", source=source)
    if device.type == "cpu" and dtype == torch.float16:
        dtype = torch.float32  # most CPUs multiply it a hundred times as fast
    side = 8192 if on_gpu else 1024
    left, right = torch.randn(2, side, side, device=device).to(dtype)
    return Ceilings(source.nbytes * (1 + on_gpu) / read, 2 * side**3 / best("left @ right", left=left, right=right))


def find_share(least: float, seconds: float) -> float | None:
    """The share of the roofline of work that could take `least` seconds; None where it would be above 1."""
    return least / seconds if least <= seconds else None


def describe_hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {torch.cuda.get_device_properties(device).total_memory / 2**30:.0f} GiB"
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def find_versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of Python and of those of `packages` that are installed."""
    versions = {name: getattr(import_module(name), "__version__", "of this directory") for name in packages if find_spec(name)}
    return {"python": platform.python_version(), **versions}


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
