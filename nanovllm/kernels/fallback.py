"""Finds whether kernels run here, and reports what replaces them if they do not."""

from collections.abc import Callable
from functools import cache

from nanovllm.utils.helpers import report

# For messages that would be the same for every step, or for every engine of this process.
report_once = cache(report)


def find_failure(run: Callable[..., object], *arguments: object) -> str | None:
    """Run some kernels. Return why they fail, or None.

    Triton needs a C compiler on the host, and a wheel may lack code for this GPU. Only a run shows
    whether the kernels work.
    """
    try:
        run(*arguments)
    except Exception as error:  # from the compiler, the driver or the launch
        return f"the kernels fail on this GPU: {error!r}"
    return None
