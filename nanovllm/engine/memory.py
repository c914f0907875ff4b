"""How many blocks of KV cache fit into memory.

bytes of a token  = 2 (K and V) * layers * KV heads of this rank * head_dim * bytes of a number
bytes of a block  = block size * bytes of a token
GPU               = min(gpu_memory_utilization * total, GPU_SHARE_OF_FREE * free before loading)
                    - weights - CUDA graphs - peak of the largest step
CPU               = CPU_SHARE * available after loading the weights / ranks
upper limit       = what max_num_seqs sequences of max_model_len can use
several ranks     = the smallest of all ranks, because they share block tables
available         = the least of what the machine and the cgroups (version 2) of this process have
"""

from pathlib import Path

import psutil
import torch

from nanovllm.arithmetic import cdiv
from nanovllm.config import Config
from nanovllm.layers.tensor_parallel import ALONE, TensorParallel

GPU_SHARE_OF_FREE = 0.95  # leaves room for what the driver and other processes allocate
# Of a machine that others use, too. A quarter of 16 GB has room for 35,000 tokens of Qwen3-0.6B.
CPU_SHARE = 0.25
ENLARGE = (
    "give the cache more memory (num_kvcache_blocks, kvcache_memory_bytes, gpu_memory_utilization)"
)


class MemoryMeter:
    """Measures the GPU memory that torch and the driver take after the meter was made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.init()
            torch.cuda.empty_cache()  # memory of earlier engines of this process
            torch.cuda.reset_peak_memory_stats(device)
            self.reserved_before = torch.cuda.memory_reserved(device)
            self.free_before, self.total = torch.cuda.mem_get_info(device)

    def peak(self) -> int:
        """Peak memory of this engine in bytes: torch's, and the driver's for libraries and graphs.

        Counts reserved memory, because the pool of a CUDA graph keeps what was freed in it.
        """
        free, _ = torch.cuda.mem_get_info(self.device)
        reserved = torch.cuda.memory_reserved(self.device) - self.reserved_before
        of_driver = self.free_before - free - reserved
        peak_reserved = torch.cuda.max_memory_reserved(self.device) - self.reserved_before
        return peak_reserved + max(0, of_driver)


def find_available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can still allocate, by the machine's and its cgroups' limits.

    A cgroup's usage includes files in the page cache, of which the inactive ones can be reclaimed.
    """
    left = [psutil.virtual_memory().available]
    own = Path()
    membership = root / "proc/self/cgroup"
    if membership.exists():
        own = Path(membership.read_text().partition("0::/")[2].strip())
    for relative in (own, *own.parents):  # in a container often only the last one exists
        group = root / "sys/fs/cgroup" / relative
        for limit in (group / "memory.max", group / "memory.high"):
            if not limit.exists() or limit.read_text().strip() == "max":
                continue
            lines = (group / "memory.stat").read_text().splitlines()
            stat = dict(line.split() for line in lines)
            used = int((group / "memory.current").read_text()) - int(stat["inactive_file"])
            left.append(int(limit.read_text()) - used)
    return max(0, min(left))


def count_blocks(
    config: Config,
    block_bytes: int,
    block_size: int,
    max_model_len: int,
    meter: MemoryMeter,
    tp: TensorParallel = ALONE,
) -> tuple[int, str]:
    """The number of blocks, and a line that shows the arithmetic.

    Raises ValueError if there is no memory for a single block.
    """
    useful = config.max_num_seqs * cdiv(max_model_len, block_size) * block_bytes
    origin = "as requested"
    if config.num_kvcache_blocks is not None:
        budget = config.num_kvcache_blocks * block_bytes
    elif config.kvcache_memory_bytes is not None:
        budget = config.kvcache_memory_bytes
    else:
        if meter.device.type == "cuda":
            free, origin = gpu_budget(config.gpu_memory_utilization, meter)
        else:
            free, origin = cpu_budget(tp.size)
        budget = min(free, useful)
        if useful <= free:
            origin = f"min({origin}, {show_gb(useful)} for max_num_seqs)"
    num_blocks = agree_on_blocks(budget // block_bytes, block_size, tp)
    arithmetic = f"({origin} = {show_gb(budget)}) / {block_bytes} B"
    if tp.size > 1:
        arithmetic += f", the smallest of {tp.size} ranks"
    if num_blocks < 1:
        raise ValueError(f"no memory for a KV cache: {arithmetic}; {ENLARGE}")
    num_tokens = num_blocks * block_size
    result = f"{num_blocks} blocks of {block_size} = {num_tokens} tokens"
    return num_blocks, f"KV cache: {arithmetic} = {result}"


def gpu_budget(utilization: float, meter: MemoryMeter) -> tuple[int, str]:
    """Bytes for the KV cache after a profile run, and how they were computed."""
    peak = meter.peak()
    limit = min(utilization * meter.total, GPU_SHARE_OF_FREE * meter.free_before)
    of_total = f"{utilization} * {show_gb(meter.total)}"
    of_free = f"{GPU_SHARE_OF_FREE} * {show_gb(meter.free_before)} free"
    return int(limit) - peak, f"min({of_total}, {of_free}) - {show_gb(peak)} taken"


def cpu_budget(num_ranks: int) -> tuple[int, str]:
    """Bytes for the KV cache of one rank, and how they were computed."""
    available = find_available_memory()
    origin = f"{CPU_SHARE} * {show_gb(available)} available / {num_ranks} ranks"
    return int(available * CPU_SHARE / num_ranks), origin


def agree_on_blocks(num_blocks: int, block_size: int, tp: TensorParallel) -> int:
    """The smallest number of blocks of any rank. Raises ValueError if their block sizes differ."""
    num_blocks, smallest, minus_largest = tp.minimum([num_blocks, block_size, -block_size])
    if smallest != -minus_largest:
        raise ValueError(
            f"the ranks' attention backends prefer blocks of {smallest} and {-minus_largest}"
            " tokens: set kvcache_block_size"
        )
    return num_blocks


def show_gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
