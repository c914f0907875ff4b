"""Compares kernels with plain torch when an engine starts on a GPU.

A kernel that works on one GPU can fail on another one. What fails or differs is not used, and a
line says what replaces it.

    check_backend              an attention backend, on random batches
    record_calls, check_call   optimized layers, on calls of the plain layers that they replace

The calls of layers come from some steps of the plain model. Each is recorded with its inputs and
outputs, and repeated after the layers were replaced. A CUDA graph is compared with eager steps in
the same way.
"""

from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from nanovllm.batch.batch import make_batch
from nanovllm.batch.packing import copy_to, to_device
from nanovllm.layers import attention as reference
from nanovllm.layers.attention import AttentionShape, Backend
from nanovllm.utils.helpers import cdiv, report


def catch_failure(run: Callable[..., object], *arguments: object) -> str | None:
    """Run some kernels. Return why they fail, or None.

    Triton needs a C compiler on the host, and a wheel may lack code for this GPU. Only a run shows
    whether the kernels work.
    """
    try:
        run(*arguments)
    except Exception as error:  # from the compiler, the driver or the launch
        return f"the kernels fail on this GPU: {error!r}"
    return None


def succeeds(name: str, plain: str, run: Callable[..., object], *arguments: object) -> bool:
    """Return whether run(*arguments) raises nothing. If not, print that `plain` replaces `name`."""
    reason = catch_failure(run, *arguments)
    if reason is not None:
        report(f"{name} is replaced by {plain}, which is slower; please report this: {reason}")
    return reason is None


# --- Attention backends


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

    K/V are random, their blocks are in random order, and the rest of the KV cache is NaN, so that a
    read out of bounds shows in the output. `python -m nanovllm.kernels.bench` runs the same
    comparison.

    Return the call of attention, to be timed, and its largest error, relative to the root mean
    square of a head. Raises RuntimeError if the error exceeds `tolerance` or K/V are wrong.
    """
    random = torch.Generator(device).manual_seed(0)  # the caller's generator stays untouched
    randn = partial(torch.randn, device=device, generator=random)
    num_seqs, context_len, query_len, block_size = batch_shape
    num_blocks = 2 * num_seqs * cdiv(context_len, block_size)  # twice as many as needed
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
    sinks = [randn(shape.num_heads).to(dtype)] if shape.has_sinks else []
    attend = partial(backend.attend, query, kv_cache, batch, shape, *sinks)
    expected = reference.attend(query.float(), expected_cache, batch, shape, *sinks)
    magnitude = expected.square().mean(-1, keepdim=True).sqrt()
    error = ((attend() - expected).abs() / magnitude).max().item()
    if not error <= tolerance:  # also if it is NaN
        raise RuntimeError(
            f"{backend.NAME}: attention of {query_len} query tokens in {dtype} has an error"
            f" of {error:.2g} (tolerance {tolerance})"
        )
    return attend, error


# --- Layers


class RecordedCall(NamedTuple):
    """A call of a layer: what it received, and what it returned and wrote."""

    run: Callable[..., Tensor]
    args: tuple[Any, ...]  # before the call
    expected: Tensor
    expected_args: tuple[Any, ...]  # after the call, which can write to them


@torch.inference_mode()
def record_calls(
    model: nn.Module, run: Callable[[], object], kinds: set[type]
) -> list[RecordedCall]:
    """Return the first call of each of these classes of layers in each step of `run()`.

    A step is a call of `model`. In a step, calls of parts come before those of the whole. Layers of
    one class count as several if their weights have several shapes, or if only some are quantized,
    because these run other kernels.
    """
    inputs: dict[object, tuple[Any, ...]] = {}
    steps: list[dict[object, RecordedCall]] = []

    def find_key(layer: nn.Module) -> object:
        weight = getattr(layer, "weight", None)
        return type(layer), type(weight), getattr(weight, "shape", None)

    def begin(layer: nn.Module, args: tuple[Any, ...]) -> None:
        if layer is model:
            inputs.clear()
            steps.append({})
        key = find_key(layer)
        if type(layer) in kinds and key not in inputs:
            inputs[key] = deepcopy(args)

    def end(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        key = find_key(layer)
        if type(layer) in kinds and key not in steps[-1]:
            steps[-1][key] = RecordedCall(layer, inputs[key], output, deepcopy(args))

    with ExitStack() as hooks:  # removes them
        for layer in model.modules():
            hooks.enter_context(layer.register_forward_pre_hook(begin))
            hooks.enter_context(layer.register_forward_hook(end))
        run()
    return [call for step in steps for call in step.values()]


@torch.inference_mode()
def check_call(call: RecordedCall) -> None:
    """Raise RuntimeError if a call returns or writes other numbers, up to what rounding explains.

    Rounding can change a few token ids. The error of what is written is relative to the change,
    because a recurrent state can change little. If a call writes nearly the same numbers again,
    their change is rounding itself. A part of these numbers then stands for it.
    """
    args = deepcopy(call.args)
    before = (call.args, torch.zeros_like(call.expected))
    after = (args, call.run(*args))
    expected = (call.expected_args, call.expected)
    tolerance = 0.01 if call.expected.dtype == torch.float32 else 0.1
    for old, new, right in zip(*map(list_tensors, (before, after, expected)), strict=True):
        if torch.equal(new, right):  # also if nothing changes
            continue
        if right.is_floating_point():
            is_written = (new != old) | (right != old)
            least_change = tolerance * right[is_written].float().norm()
            change = torch.maximum(find_distance(old, right), least_change)
            error = (find_distance(new, right) / change).item()
        else:
            error = (new != right).float().mean().item()
        if not error <= tolerance:  # also if it is NaN
            raise RuntimeError(f"the error is {error:.2g} (tolerance {tolerance})")


def find_distance(one: Tensor, other: Tensor) -> Tensor:
    return (one.float() - other.float()).norm()


def list_tensors(args: tuple[Any, ...]) -> list[Tensor]:
    """List the tensors among arguments, and those in lists and tuples."""
    return [each for each in tree_leaves(args) if isinstance(each, Tensor)]
