"""Finds the fused kernels for a tensor. The layers state what is computed, with torch; these compute the same in one go.

cpu_kernels (C++) and gpu_kernels (Triton) have the same functions: rms_norm, rotary, silu_and_multiply, sample.
"""

import sys
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

MODULES = {"cpu": "cpu_kernels", "cuda": "gpu_kernels"}


def find_kernels(x: Tensor) -> ModuleType | None:
    """The module with kernels for x's device and dtype. None where there is no compiler: then torch does it."""
    return _find_kernels(x.device.type, x.dtype)


@cache
def _find_kernels(device_type: str, dtype: torch.dtype) -> ModuleType | None:
    try:
        module = import_module(f"nanovllm.layers.{MODULES[device_type]}")
    except ImportError:  # triton is not installed
        return None
    if reason := module.reason_unavailable(dtype):
        print(f"nanovllm: slow layers, since {reason}", file=sys.stderr)
        return None
    return module
