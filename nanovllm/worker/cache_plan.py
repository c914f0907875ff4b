"""How many blocks of KV cache fit into memory, and how many sequences with recurrent states.

budget            = kvcache_memory_bytes, or that of the device
budget of a GPU   = min(gpu_memory_utilization * total, GPU_SHARE_OF_FREE * free before loading)
                    - weights - CUDA graphs - peak of the largest step
budget of a CPU   = CPU_SHARE * available after loading the weights / ranks
recurrent states  = those of max_num_seqs lanes, or of as many as half of the budget has room for
blocks            = num_kvcache_blocks, or what the rest of the budget has room for
upper limit       = lanes * blocks of max_model_len tokens, unless kvcache_memory_bytes is given
several ranks     = the smallest of all ranks, because they share block tables
"""

from typing import NamedTuple

from nanovllm.config import Config
from nanovllm.layers.tensor_parallel import ALONE, TensorParallel
from nanovllm.utils.arithmetic import cdiv
from nanovllm.worker.memory import MemoryMeter, find_available_memory, show_bytes
from nanovllm.worker.state_slots import StateSlots

GPU_SHARE_OF_FREE = 0.95  # leaves room for what the driver and other processes allocate
# A small share, because other programs use this memory, too. A quarter of 16 GB has room for 35,000
# tokens of Qwen3-0.6B.
CPU_SHARE = 0.25
ENLARGE_ADVICE = (
    "give the cache more memory (num_kvcache_blocks, kvcache_memory_bytes, gpu_memory_utilization)"
)


class CachePlan(NamedTuple):
    """The sizes of the caches, which all ranks have agreed on."""

    num_blocks: int
    num_tokens: int
    num_lanes: int  # sequences that can run at once
    arithmetic: str  # how this rank has computed them, in one line


def plan_cache(
    config: Config,
    meter: MemoryMeter | None,
    tp: TensorParallel = ALONE,
    *,
    block_bytes: int,
    state_bytes: int,
    block_size: int,
    max_model_len: int,
) -> CachePlan:
    """Divide the memory of this rank, and agree with the others on the smallest numbers.

    `block_bytes` and `state_bytes` are those of a block and of a state slot in all layers.
    Raises ValueError if there is no memory for a single block, or for the states of a lane.
    """
    budget, terms = find_budget(config, meter)
    num_state_lanes = count_lanes(config, budget, state_bytes)
    states_bytes = StateSlots(config, num_state_lanes).count * state_bytes
    blocks_bytes = budget - states_bytes
    joint = " -"
    if config.num_kvcache_blocks is not None:
        blocks_bytes = config.num_kvcache_blocks * block_bytes
        terms = "as requested"
        joint = ", beside"
    if states_bytes > 0:
        terms += f"{joint} {show_bytes(states_bytes)} for states of {num_state_lanes} lanes"
    if config.num_kvcache_blocks is None and config.kvcache_memory_bytes is None:
        useful_bytes = num_state_lanes * cdiv(max_model_len, block_size) * block_bytes
        if useful_bytes < blocks_bytes:
            blocks_bytes = useful_bytes
            terms = f"min({terms}, {show_bytes(useful_bytes)} for max_num_seqs)"
    arithmetic = f"KV cache: ({terms} = {show_bytes(blocks_bytes)}) / {block_bytes} B"
    if config.tensor_parallel_size > 1:
        arithmetic += f", the smallest of {config.tensor_parallel_size} ranks"

    # The block size is in it twice, to find out whether those of all ranks are the same.
    num_blocks = max(0, blocks_bytes // block_bytes)
    numbers = [num_blocks, num_state_lanes, block_size, -block_size]
    num_blocks, num_lanes, smallest, minus_largest = tp.minimum(numbers)
    if smallest != -minus_largest:
        raise ValueError(
            f"the ranks' attention backends prefer blocks of {smallest} and {-minus_largest}"
            " tokens: set kvcache_block_size"
        )
    if num_lanes < 1:
        shown = show_bytes(StateSlots(config, num_lanes=1).count * state_bytes)
        raise ValueError(
            f"the recurrent states of one sequence take {shown}, more than half"
            " of the cache: raise kvcache_memory_bytes or gpu_memory_utilization"
        )
    num_tokens = num_blocks * block_size
    arithmetic += f" = {num_blocks} blocks of {block_size} = {num_tokens} tokens"
    if num_blocks < 1:
        raise ValueError(f"no room for one block of {arithmetic}; {ENLARGE_ADVICE}")
    num_lanes = min(num_lanes, num_blocks)  # a running sequence holds at least one block
    if num_lanes < min(config.max_num_seqs, num_blocks):
        arithmetic += f"; max_num_seqs is lowered from {config.max_num_seqs} to {num_lanes}"
    return CachePlan(num_blocks, num_tokens, num_lanes, arithmetic)


def find_budget(config: Config, meter: MemoryMeter | None) -> tuple[int, str]:
    """Find the memory for blocks and states of one rank, in bytes, and say where it comes from.

    A rank with a GPU has a meter.
    """
    if config.kvcache_memory_bytes is not None:
        return config.kvcache_memory_bytes, "as requested"
    if meter is None:
        available = find_available_memory()
        num_ranks = config.tensor_parallel_size
        origin = f"{CPU_SHARE} * {show_bytes(available)} available / {num_ranks} ranks"
        return int(available * CPU_SHARE / num_ranks), origin
    utilization = config.gpu_memory_utilization
    peak = meter.peak()
    limit = min(utilization * meter.total, GPU_SHARE_OF_FREE * meter.free_before)
    of_total = f"{utilization} * {show_bytes(meter.total)}"
    of_free = f"{GPU_SHARE_OF_FREE} * {show_bytes(meter.free_before)} free"
    origin = f"min({of_total}, {of_free}) - {show_bytes(peak)} taken"
    return int(limit) - peak, origin


def count_lanes(config: Config, budget: int, state_bytes: int) -> int:
    """The number of lanes whose states fit into half of `budget`.

    If num_kvcache_blocks is given, the other half is not reserved for blocks. It then holds these
    and what a step allocates, because there was no profile run.
    """
    num_lanes = min(config.max_num_seqs, config.num_kvcache_blocks or config.max_num_seqs)
    while num_lanes > 0 and StateSlots(config, num_lanes).count * state_bytes > max(0, budget // 2):
        num_lanes -= 1
    return num_lanes
