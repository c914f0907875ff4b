"""Compares an attention backend with plain torch, on random batches.

An engine checks its backend when it starts on a GPU, because a kernel that works on one GPU can
fail on another one. `python -m nanovllm.kernels.bench` runs the same comparison.

K/V are random, their blocks are in random order, and the rest of the KV cache is NaN, so that a
read out of bounds shows in the output.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from nanovllm.layers import attention as reference
from nanovllm.layers.attention import AttentionShape, Backend
from nanovllm.layers.batch import make_batch
from nanovllm.layers.packing import copy_to, to_device
from nanovllm.utils.helpers import cdiv


class BatchShape(NamedTuple):
    """The shape of a batch in which all sequences are alike."""

    num_seqs: int
    context_len: int
    query_len: int
    block_size: int


def check_backend(
    backend: Backend,
    device: torch.device,
    dtype: torch.dtype,
    shape: AttentionShape,
    block_size: int,
) -> None:
    """Raise RuntimeError if the results of `backend` are wrong for layers of this shape.

    Contexts of 300 tokens are long enough for several tiles and splits. A window is cut to 100
    tokens, so that the contexts exceed it. Kernels can differ for one decode and for many.
    """
    if shape.window is not None:
        shape = replace(shape, window=min(shape.window, 100))
    for num_seqs, query_len in ((1, 1), (32, 1), (2, 300)):
        batch_shape = BatchShape(num_seqs, 300, query_len, block_size)
        compare_with_torch(backend, shape, batch_shape, device, dtype, tolerance=0.2)


def compare_with_torch(
    backend: Backend,
    shape: AttentionShape,
    batch_shape: BatchShape,
    device: torch.device,
    dtype: torch.dtype,
    tolerance: float,
) -> tuple[Callable[[], object], float]:
    """Store the K/V of whole contexts, and compare attention to them with the torch backend.

    Return the call of attention, to be timed, and its largest error, relative to the root mean
    square of a head. Raises RuntimeError if the error exceeds `tolerance` or K/V are wrong.
    """
    random = torch.Generator(device).manual_seed(0)  # the caller's generator stays untouched
    randn = partial(torch.randn, device=device, generator=random)
    num_seqs, context_len, query_len, block_size = batch_shape
    blocks_per_seq = cdiv(context_len, block_size)
    num_blocks = 2 * num_seqs * blocks_per_seq  # twice as many as needed
    block_ids = torch.randperm(num_blocks, dtype=torch.int32, device=device, generator=random)
    block_tables = block_ids[: num_blocks // 2].view(num_seqs, -1).cpu().numpy()
    context_lens = [context_len] * num_seqs
    batch = make_batch([query_len] * num_seqs, context_lens, block_tables, block_size)
    batch = copy_to(batch, device)
    # As if the contexts were computed in one step.
    whole = make_batch(context_lens, context_lens, block_tables, block_size)
    slots = to_device(whole.slot_mapping, device)
    query = randn(len(batch.input_ids), shape.num_heads, shape.head_dim).to(dtype)
    key, value = randn(2, len(slots), shape.num_kv_heads, shape.head_dim).to(dtype)
    sizes = (num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
    kv_cache = backend.make_cache(*sizes, dtype, device).fill_(torch.nan)
    expected_cache = reference.make_cache(*sizes, torch.float32, device).fill_(torch.nan)
    reference.store_kvcache(key.float(), value.float(), expected_cache, slots)
    backend.store_kvcache(key, value, kv_cache, slots)
    # Attention shows below whether each number is in its place.
    written = kv_cache[~kv_cache.isnan()].sort().values
    if not torch.equal(written, torch.cat((key, value)).flatten().sort().values):
        raise RuntimeError(
            f"{backend.NAME}: store_kvcache writes outside slot_mapping, or values that differ"
            " from key and value"
        )
    attend = partial(backend.attend, query, kv_cache, batch, shape)
    expected = reference.attend(query.float(), expected_cache, batch, shape)
    magnitude = expected.square().mean(-1, keepdim=True).sqrt()
    error = ((attend() - expected).abs() / magnitude).max().item()
    if not error <= tolerance:  # also if it is NaN
        raise RuntimeError(
            f"{backend.NAME}: attention of {query_len} query tokens in {dtype} has an error"
            f" of {error:.2g} (tolerance {tolerance})"
        )
    return attend, error
