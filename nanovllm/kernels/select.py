"""Chooses the attention backend of an engine.

A new backend is registered in BACKENDS. Its name is a value of `attention_backend` in config.py,
too. tests/kernels/test_attention.py checks every backend that runs here.
"""

from dataclasses import fields
from importlib import import_module
from typing import NamedTuple

import torch

from nanovllm.kernels.self_tests import catch_failure, check_backend
from nanovllm.layers.attention import AttentionShape, Backend
from nanovllm.utils.helpers import report_once


class Registration(NamedTuple):
    module: str  # has the names that layers/attention.py begins with
    device_types: tuple[str, ...]  # on which "auto" tries it


# The fastest backend comes first, because "auto" takes the first one that works. "torch" always
# works, so a backend after it is used only if it is requested by name.
BACKENDS = {
    "flash_attn": Registration("nanovllm.kernels.cuda.flash_attn", ("cuda",)),
    "triton": Registration("nanovllm.kernels.cuda.attention", ("cuda",)),
    "cpp": Registration("nanovllm.kernels.cpu.attention", ("cpu",)),
    "torch": Registration("nanovllm.layers.attention", ("cpu", "cuda")),
}


def select_backend(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    shapes: list[AttentionShape],
    block_size: int | None,
) -> tuple[Backend, int]:
    """Return the named backend ("auto": the fastest that can run here) and its block size.

    Raises ValueError if it cannot compute layers of all `shapes` here.
    """
    reasons: list[str] = []
    candidates = [name]
    if name == "auto":
        candidates = [each for each, entry in BACKENDS.items() if device.type in entry.device_types]
    for candidate in candidates:
        try:
            backend = import_module(BACKENDS[candidate].module)
            size = block_size or backend.PREFERRED_BLOCK_SIZE
            for shape in shapes:
                check_layer(backend, device, dtype, shape, size)
        except (ImportError, NotImplementedError) as error:
            reasons.append(f"attention_backend={candidate!r} cannot run here: {error}")
            continue
        if candidate == "torch" and reasons:
            kind = "which is slower with many or long sequences"
            report_once(f"using plain torch attention, {kind}: {'; '.join(reasons)}")
        return backend, size
    raise ValueError("; ".join(reasons))


def check_layer(
    backend: Backend,
    device: torch.device,
    dtype: torch.dtype,
    shape: AttentionShape,
    block_size: int,
) -> None:
    """Raise NotImplementedError if a backend cannot compute layers of this shape here."""
    reason = find_unknown_field(backend, shape)
    reason = reason or backend.reason_unavailable(device, dtype, shape, block_size)
    if reason is None and device.type == "cuda":
        reason = catch_failure(check_backend, backend, device, dtype, shape, block_size)
    if reason is not None:
        raise NotImplementedError(reason)


def find_unknown_field(backend: Backend, shape: AttentionShape) -> str | None:
    """Return why a backend would ignore a field of `shape`, or None if it ignores none.

    A new field therefore works without a change in kernels/, and layers that use it run in plain
    torch. The default of a field must mean that it has no effect.
    """
    known = backend.KNOWN_FIELDS or vars(shape)
    for field in fields(shape):
        value = getattr(shape, field.name)
        if field.name not in known and value != field.default:
            return f"it does not support {field.name}={value!r}"
    return None
