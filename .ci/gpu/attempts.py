"""Runs one check after the other, until the process has lost the GPU.

Some errors of CUDA are sticky: every later call of the process fails with the same error.
"""

import re
import sys
import time
from collections.abc import Callable

STICKY = re.compile(
    "CUDA error|CUDA_ERROR|illegal memory access|misaligned address|unspecified launch failure"
    r"|device-side assert|AcceleratorError|Triton Error \[CUDA\]"
)


def is_sticky(error: str) -> bool:
    return STICKY.search(error) is not None


def attempt(name: str, check: Callable[[], object]) -> bool:
    """Run a check and print its result. Return whether it raised nothing."""
    start = time.perf_counter()
    try:
        result = check()
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        print(f"FAIL {name}: {message[:300]}", flush=True)
        if is_sticky(message):
            sys.exit("the GPU is lost to this process")
        return False
    print(f"ok   {name}: {result} ({time.perf_counter() - start:.1f} s)", flush=True)
    return True
