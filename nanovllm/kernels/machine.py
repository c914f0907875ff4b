"""The machine that a benchmark runs on: its name, its versions, and the two ceilings of its roofline.

The roofline (Williams et al. 2009) is the least time in which a machine can move the bytes and do the operations of
some work. Its ceilings are measured here rather than taken from a data sheet: the bandwidth of the memory and the rate
of a large matrix product. bench.py sets whole runs against them, nanovllm.kernels.bench single kernels.
"""

import os
import platform
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

ABOVE = "a share above 100% (null in JSON) means that caches or kernels outrun the measured ceilings"


class Ceilings(NamedTuple):
    bytes_per_second: float
    flops_per_second: float

    def __str__(self) -> str:
        return f"{self.bytes_per_second / 1e9:.4g} GB/s, {self.flops_per_second / 1e12:.4g} TFLOP/s"


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """The best of some large copies (GPU: read, write) or reductions (CPU: read), and of matrix products in `dtype`."""

    def best(statement: str, **tensors: Tensor) -> float:
        timer = Timer(statement, globals=tensors, num_threads=torch.get_num_threads())
        return min(timer.blocked_autorange(min_run_time=0.3).times)

    on_gpu = device.type == "cuda"
    source = torch.rand(1 << 26, device=device)  # 256 MiB, more than a cache holds
    read = best("target.copy_(source)", source=source, target=source.clone()) if on_gpu else best("source.max()", source=source)
    if device.type == "cpu" and dtype == torch.float16:
        dtype = torch.float32  # most CPUs multiply it a hundred times as fast
    side = 8192 if on_gpu else 1024
    left, right = torch.randn(2, side, side, device=device).to(dtype)
    return Ceilings(source.nbytes * (1 + on_gpu) / read, 2 * side**3 / best("left @ right", left=left, right=right))


def find_share(least: float, seconds: float) -> float | None:
    """The share of the roofline of work that could take `least` seconds; None where it would be above 1."""
    return least / seconds if least <= seconds else None


def describe_hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {torch.cuda.get_device_properties(device).total_memory / 2**30:.0f} GiB"
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def find_versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of Python and of those of `packages` that are installed."""
    versions = {name: getattr(import_module(name), "__version__", "of this directory") for name in packages if find_spec(name)}
    return {"python": platform.python_version(), **versions}
