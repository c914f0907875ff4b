"""Whether kernels do here what they should: a backend of attention against the torch backend in float32, on random numbers.

These lie in blocks of random order, in a KV cache that holds NaN everywhere else: what is read too much shows.
"""

from collections.abc import Callable
from functools import partial

import torch

from nanovllm.batch import Batch
from nanovllm.layers import attention as oracle
from nanovllm.layers.attention import Backend


def try_out(trial: Callable[[], object]) -> str | None:
    """Why `trial` of some kernels fails; None: they work. Triton compiles for the GPU at hand with the help of the host's
    C compiler, and a wheel may lack this GPU: only a trial tells."""
    try:
        trial()
    except (
        Exception
    ) as error:  # of the compiler, the driver or the launch: all of them mean that it does not work
        return f"the kernels fail on this GPU: {error!r}"
    return None


def try_backend(
    backend: Backend, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
) -> None:
    """Raises RuntimeError if what `backend` computes is far off. The contexts are long enough for several pieces and splits."""
    for query_len in (1, 300):
        check(
            backend, 2, 300, query_len, block_size, dtype, device, (4, 2, head_dim), tolerance=0.2
        )


def make_batch(
    num_seqs: int, context_len: int, query_len: int, block_size: int, random: torch.Generator
) -> Batch:
    """Sequences in random blocks of a pool twice as large as they need; slot_mapping covers the whole contexts."""
    device, num_blocks = random.device, 2 * num_seqs * -(-context_len // block_size)
    tables = torch.randperm(num_blocks, dtype=torch.int32, device=device, generator=random).view(
        2, num_seqs, -1
    )[0]
    positions = torch.arange(context_len, dtype=torch.int32, device=device)
    slots = (tables[:, positions // block_size] * block_size + positions % block_size).flatten()
    bounds = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * query_len
    context_lens = torch.full((num_seqs,), context_len, dtype=torch.int32, device=device)
    return Batch(
        positions,
        positions,
        slots,
        bounds,
        context_lens,
        tables,
        query_len,
        context_len,
        bounds[1:] - 1,
        query_len,
    )


def check(
    backend: Backend, num_seqs: int, context_len: int, query_len: int, block_size: int, dtype: torch.dtype,
    device: torch.device, heads: tuple[int, int, int], tolerance: float,
) -> tuple[Callable[[], object], Callable[[], object], float]:  # fmt: skip
    """Store the contexts' K/V and attend to them: both as calls to time, and the largest error of attention, in units of the
    root mean square of a head's numbers. Raises RuntimeError if that is above `tolerance`. `heads`: of queries, of K/V, size."""
    num_heads, num_kv_heads, head_dim = heads
    random = torch.Generator(device).manual_seed(0)  # not the caller's
    randn = partial(torch.randn, device=device, generator=random)
    batch = make_batch(num_seqs, context_len, query_len, block_size, random)
    query = randn(num_seqs * query_len, num_heads, head_dim).to(dtype)
    key, value = randn(2, num_seqs * context_len, num_kv_heads, head_dim).to(dtype)
    shape = 2, 2 * batch.block_tables.numel(), block_size, num_kv_heads, head_dim
    kv_cache, expected_cache = (
        torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(2)
    )
    oracle.store_kvcache(key, value, expected_cache, batch.slot_mapping)
    store = partial(backend.store_kvcache, key, value, kv_cache, batch.slot_mapping)
    store()
    if not torch.equal(
        kv_cache.view(torch.uint8), expected_cache.view(torch.uint8)
    ):  # as bytes: NaN equals NaN
        raise RuntimeError(
            f"{backend.NAME}: store_kvcache writes other slots than it is told, or other numbers"
        )
    attend = partial(backend.attend, query, kv_cache, batch, head_dim**-0.5)
    expected = oracle.attend(query.float(), kv_cache.float(), batch, head_dim**-0.5)
    error = (
        ((attend() - expected).abs() / expected.square().mean(-1, keepdim=True).sqrt()).max().item()
    )
    if not error <= tolerance:  # nor if it is NaN
        raise RuntimeError(
            f"{backend.NAME}: queries of {query_len} tokens in {dtype} are off by {error:.2g}"
        )
    return store, attend, error
