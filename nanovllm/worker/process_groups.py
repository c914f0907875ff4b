"""The process groups in which the ranks of a model meet."""

from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from nanovllm.layers.tensor_parallel import Mailbox, TensorParallel

_FOREVER = timedelta(days=365)  # an idle engine must not run into a timeout


class Place(NamedTuple):
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
        group = dist.ProcessGroupNCCL(
            place.store, place.rank, size, dist.ProcessGroupNCCL.Options()
        )
    return TensorParallel(place.rank, size, group, Mailbox(host_group))
