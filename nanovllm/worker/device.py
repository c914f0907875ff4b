"""The device of a rank, and the torch settings with which an engine computes on it."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


def find_device(name: str, local_rank: int | None = None) -> torch.device:
    """The device of that name; "auto" is the GPU if there is one, and else the CPU.

    "cuda" without a number is the current GPU. With several ranks, the rank with local rank i uses
    GPU N + i, where N is the number in `name` or 0. A rank that sees only one GPU uses that one.
    Raises ValueError for an unknown or missing device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    is_known = name == "cpu" or (kind == "cuda" and (number == "" or number.isdecimal()))
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
        raise ValueError(
            f"device='cuda:{index}' is missing: torch finds {num_gpus} GPUs here,"
            " use another one or device='cpu'"
        )
    if number == "" and local_rank is None:
        index = torch.cuda.current_device()
    return torch.device("cuda", index)


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
