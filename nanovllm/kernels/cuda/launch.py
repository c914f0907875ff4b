"""Launches Triton's kernels. Its own way to a compiled kernel takes the host longer than the launch: here it is gone once."""

from functools import cache
from typing import Any

from torch import Tensor


class Launch:
    """A kernel with values for its constants: compiled at the first call, and launched as it is from then on.

    So what else it was compiled for must be the same at all calls: the GPU, dtypes, integers, which tensors are None, and which
    begin at a multiple of 16 bytes, as torch's new ones do. Who keeps a Launch has all that in its key.
    """

    def __init__(
        self, kernel: Any, **constants: object
    ) -> None:  # Triton annotates neither kernels nor what they become
        self.kernel, self.constants, self.compiled = kernel, constants, None
        self.values = [constants[name] for name in kernel.arg_names if name in constants]

    def __call__(self, grid: tuple[int, int, int], *args: object) -> None:
        if self.compiled is not None:
            self.compiled[grid](*args, *self.values)
        else:  # None, again, from the interpreter; FP fusion is not left to a default that changes with Triton 3.10
            self.compiled = self.kernel[grid](*args, **self.constants, enable_fp_fusion=True)


@cache
def prepare(kernel: Any, *key: object, **constants: object) -> Launch:
    """The kernel with these constants, for calls that have the same `key`."""
    return Launch(kernel, **constants)


def is_aligned(*tensors: Tensor) -> bool:
    return not any([tensor.data_ptr() % 16 for tensor in tensors])
