"""Caches compiled Triton kernels, because Triton's dispatch costs the host more than a launch."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor


class Launch:
    """A Triton kernel with fixed constants. The first call compiles it, later calls only launch it.

    Everything else that Triton specializes on must be identical in all calls. `prepare` sees to it.
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


_launches: dict[object, Launch] = {}


def prepare(
    kernel: Any, inputs: Sequence[Tensor | None], *sizes: int, **constants: object
) -> Launch:
    """Return the kernel for these inputs, sizes and constants.

    Triton compiles a variant for each GPU, for each dtype, alignment to 16 bytes and absence of a
    tensor, and for integers. Looking at all arguments would cost as much as Triton's dispatch.
    Therefore `inputs` has the tensors that callers pass on, which can be views or None, and `sizes`
    the integers. All other tensors are weights or new, so they are aligned. If one is missing, a
    kernel for other arguments is launched: tests/kernels/test_launch.py compares all arguments.
    """
    # A kernel is known by its id, because Triton's own hash of it takes longer than all the rest.
    key = (id(kernel), sizes, *map(find_variant, inputs), *constants.values())
    launch = _launches.get(key)
    if launch is None:
        launch = Launch(kernel, **constants)
        _launches[key] = launch
    return launch


def find_variant(tensor: Tensor | None) -> object:
    """Return what Triton specializes on, and the index of the GPU, or None."""
    if tensor is not None:
        return tensor.get_device(), tensor.dtype, tensor.data_ptr() % 16
    return None


@cache
def describe_gpu(device: torch.device) -> tuple[int, int]:
    """Return the major compute capability and the number of multiprocessors.

    In the interpreter they are those of an H100.
    """
    if device.type == "cpu":
        return 9, 132
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.multi_processor_count
