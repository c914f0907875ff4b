"""The process groups in which the ranks of a model meet.

The groups are objects. torch.distributed.init_process_group would make one for the whole process,
where several engines can live.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nanovllm.layers.tensor_parallel import TensorParallel

_FOREVER = timedelta(days=365)  # an idle engine must not run into a timeout


@dataclass(frozen=True)
class Place:
    """Where one of several ranks runs."""

    rank: int
    local_rank: int  # its number on its machine, which selects its GPU
    store: dist.Store  # where all ranks meet


def connect(device: torch.device, size: int, place: Place) -> TensorParallel:
    """Join the process groups of all ranks."""
    place.store.set(f"{place.rank} has started", "")
    place.store.set_timeout(_FOREVER)  # NCCL waits there for rank 0, which may still load weights
    host_store = dist.PrefixStore("host", place.store)
    host_group = dist.ProcessGroupGloo(host_store, place.rank, size, _FOREVER)
    group: Any = host_group  # see TensorParallel
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        group = dist.ProcessGroupNCCL(place.store, place.rank, size, options)
    return TensorParallel(place.rank, size, group, host_group)
