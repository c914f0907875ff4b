"""Caches compiled Triton kernels, because Triton's dispatch costs the host more than a launch."""

from functools import cache
from typing import Any

import torch
from torch import Tensor


class Launch:
    """A Triton kernel with fixed constants. The first call compiles it, later calls only launch it.

    Everything else that Triton specializes on must be identical in all calls: the GPU, the dtypes,
    the integers, which tensors are None, and which are aligned to 16 bytes, as new tensors of torch
    are. The owner of a Launch keeps all of these in its cache key.
    """

    # Triton annotates neither kernels nor compiled kernels.
    def __init__(self, kernel: Any, **constants: object) -> None:
        self.kernel = kernel
        self.constants = constants
        self.compiled: Any = None
        self.values = [constants[name] for name in kernel.arg_names if name in constants]

    def __call__(self, grid: tuple[int, int, int], *args: object) -> None:
        if self.compiled is not None:
            self.compiled[grid](*args, *self.values)
        else:
            # The interpreter returns None. FP fusion is explicit, so that no default can change
            # results.
            self.compiled = self.kernel[grid](*args, **self.constants, enable_fp_fusion=True)


@cache
def prepare(kernel: Any, *key: object, **constants: object) -> Launch:
    """Return the kernel with these constants, for all calls with the same `key`."""
    return Launch(kernel, **constants)


def is_aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % 16 == 0


@cache
def describe_gpu(device: torch.device) -> tuple[int, int]:
    """Return the major compute capability and the number of multiprocessors.

    In the interpreter they are those of an H100.
    """
    if device.type == "cpu":
        return 9, 132
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.multi_processor_count
