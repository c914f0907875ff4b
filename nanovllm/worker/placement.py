"""Where a rank runs: its device, and the process groups in which it meets the other ranks."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nanovllm.layers.tensor_parallel import Mailbox, TensorParallel

_FOREVER = timedelta(days=365)  # an idle engine must not run into a timeout


@dataclass(frozen=True)
class Place:
    """Where one of several ranks runs."""

    rank: int
    local_rank: int  # its number on its machine, which selects its GPU
    store: dist.Store  # where all ranks meet


@contextmanager
def engine_settings(device: torch.device) -> Iterator[None]:
    """Run in inference mode and without autocast, whatever the caller's settings are.

    Also make `device` the current GPU, which Triton and CUDA graphs use. A CPU's index is None,
    which has no effect.
    """
    is_on = torch.is_autocast_enabled(device.type)  # this check is faster than entering it
    autocast = torch.autocast(device.type, enabled=False) if is_on else nullcontext()
    with torch.inference_mode(), torch.accelerator.device_index(device.index), autocast:
        yield


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
    return TensorParallel(place.rank, size, group, Mailbox(host_group))


def find_device(name: str, local_rank: int | None = None) -> torch.device:
    """The device of that name; "auto" is the GPU if there is one, and else the CPU.

    "cuda" without a number is the current GPU. With several ranks, the rank with local rank i uses
    GPU N + i, where N is the number in `name` or 0. A rank that sees only one GPU uses that one.
    Raises ValueError for an unknown or missing device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    is_known = kind in ("cpu", "cuda") and (number == "" or number.isdecimal())
    if not is_known:
        raise ValueError(f"device={name!r} is unknown: use 'auto', 'cpu', 'cuda' or 'cuda:N'")
    if kind == "cpu":
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    index = int(number or 0)
    if local_rank is not None:
        # Under Slurm, a rank may see only its own GPU.
        index = index + local_rank if num_gpus > 1 else 0
    if index >= num_gpus:
        advice = "torch finds no GPU here, so use device='cpu'"
        if num_gpus > 0:
            advice = f"the last GPU of this machine is 'cuda:{num_gpus - 1}'"
        raise ValueError(f"device='cuda:{index}' is missing: {advice}")
    if number == "" and local_rank is None:
        index = torch.cuda.current_device()
    return torch.device("cuda", index)
