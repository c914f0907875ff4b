"""Chooses the attention backend of an engine, among those in layers/backends.py."""

from importlib import import_module

import torch

from nanovllm.kernels.attention_check import check_backend
from nanovllm.kernels.fallback import find_failure, report_once
from nanovllm.layers.attention import AttentionShape, Backend
from nanovllm.layers.backends import BACKENDS


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
            reason = None
            for shape in shapes:
                reason = reason or backend.reason_unavailable(device, dtype, shape, size)
                if reason is None and device.type == "cuda":
                    reason = find_failure(check_backend, backend, device, dtype, shape, size)
        except ImportError as error:
            reason = str(error)
        if reason is None:
            if candidate == "torch" and reasons:
                kind = "which is slower with many or long sequences"
                report_once(f"using plain torch attention, {kind}: {'; '.join(reasons)}")
            return backend, size
        reasons.append(f"attention_backend={candidate!r} cannot run here: {reason}")
    raise ValueError("; ".join(reasons))
