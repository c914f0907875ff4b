"""The process groups in which the ranks of a model meet.

The groups are objects. torch.distributed.init_process_group would make one for the whole process,
where several engines can live.

A launcher such as torchrun runs the same script on all ranks. In such a script, LLM(...) returns on
rank 0 only. On the other ranks it serves, and then ends the process.
"""

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nanovllm.layers.tensor_parallel import TensorParallel
from nanovllm.utils.checks import naming

_FOREVER = timedelta(days=365)  # an idle engine must not run into a timeout


@dataclass(frozen=True)
class Place:
    """Where one of several ranks runs."""

    rank: int
    local_rank: int  # its number on its machine, which selects its GPU
    store: dist.Store  # where all ranks meet


Serve = Callable[[Place], None]  # what a rank does, until rank 0 disconnects


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


def join_torchrun(size: int, serve: Serve) -> dist.Store | None:
    """Return the store of torchrun's ranks, or None without torchrun.

    On ranks 1 and up this does not return. They serve and then exit.
    """
    problem = "WORLD_SIZE is set, but a variable of torchrun is missing or invalid"
    with naming(problem, KeyError, ValueError):
        if int(os.environ.get("WORLD_SIZE", 1)) == 1:
            return None
        local_rank = int(os.environ["LOCAL_RANK"])
        store, rank, world_size = next(dist.rendezvous("env://"))
    if world_size != size:
        raise ValueError(
            f"tensor_parallel_size={size}, but torchrun has started {world_size} processes:"
            " set both to the same number"
        )
    if rank > 0:
        try:
            serve(Place(rank, local_rank, store))
        except BaseException:
            traceback.print_exc()
            # Immediately, because NCCL's shutdown would wait for CUDA graphs that the traceback may
            # refer to.
            os._exit(1)
        raise SystemExit
    if store.add("engines", 1) > 1:
        raise RuntimeError(
            "torchrun's processes serve one engine only: run torchrun again for another one"
        )
    return store
