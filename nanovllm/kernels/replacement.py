"""Replaces the layers of a model by optimized ones, and undoes that if they fail on this GPU.

In float32 an optimized layer differs from the original in rounding, mostly by the order of sums. In
16-bit dtypes it rounds less often. SwiGLU is rounded once, where the original rounds silu(gate) and
the result. With prepacked weights on a CPU, bias, residual and gate are applied in float32 before
rounding. Each difference is about one unit in the last place.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module

import torch
from torch import nn

from nanovllm.kernels.optimized_layer import OptimizedLayer, install, uninstall
from nanovllm.kernels.self_tests import RecordedCall, check_call, record_calls, succeeds
from nanovllm.layers.quantized import QuantizedWeight
from nanovllm.utils.helpers import report


def speed_up_loading(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Replace the weights that quantize what is copied into them. Called before loading."""
    kinds = find_optimized_layers(device.type, dtype)
    for weight in model.modules():
        if type(weight) is QuantizedWeight:
            install(kinds, weight, dtype)


def kernelize(
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    run: Callable[[], object] | None = None,
) -> list[str]:
    """Replace the layers of `model` by optimized subclasses, where there are any.

    `run` calls the model for a self-test. An optimized layer that fails it is not used. Return the
    names of the replaced classes, without those that failed.
    """
    optimized = find_optimized_layers(device.type, dtype)
    simple = [each for each in optimized if not each.parts]
    fused = [each for each in optimized if each.parts]
    calls: list[RecordedCall] = []
    if run is not None and optimized:
        calls = record_calls(model, run, {each.replaces for each in optimized})
    # An MLP comes before its projections, so that it can still take their weights.
    for layer in model.modules():
        install(simple, layer, dtype)
    # Layers that compute their parts need optimized parts, so these come first.
    for layer in reversed(list(model.modules())):
        install(fused, layer, dtype)
    remove_failing_layers(model, calls)
    replaced = [each.replaces for each in model.modules() if isinstance(each, OptimizedLayer)]
    return [each.__name__ for each in dict.fromkeys(replaced)]


def remove_failing_layers(model: nn.Module, calls: list[RecordedCall]) -> None:
    """Repeat calls of layers that were replaced. Where one fails, uninstall its class everywhere.

    All calls are made, also those of a layer that was uninstalled, because all ranks must make the
    same collective calls.
    """
    kinds = [type(call.run) for call in calls]
    for call, kind in zip(calls, kinds, strict=True):
        if not issubclass(kind, OptimizedLayer):
            continue
        if not succeeds(kind.__name__, kind.replaces.__name__, check_call, call):
            for layer in model.modules():
                if type(layer) is kind:
                    uninstall(layer)


@cache
def find_optimized_layers(device_type: str, dtype: torch.dtype) -> list[type[OptimizedLayer]]:
    """Return the optimized layers that work here. If there are none, print why."""
    try:
        module = import_module(f"nanovllm.kernels.{device_type}.layers")
        reason = module.reason_unavailable(dtype)
    except ImportError as error:  # no Triton
        reason = str(error)
    if reason is not None:
        report(f"using plain torch layers, which are slow: {reason}")
        return []
    return module.OPTIMIZED_LAYERS
