"""Measures memory: what an engine takes of a GPU, and what a machine has left for a process."""

import ctypes
from contextlib import suppress
from pathlib import Path

import psutil
import torch


class MemoryMeter:
    """Measures the memory of a GPU that torch and the driver take after the meter was made."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()
        torch.cuda.empty_cache()  # memory of earlier engines of this process
        torch.cuda.reset_peak_memory_stats(device)
        self.device = device
        self.free_before, self.total = torch.cuda.mem_get_info(device)

    def peak(self) -> int:
        """Peak memory of this engine in bytes: torch's, and the driver's for libraries and graphs.

        Counts reserved memory, because the pool of a CUDA graph keeps what was freed in it.
        """
        free, _ = torch.cuda.mem_get_info(self.device)
        peak_reserved = torch.cuda.max_memory_reserved(self.device)
        released = peak_reserved - torch.cuda.memory_reserved(self.device)  # after the peak
        return self.free_before - free + released


def find_available_memory() -> int:
    """Bytes that this process can still allocate, by the machine's and its cgroups' limits.

    Only cgroups of version 2 are read. A cgroup's usage includes files in the page cache, of which
    the inactive ones can be reclaimed.
    """
    left = [psutil.virtual_memory().available]
    own = ""
    with suppress(OSError):  # not Linux
        own = Path("/proc/self/cgroup").read_text().partition("0::/")[2].strip()
    group = Path(f"/sys/fs/cgroup/{own}")
    for folder in (group, *group.parents):  # in a container often only the last ones exist
        with suppress(OSError, ValueError):  # no such group, or its limit is "max"
            limit = int((folder / "memory.max").read_text())
            used = int((folder / "memory.current").read_text())
            stat = (folder / "memory.stat").read_text()
            reclaimable = int(stat.split("inactive_file ")[1].split()[0])
            left.append(limit - used + reclaimable)
    return max(0, min(left))


def check_memory(num_bytes: int, device: torch.device) -> None:
    """Raise MemoryError if the weights of a rank exceed all memory of its device."""
    memory = psutil.virtual_memory().total + psutil.swap_memory().total
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    if num_bytes > memory:
        raise MemoryError(
            f"a rank's weights need {show_bytes(num_bytes)}, but {device} has {show_bytes(memory)}:"
            " use quantization, or raise tensor_parallel_size"
        )


def release_free_memory() -> None:
    """Return freed memory to the system. glibc keeps what lies between other allocations."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)


def show_bytes(num_bytes: int) -> str:
    if num_bytes < 10_000_000:  # 0.00 GB would hide why there is no room
        return f"{num_bytes} B"
    return f"{num_bytes / 1e9:.2f} GB"
