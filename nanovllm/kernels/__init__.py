"""The one door to all that is faster than plain torch: twins of layers, attention backends, CUDA graphs.

layers/ and models/ say what is computed, and know nothing of this. When an engine starts, `select_backend` chooses how K/V
are stored and attended to, and once the weights are loaded, `kernelize` exchanges layers for their twins. All choices are
made at start-up. Without this package, and the lines that call it, an engine is complete and slower.

In float32 a twin differs from its layer by the order of sums. In 16 bits it rounds less often: SwiGLU once, where the layer
rounds silu(gate) and the product; on a CPU with packed weights, bias, residual and gate are applied in float32, before
rounding. Each is a difference of about one unit in the last place.
"""

import sys
from functools import cache, partial
from importlib import import_module
from typing import cast

import torch
from torch import nn

from nanovllm.backends import BACKENDS
from nanovllm.kernels.cpu.shared_memory import share_memory as share_memory
from nanovllm.kernels.cuda.graphs import CudaGraphs, batch_sizes
from nanovllm.kernels.trial import try_backend, try_out
from nanovllm.layers.attention import Backend


def select_backend(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None
) -> tuple[Backend, int]:
    """The backend asked for ("auto": the fastest that works here) and its block size. Raises ValueError if none works."""
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
                reason = try_out(partial(try_backend, backend, device, dtype, head_dim, size))
        except ImportError as error:
            reason = str(error)
        if reason is None:
            if candidate == "torch" and reasons:
                print("nanovllm: slow attention, since " + "; ".join(reasons), file=sys.stderr)
            return backend, size
        reasons.append(f"attention_backend {candidate!r} cannot run here: {reason}")
    raise ValueError("; ".join(reasons))


class Twin(nn.Module):
    """Stands before a layer among the bases of its twin: the layer becomes its twin by a change of class."""

    dtype: torch.dtype  # of the model

    def take_over(self) -> bool:
        """Prepare a layer whose class has just been changed. False: it cannot be this twin."""
        return True


def kernelize(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Have every layer in `module` become its faster twin, if it has one for `device` and `dtype`.

    From the top down, so that a layer's twin can take its parts as they are.
    """
    layer = type(module)
    for twin in find_twins(device.type, dtype):
        if layer in twin.__bases__:
            module.__class__ = twin
            fast = cast(Twin, module)
            fast.dtype = dtype
            if fast.take_over():
                break
            module.__class__ = layer
    for child in module.children():
        kernelize(child, device, dtype)


def has_known_code(module: nn.Module, *known: type[nn.Module]) -> bool:
    """Whether a kernel may compute in place of `module`, without calling it.

    Its class must be exactly one of `known`, and it must have no hooks and no methods of its own. A subclass, a hook or an
    assigned `forward` would have no effect otherwise.
    """
    has_hooks = bool(module._forward_hooks or module._forward_pre_hooks)
    has_own_methods = not vars(module).keys().isdisjoint(dir(type(module)))
    return type(module) in known and not has_hooks and not has_own_methods


@cache
def find_twins(device_type: str, dtype: torch.dtype) -> list[type[Twin]]:
    """The twins that work here. If there are none, it is said on stderr why."""
    try:
        return import_module(f"nanovllm.kernels.{device_type}.twins").find_twins(dtype)
    except (
        ImportError,
        RuntimeError,
    ) as error:  # Triton is not installed, or the kernels do not work here
        print(f"nanovllm: slow layers, since {error}", file=sys.stderr)
        return []


@torch.inference_mode()
def capture_decode_steps(
    decoder: nn.Module, backend: Backend, kv_caches: list[torch.Tensor], max_num_seqs: int, block_table_width: int,
    only_largest: bool = False,
) -> CudaGraphs | None:  # fmt: skip
    """CUDA graphs of `decoder` over these caches; None where a step cannot be captured. The largest takes most of the memory.

    A module whose shapes depend on the numbers in its input (which experts are chosen) says SUPPORTS_CUDA_GRAPHS = False.
    """
    parts = (backend, *decoder.modules())
    if kv_caches[0].device.type != "cuda" or not all(
        getattr(part, "SUPPORTS_CUDA_GRAPHS", True) for part in parts
    ):
        return None
    sizes = batch_sizes(max_num_seqs)
    return CudaGraphs(decoder, kv_caches, sizes[-1:] if only_largest else sizes, block_table_width)
