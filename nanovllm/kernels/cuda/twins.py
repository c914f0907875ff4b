"""Which layers have a faster twin on a GPU."""

import torch

from nanovllm.kernels.cuda import functions
from nanovllm.kernels.twins import Twins, make_twins


def find_twins(dtype: torch.dtype) -> tuple[Twins, str | None]:
    """The twins, and why there are none."""
    reason = functions.reason_unavailable(dtype)
    return (make_twins(functions), None) if reason is None else ({}, reason)
