"""Attention backends. Each is a module with the same five names, chosen once, when the engine starts:

    PREFERRED_BLOCK_SIZE                                          tokens in a block, where the user does not say
    NEVER_WAITS                                                   launches depend on shapes alone: fit for CUDA graphs
    reason_unavailable(device, dtype, head_dim, block_size)       why it cannot run here; None: it can
    store_kvcache(key, value, kv_cache, slot_mapping)             write the new tokens' K/V into their slots
    attend(query, kv_cache, batch, scale)                         read each context through its block table

`torch` is the specification: it runs everywhere and the others are tested against it. `cpp` is for CPUs that a C++
compiler knows; `triton` holds our own kernels for GPUs, `flash_attn` calls those of the package flash-attn.
A layer's `kv_cache` is [2, num_blocks, block_size, num_kv_heads, head_dim]: keys, then values.
"""

import sys
from importlib import import_module
from types import ModuleType

from torch import device as Device
from torch import dtype as DType

AUTO = {"cuda": ("flash_attn", "triton", "torch"), "cpu": ("cpp", "torch")}  # fastest first; imported when looked at


def select_backend(
    name: str, device: Device, dtype: DType, head_dim: int, block_size: int | None
) -> tuple[ModuleType, int]:
    """The backend asked for ("auto": the fastest that works here) and its block size. Raises ValueError if none works."""
    reasons: list[str] = []
    for candidate in AUTO[device.type] if name == "auto" else (name,):
        try:
            backend = import_module(f"{__name__}.{candidate}")
            size = block_size or backend.PREFERRED_BLOCK_SIZE
            reason = backend.reason_unavailable(device, dtype, head_dim, size)
        except ImportError as error:
            reason = str(error)
        if reason is None:
            if candidate == "torch" and reasons:
                print("nanovllm: slow attention, since " + "; ".join(reasons), file=sys.stderr)
            return backend, size
        reasons.append(f"attention_backend {candidate!r} cannot run here: {reason}")
    raise ValueError("; ".join(reasons))
