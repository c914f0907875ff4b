"""How many blocks of KV cache there is memory for.

bytes of a token  = 2 (K and V) * layers * KV heads of this rank * head_dim * bytes of a number
bytes of a block  = block size * bytes of a token
GPU               = min(gpu_memory_utilization * total, GPU_SHARE_OF_FREE * free before loading)
                    - weights - CUDA graphs - peak of the largest step
CPU               = CPU_SHARE * available once the weights are loaded / ranks
of either         = at most what max_num_seqs sequences of max_model_len can use
of several ranks  = what the smallest has: the block tables are the same on all
available         = what the machine, the cgroups around this process and its own limits (ulimit) have left, the least
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch

from nanovllm.config import Config
from nanovllm.layers.tensor_parallel import ALONE, TensorParallel
from nanovllm.models.decoder import ModelSpec

GPU_SHARE_OF_FREE = 0.95  # where others use the GPU, leave room for what they and the driver still allocate
CPU_SHARE = 0.25


class MemoryMeter:
    """Counts this engine's GPU memory from its making on, apart from other engines' in the process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.init()
            torch.cuda.empty_cache()  # what a former engine of this process left
            torch.cuda.reset_peak_memory_stats(device)
            self.reserved_before = torch.cuda.memory_reserved(device)
            self.free_before, self.total = torch.cuda.mem_get_info(device)

    def peak(self) -> int:
        """Bytes that this engine has had at the most: torch's, and what the driver needs for its libraries and graphs.

        Of torch's the reserved ones: what a graph's recording has allocated and freed is in use by no tensor, but stays with
        the graph's pool.
        """
        reserved = torch.cuda.max_memory_reserved(self.device) - self.reserved_before
        taken = self.free_before - torch.cuda.mem_get_info(self.device)[0]
        torch_has = torch.cuda.memory_reserved(self.device) - self.reserved_before
        return reserved + max(0, taken - torch_has)


def find_available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still take: the least of what the machine, its cgroups and its own limits have left."""
    left = [psutil.virtual_memory().available, *_left_by_cgroups(root)]
    if psutil.LINUX:
        process, used = psutil.Process(), psutil.Process().memory_info()
        for resource, taken in ((psutil.RLIMIT_AS, used.vms), (psutil.RLIMIT_DATA, used.data)):
            limit, _ = process.rlimit(resource)
            left += [limit - taken] * (limit != psutil.RLIM_INFINITY)
    return max(0, min(left))


def _left_by_cgroups(root: Path) -> Iterator[int]:
    """What each limit of this process's cgroups (versions 1 and 2) and their parents leaves; page cache can be reclaimed."""

    def read(path: Path) -> str:
        return path.read_text() if path.exists() else ""

    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            mount, limits, usage, cache = ".", ("memory.max", "memory.high"), "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, limits, usage, cache = "memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        own = Path(path.lstrip("/"))  # in a container it may lead nowhere: then the mount itself is the own cgroup
        for group in (root / "sys/fs/cgroup" / mount / parent for parent in (own, *own.parents)):
            counts = dict(line.split() for line in read(group / "memory.stat").splitlines())
            used = int(read(group / usage) or 0) - int(counts.get(cache, 0))
            yield from (int(limit) - used for name in limits if (limit := read(group / name).strip() or "max") != "max")


def count_blocks(
    config: Config,
    spec: ModelSpec,
    block_size: int,
    max_model_len: int,
    meter: MemoryMeter,
    profile_run: Callable[[], object],
    tp: TensorParallel = ALONE,
) -> tuple[int, str]:
    """The number of blocks and a line that shows how it was found. Raises ValueError if there is memory for none."""
    num_kv_heads, _ = tp.divide(spec.num_kv_heads)
    block_bytes = block_size * 2 * spec.num_layers * num_kv_heads * spec.head_dim * spec.dtype.itemsize
    tp.minimum([0])  # here all ranks have loaded their weights
    if config.num_kvcache_blocks is not None:
        num_blocks, origin = config.num_kvcache_blocks, "num_kvcache_blocks"
    else:
        if config.kvcache_memory_bytes is not None:
            budget, origin = config.kvcache_memory_bytes, "kvcache_memory_bytes"
        elif meter.device.type == "cuda":
            profile_run()
            utilization, peak = config.gpu_memory_utilization, meter.peak()
            budget = int(min(utilization * meter.total, GPU_SHARE_OF_FREE * meter.free_before)) - peak
            origin = (
                f"min({utilization} * {_gb(meter.total)}, {GPU_SHARE_OF_FREE} * {_gb(meter.free_before)} free)"
                f" - {_gb(peak)} for weights, CUDA graphs and the largest step"
            )
        else:
            available = find_available_memory()
            budget = int(available * CPU_SHARE / tp.size)
            shares = f" / {tp.size} ranks" if tp.size > 1 else ""
            origin = f"{CPU_SHARE} * {_gb(available)} available{shares}"
        if config.kvcache_memory_bytes is None:
            useful = config.max_num_seqs * -(-max_model_len // block_size) * block_bytes
            budget, origin = min(budget, useful), f"min({origin}, {_gb(useful)} for max_num_seqs)"
        num_blocks = budget // block_bytes
        origin = f"({origin} = {_gb(budget)}) / {block_bytes} B"
        if num_blocks < 1:
            raise ValueError(
                f"no memory for a single block of KV cache: {origin}; raise kvcache_memory_bytes"
                + " or gpu_memory_utilization" * (meter.device.type == "cuda")
            )
    if tp.size > 1:
        smallest, least, minus_most = tp.minimum([num_blocks, block_size, -block_size])
        if least != -minus_most:
            raise ValueError(
                f"the ranks' attention backends prefer blocks of {least} and {-minus_most} tokens: set kvcache_block_size"
            )
        num_blocks, origin = smallest, f"{origin} = {num_blocks}; the smallest of {tp.size} ranks"
    return num_blocks, f"KV cache: {origin} = {num_blocks} blocks of {block_size} = {num_blocks * block_size} tokens"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
