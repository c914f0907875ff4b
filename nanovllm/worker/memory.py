"""How many blocks of KV cache fit into memory, and how many sequences with recurrent states.

bytes of a token  = 2 (K and V) * layers * KV heads of this rank * head_dim * bytes of a number
bytes of a block  = block size * bytes of a token
budget            = kvcache_memory_bytes, or that of the device
budget of a GPU   = min(gpu_memory_utilization * total, GPU_SHARE_OF_FREE * free before loading)
                    - weights - CUDA graphs - peak of the largest step
budget of a CPU   = CPU_SHARE * available after loading the weights / ranks
recurrent states  = those of max_num_seqs lanes, or of as many as half of the budget has room for
blocks            = num_kvcache_blocks, or what the rest of the budget has room for
upper limit       = lanes * blocks of max_model_len tokens, unless kvcache_memory_bytes is given
several ranks     = the smallest of all ranks, because they share block tables
available         = the least of what the machine and the cgroups (version 2) of this process have
"""

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from nanovllm.config import Config
from nanovllm.layers.tensor_parallel import ALONE, TensorParallel
from nanovllm.utils.arithmetic import cdiv
from nanovllm.worker.state_slots import FIRST_LANE, count_slots, count_slots_per_lane

GPU_SHARE_OF_FREE = 0.95  # leaves room for what the driver and other processes allocate
# A small share, because other programs use this memory, too. A quarter of 16 GB has room for 35,000
# tokens of Qwen3-0.6B.
CPU_SHARE = 0.25
ENLARGE_ADVICE = (
    "give the cache more memory (num_kvcache_blocks, kvcache_memory_bytes, gpu_memory_utilization)"
)


@dataclass
class Budget:
    """Memory for the cache of one rank."""

    num_bytes: int
    origin: str  # how the number was computed


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
        driver_bytes = self.free_before - free - reserved
        peak_reserved = torch.cuda.max_memory_reserved(self.device) - self.reserved_before
        return peak_reserved + max(0, driver_bytes)


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
    meter: MemoryMeter,
    tp: TensorParallel = ALONE,
    *,
    block_bytes: int,
    slot_bytes: int,
    block_size: int,
    max_model_len: int,
) -> tuple[int, int, str]:
    """The number of blocks, the number of lanes, and a line that shows the arithmetic.

    Raises ValueError if there is no memory for a single block, or for the states of a lane.
    """
    budget = find_budget(config, meter, tp.size)
    num_lanes, state_bytes = count_lanes(config, budget.num_bytes, slot_bytes)
    states = f"{show_bytes(state_bytes)} for states of {num_lanes} lanes"
    if config.num_kvcache_blocks is not None:
        budget = Budget(config.num_kvcache_blocks * block_bytes, "as requested")
        if state_bytes > 0:
            budget.origin += f", beside {states}"
    else:
        if state_bytes > 0:
            budget = Budget(budget.num_bytes - state_bytes, f"{budget.origin} - {states}")
        useful = num_lanes * cdiv(max_model_len, block_size) * block_bytes
        if config.kvcache_memory_bytes is None and useful <= budget.num_bytes:
            origin = f"min({budget.origin}, {show_bytes(useful)} for max_num_seqs)"
            budget = Budget(useful, origin)
    num_blocks = budget.num_bytes // block_bytes
    num_blocks, num_lanes = agree_on_sizes(num_blocks, num_lanes, block_size, tp)
    arithmetic = f"({budget.origin} = {show_bytes(budget.num_bytes)}) / {block_bytes} B"
    if tp.size > 1:
        arithmetic += f", the smallest of {tp.size} ranks"
    if num_lanes < 1:
        state_bytes = count_slots(config, num_lanes=1) * slot_bytes
        raise ValueError(
            f"the recurrent states of one sequence take {show_bytes(state_bytes)}, more than half"
            " of the cache: raise kvcache_memory_bytes or gpu_memory_utilization"
        )
    if num_blocks < 1:
        raise ValueError(f"no room for one block of KV cache: {arithmetic}; {ENLARGE_ADVICE}")
    num_lanes = min(num_lanes, num_blocks)  # a running sequence holds at least one block
    num_tokens = num_blocks * block_size
    result = f"{num_blocks} blocks of {block_size} = {num_tokens} tokens"
    if num_lanes < min(config.max_num_seqs, num_blocks):
        result += f"; max_num_seqs is lowered from {config.max_num_seqs} to {num_lanes}"
    return num_blocks, num_lanes, f"KV cache: {arithmetic} = {result}"


def find_budget(config: Config, meter: MemoryMeter, num_ranks: int) -> Budget:
    """Find the memory for blocks and states of one rank."""
    if config.kvcache_memory_bytes is not None:
        return Budget(config.kvcache_memory_bytes, "as requested")
    if meter.device.type == "cuda":
        return gpu_budget(config.gpu_memory_utilization, meter)
    return cpu_budget(num_ranks)


def count_lanes(config: Config, budget: int, slot_bytes: int) -> tuple[int, int]:
    """The number of lanes whose states fit into half of `budget`, and the bytes of these states.

    If num_kvcache_blocks is given, the other half is not reserved for blocks. It then holds these
    and what a step allocates, because there was no profile run.
    """
    num_lanes = config.max_num_seqs
    if config.num_kvcache_blocks is not None:
        num_lanes = min(num_lanes, config.num_kvcache_blocks)
    if slot_bytes == 0:
        return num_lanes, 0
    most = (budget // 2 // slot_bytes - FIRST_LANE) // count_slots_per_lane(config)
    num_lanes = max(0, min(num_lanes, most))
    return num_lanes, count_slots(config, num_lanes) * slot_bytes


def gpu_budget(utilization: float, meter: MemoryMeter) -> Budget:
    """Find what a profile run leaves of a GPU."""
    peak = meter.peak()
    limit = min(utilization * meter.total, GPU_SHARE_OF_FREE * meter.free_before)
    of_total = f"{utilization} * {show_bytes(meter.total)}"
    of_free = f"{GPU_SHARE_OF_FREE} * {show_bytes(meter.free_before)} free"
    origin = f"min({of_total}, {of_free}) - {show_bytes(peak)} taken"
    return Budget(int(limit) - peak, origin)


def cpu_budget(num_ranks: int) -> Budget:
    """Find one rank's share of a machine's memory."""
    available = find_available_memory()
    origin = f"{CPU_SHARE} * {show_bytes(available)} available / {num_ranks} ranks"
    return Budget(int(available * CPU_SHARE / num_ranks), origin)


def agree_on_sizes(
    num_blocks: int, num_lanes: int, block_size: int, tp: TensorParallel
) -> tuple[int, int]:
    """The smallest numbers of blocks and of lanes of any rank.

    Raises ValueError if the block sizes of the ranks differ.
    """
    numbers = [num_blocks, num_lanes, block_size, -block_size]
    num_blocks, num_lanes, smallest, minus_largest = tp.minimum(numbers)
    if smallest != -minus_largest:
        raise ValueError(
            f"the ranks' attention backends prefer blocks of {smallest} and {-minus_largest}"
            " tokens: set kvcache_block_size"
        )
    return num_blocks, num_lanes


def show_bytes(num_bytes: int) -> str:
    if num_bytes < 10_000_000:  # 0.00 GB would hide why there is no room
        return f"{num_bytes} B"
    return f"{num_bytes / 1e9:.2f} GB"
