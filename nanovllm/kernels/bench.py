"""Check and time the attention kernels of every backend that runs here.

    python -m nanovllm.kernels.bench --num-seqs 32 --context-len 512 --dtype float32

Each kernel works on random numbers in blocks of random order, and must agree with the torch backend in float32. Memory
that it should write, or should leave alone, holds NaN before, so that whatever it forgets or touches shows. It is timed
with nothing of its data in a cache, as in a model, whose weights and other layers have passed through in between.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from nanovllm.batch import Batch
from nanovllm.kernels import BACKENDS, select_backend
from nanovllm.kernels.machine import ABOVE, describe_hardware, find_share, find_versions, measure_ceilings
from nanovllm.layers import attention as oracle
from nanovllm.layers.attention import Backend

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 8, 128  # of Qwen3-0.6B
# The largest error that rounding explains, in units of the root mean square of a head's numbers.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}
ON_GPU = {"num_seqs": 256, "context_len": 1024, "prompt_len": 8192}
ON_CPU = {"num_seqs": 32, "context_len": 256, "prompt_len": 2048}


def make_batch(num_seqs: int, context_len: int, query_len: int, block_size: int, device: torch.device) -> Batch:
    """Sequences in random blocks of a pool twice as large as they need; slot_mapping covers the whole contexts."""
    table = torch.randperm(2 * num_seqs * -(-context_len // block_size), device=device).view(2, num_seqs, -1)[0]
    positions = torch.arange(context_len, device=device)
    return Batch(
        input_ids=positions[:0],
        positions=positions[:0],
        slot_mapping=(table[:, positions // block_size] * block_size + positions % block_size).flatten(),
        cu_seqlens_q=torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * query_len,
        context_lens=torch.full((num_seqs,), context_len, dtype=torch.int32, device=device),
        block_tables=table.int(),
        max_seqlen_q=query_len,
        max_seqlen_k=context_len,
        logits_indices=positions[:0],
    )


def check(
    kernel: str, backend: Backend, num_seqs: int, num_tokens: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Callable[[], object], float]:
    """The kernel as a call to time, and its largest error. Raises RuntimeError if that is more than rounding."""
    query_len, scale = 1 if kernel == "decode" else num_tokens, HEAD_DIM**-0.5
    batch = make_batch(num_seqs, num_tokens, query_len, block_size, device)
    query = torch.randn(num_seqs * query_len, NUM_HEADS, HEAD_DIM, device=device).to(dtype)
    key_value = torch.randn(2, num_seqs * num_tokens, NUM_KV_HEADS, HEAD_DIM, device=device).to(dtype)
    num_blocks = 2 * batch.block_tables.numel()
    kv_cache = torch.full((2, num_blocks, block_size, NUM_KV_HEADS, HEAD_DIM), torch.nan, dtype=dtype, device=device)

    call = partial(backend.store_kvcache, *key_value, kv_cache, batch.slot_mapping)
    call()
    if kv_cache.isnan().sum() != kv_cache.numel() - key_value.numel():
        raise RuntimeError(f"{backend.NAME}: store_kvcache writes more or fewer slots than it is told")
    if kernel == "store_kvcache":
        output, expected, tolerance = kv_cache.flatten(1, 2)[:, batch.slot_mapping], key_value.float(), 0.0
    else:
        whole = key_value.float().unflatten(1, (num_seqs, num_tokens))  # a KV cache with one block per sequence
        in_order = torch.arange(num_seqs, dtype=torch.int32, device=device)[:, None]
        expected = oracle.attend(query.float(), whole, replace(batch, block_tables=in_order), scale)
        call = partial(backend.attend, query, kv_cache, batch, scale)
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty returns with NaN
        output, tolerance = call(), TOLERANCE[dtype]
        torch.use_deterministic_algorithms(False)
    error = (output.float() - expected).abs()
    if not (error <= tolerance * expected.square().mean(-1, keepdim=True).sqrt()).all():  # nor if it is NaN
        raise RuntimeError(f"{backend.NAME}: {kernel} in {dtype} is off by {error.max():.2g}")
    return call, error.max().item()


def time_call(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call whose data are in no cache; on a GPU its own time, without the host's launch."""
    if device.type == "cuda":
        from triton.testing import do_bench  # it clears the L2 cache before each call, and the launch hides behind that

        return do_bench(call, return_mode="median") / 1e3
    flush, seconds, end = torch.ones(1 << 26), [], time.perf_counter() + 0.5  # 256 MiB
    while len(seconds) < 5 or time.perf_counter() < end:
        flush.sum()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def measure(num_seqs: int, context_len: int, prompt_len: int, dtype_name: str, device: torch.device) -> dict[str, Any]:
    """Check and time all kernels and print a table. Returns what it says."""
    dtype = getattr(torch, dtype_name)
    backends: dict[str, tuple[Backend, int]] = {}
    for name in reversed(BACKENDS):  # the torch backend first
        try:
            backends[name] = select_backend(name, device, dtype, HEAD_DIM, None)
        except ValueError as error:
            print(error)
    hardware, versions = describe_hardware(device), find_versions(["torch", "triton", "flash_attn"])
    ceilings = measure_ceilings(device, dtype)
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    print(f"\n{hardware}; {dtype_name}; {shown}; the machine does {ceilings}; {ABOVE}\n")
    print("| kernel | sequences x tokens | backend | dtype | time | rate | of the machine's | max error |")
    print(f"|{' --- |' * 8}", flush=True)

    token_bytes = 2 * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize
    cases = [  # kernel, sequences, tokens of each; bytes to move or FLOPs to do
        ("store_kvcache", 1, prompt_len, 2 * prompt_len * token_bytes, "GB/s"),  # read and written
        ("decode", num_seqs, context_len, num_seqs * context_len * token_bytes, "GB/s"),
        ("prefill", 1, prompt_len, 2 * 2 * NUM_HEADS * HEAD_DIM * prompt_len**2 / 2, "TFLOP/s"),
    ]
    rows: list[dict[str, Any]] = []
    for kernel, seqs, tokens, work, unit in cases:
        most, scale = (ceilings.bytes_per_second, 1e9) if unit == "GB/s" else (ceilings.flops_per_second, 1e12)
        for name, (backend, block_size) in backends.items():
            call, error = check(kernel, backend, seqs, tokens, block_size, dtype, device)
            seconds = time_call(call, device)
            row = {"kernel": kernel, "shape": f"{seqs} x {tokens}", "backend": name, "dtype": dtype_name}
            rate, share = work / seconds / scale, find_share(work / most, seconds)
            figures = f"{seconds * 1e3:.4g} ms", f"{rate:.4g} {unit}", f"{work / seconds / most:.0%}", f"{error:.2g}"
            print(f"| {' | '.join([*row.values(), *figures])} |", flush=True)
            rows.append({**row, "seconds": seconds, "rate": rate, "unit": unit, "share": share, "max_error": error})
    return {"hardware": hardware, "versions": versions, "ceilings": {**ceilings._asdict(), "note": ABOVE}, "kernels": rows}


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parser = argparse.ArgumentParser(description="Check and time the attention kernels that run here.")
    parser.add_argument("--num-seqs", type=int, metavar="N", help="sequences that decode")
    parser.add_argument("--context-len", type=int, metavar="N", help="tokens of each of them")
    parser.add_argument("--prompt-len", type=int, metavar="N", help="tokens of the prompt that is stored, and prefilled")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--json", action="store_true", help="print one line of JSON, and everything else on stderr")
    parser.set_defaults(**(ON_GPU if device.type == "cuda" else ON_CPU))
    args = parser.parse_args()
    for name in ON_GPU:
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    with redirect_stdout(sys.stderr if args.json else sys.stdout):
        report = measure(args.num_seqs, args.context_len, args.prompt_len, args.dtype, device)
    if args.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
