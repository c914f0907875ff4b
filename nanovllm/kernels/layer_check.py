"""Compares optimized layers with the plain layers that they replace, on recorded calls.

When an engine starts on a GPU, some steps of the plain model are computed, and calls of its layers
are recorded with their inputs and outputs. Each call is repeated after the layers were replaced. An
optimized layer that fails or differs is not used. A CUDA graph is compared with eager steps in the
same way.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from nanovllm.kernels.fallback import find_failure
from nanovllm.utils.helpers import report


class Call(NamedTuple):
    """A call of a layer: what it received, and what it returned and wrote."""

    run: Callable[..., Tensor]
    args: tuple[Any, ...]  # before the call
    expected: Tensor
    expected_args: tuple[Any, ...]  # after the call, which can write to them


def succeeds(name: str, plain: str, run: Callable[..., object], *arguments: object) -> bool:
    """Return whether run(*arguments) raises nothing. If not, print that `plain` replaces `name`."""
    reason = find_failure(run, *arguments)
    if reason is not None:
        report(f"{name} is replaced by {plain}, which is slower; please report this: {reason}")
    return reason is None


@torch.inference_mode()
def record_calls(model: nn.Module, run: Callable[[], object], kinds: set[type]) -> list[Call]:
    """Return the first call of each of these classes of layers in each step of `run()`.

    A step is a call of `model`. In a step, calls of parts come before those of the whole. Layers of
    one class count as several if their weights have several shapes, or if only some are quantized,
    because these run other kernels.
    """
    inputs: dict[object, tuple[Any, ...]] = {}
    steps: list[dict[object, Call]] = []

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
            steps[-1][key] = Call(layer, inputs[key], output, deepcopy(args))

    handles = []
    for layer in model.modules():
        handles += [layer.register_forward_pre_hook(begin), layer.register_forward_hook(end)]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return [call for step in steps for call in step.values()]


@torch.inference_mode()
def check_call(call: Call) -> None:
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
