"""Optimized layers, attention backends and CUDA graphs. The engine imports only this file.

layers/ and models/ specify what is computed and do not import this package. When an engine starts,
`select_backend` chooses how K/V are stored and read. After the weights are loaded, `kernelize`
replaces layers by optimized subclasses. All choices are made at start. With enable_kernels=False,
the engine runs without all of this.

In float32 an optimized layer differs from the original in rounding, mostly by the order of sums. In
16-bit dtypes it rounds less often. SwiGLU is rounded once, where the original rounds silu(gate) and
the result. With prepacked weights on a CPU, bias, residual and gate are applied in float32 before
rounding. Each difference is about one unit in the last place.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, cached_property, partial
from importlib import import_module
from typing import Any, ClassVar, cast

import torch
from torch import nn

from nanovllm.backends import BACKENDS
from nanovllm.batch import Batch
from nanovllm.kernels.changes import has_overrides, has_parts, list_hooks
from nanovllm.kernels.cuda.graphs import CudaGraphs, list_batch_sizes
from nanovllm.kernels.self_test import (
    Call,
    check_backend,
    check_call,
    find_failure,
    record_calls,
)
from nanovllm.layers.attention import Backend
from nanovllm.utils.packing import copy_to
from nanovllm.utils.terminal import report

report_once = cache(report)  # for messages that are the same for all engines of this process


def select_backend(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None
) -> tuple[Backend, int]:
    """Return the named backend ("auto": the fastest that can run here) and its block size.

    Raises ValueError if it cannot run here.
    """
    reasons: list[str] = []
    candidates = [name]
    if name == "auto":
        candidates = [each for each, entry in BACKENDS.items() if device.type in entry.device_types]
    for candidate in candidates:
        try:
            backend = import_module(BACKENDS[candidate].module)
            size = block_size or backend.PREFERRED_BLOCK_SIZE
            reason = backend.reason_unavailable(device, dtype, head_dim, size)
            if reason is None and device.type == "cuda":
                check = partial(check_backend, backend, device, dtype, head_dim, size)
                reason = find_failure(check)
        except ImportError as error:
            reason = str(error)
        if reason is None:
            if candidate == "torch" and reasons:
                kind = "which is slower with many or long sequences"
                report_once(f"using plain torch attention, {kind}: {'; '.join(reasons)}")
            return backend, size
        reasons.append(f"attention_backend={candidate!r} cannot run here: {reason}")
    raise ValueError("; ".join(reasons))


class OptimizedLayer(nn.Module):
    """Mixin for an optimized subclass of a layer. `kernelize` installs it in `__class__`."""

    replaces: ClassVar[type[nn.Module]]  # exactly this class, and no subclass of it
    # The parts that it computes without calling them, as in `has_parts`, with optimized classes.
    parts: ClassVar[Mapping[str, Any]] = {}
    dtype: torch.dtype  # the model's

    def convert(self) -> bool:
        """Convert the weights of a layer whose class was just replaced.

        Return False, and change nothing, if this subclass cannot replace the layer.
        """
        return has_parts(self, self.parts)

    def list_tensors(self) -> list[Any]:
        """What raw pointers of C++ structs refer to. Keep it, because parts can be replaced."""
        return [*self.parameters(), *list(self.modules())[1:]]

    @cached_property
    def hooks(self) -> list[Mapping[int, Any]]:
        """Where hooks of its parts are registered. While there are any, it must call its parts."""
        return list_hooks(self)


def kernelize(
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    run: Callable[[], object] | None = None,
) -> list[str]:
    """Replace the layers of `model` by optimized subclasses, where there are any.

    `run` calls the model for a self-test. An optimized layer that fails it is not used.
    Return the names of the replaced classes, without those that failed the self-test.
    """
    optimized = find_optimized_layers(device.type, dtype)
    simple = {each.replaces: each for each in optimized if not each.parts}
    fused = {each.replaces: each for each in optimized if each.parts}
    calls: list[Call] = []
    if run is not None and optimized:
        calls = record_calls(model, run, {each.replaces for each in optimized})
    # An MLP comes before its projections, so that it can still take their weights.
    for layer in model.modules():
        replace_class(layer, simple.get(type(layer)), dtype)
    # Layers that compute their parts need optimized parts, so these come first.
    for layer in reversed(list(model.modules())):
        replace_class(layer, fused.get(type(layer)), dtype)
    tested: list[tuple[Call, Any]] = [
        (call, type(call.run)) for call in calls if isinstance(call.run, OptimizedLayer)
    ]
    for call, kind in tested:
        # Later calls of a replaced layer are still made, because all ranks must make the same
        # collective calls.
        plain = kind.replaces
        if not passes_self_test(kind.__name__, plain.__name__, call):
            for each in model.modules():
                if type(each) is kind:
                    each.__class__ = plain
    replaced = [each.replaces for each in model.modules() if isinstance(each, OptimizedLayer)]
    return [each.__name__ for each in dict.fromkeys(replaced)]


def replace_class(layer: nn.Module, kind: type[OptimizedLayer] | None, dtype: torch.dtype) -> None:
    """Replace the class of a layer by an optimized one, if there is one that can replace it."""
    if kind is None or has_overrides(layer):
        return
    original = type(layer)
    layer.__class__ = kind
    converted = cast(OptimizedLayer, layer)
    converted.dtype = dtype
    if not converted.convert():
        layer.__class__ = original


def passes_self_test(name: str, plain: str, call: Call) -> bool:
    """Return whether a call does what is expected. If not, print what replaces it, and why."""
    reason = find_failure(partial(check_call, call))
    if reason is not None:
        message = f"{name} is replaced by {plain}, which is slower; please report this: {reason}"
        report(message)
    return reason is None


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


@torch.inference_mode()
def capture_decode_steps(
    decoder: nn.Module,
    backend: Backend,
    kv_caches: list[torch.Tensor],
    batch: Batch,
    max_num_seqs: int,
    block_table_width: int,
    max_seqlen_k: int,
    only_largest: bool = False,
) -> CudaGraphs | None:
    """Capture CUDA graphs of `decoder` over these caches. Return None if that is not possible.

    `batch` is a decode, for a self-test: replays must match eager steps.
    A module whose shapes depend on the values of its input, such as the experts that are chosen,
    has SUPPORTS_CUDA_GRAPHS = False. With `only_largest`, one graph is captured, which needs most
    of the memory of all graphs.
    """
    parts = [backend, *decoder.modules()]
    can_capture = all(getattr(part, "SUPPORTS_CUDA_GRAPHS", True) for part in parts)
    if kv_caches[0].device.type != "cuda" or not can_capture:
        return None
    sizes = list_batch_sizes(max_num_seqs)
    if only_largest:
        sizes = sizes[-1:]
    graphs = CudaGraphs(decoder, kv_caches, sizes, block_table_width, max_seqlen_k)
    return graphs if can_replay(graphs, decoder, kv_caches, batch) else None


def can_replay(
    graphs: CudaGraphs, decoder: nn.Module, kv_caches: list[torch.Tensor], batch: Batch
) -> bool:
    """Return whether replays match eager steps of `batch` and of a second decode.

    The second decode reads the state that the first one has written, and overwrites its K/V. If
    the replays do not write K/V or states, they read what the second eager step has left there.
    """
    other_ids = torch.zeros_like(batch.input_ids)
    second = replace(batch, input_ids=other_ids, read_slots=batch.write_slots)

    def run_both(run: Callable[[Batch], torch.Tensor]) -> torch.Tensor:
        return torch.cat([run(each).clone() for each in (batch, second)])

    expected = run_both(lambda each: decoder(copy_to(each, kv_caches[0].device), kv_caches))
    replays = Call(partial(run_both, graphs.run), (), expected, ())
    return passes_self_test("a CUDA graph", "eager steps", replays)
