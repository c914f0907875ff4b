"""Copies from the host to a GPU, without a host synchronization. On a CPU nothing is copied.

A copy from ordinary memory makes the host wait until it has ended, so these copies start from
pinned memory.
"""

import numpy as np
import torch
from torch import Tensor

from nanovllm.batch import Batch
from nanovllm.utils.packing import find_sizes, pack, unpack


def copy_to(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch, in one transfer for all of its tensors."""
    if device.type == "cpu":
        return batch
    packed = pack(batch, pin_memory=True).to(device, non_blocking=True)
    return unpack(packed, find_sizes(batch))


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to `device`."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
