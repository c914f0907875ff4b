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

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Budget:
    """Memory for the blocks and states of one rank."""

    num_bytes: int
    origin: str  # how the number was computed


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """The sizes of the caches, which all ranks have agreed on, and the memory of this rank."""

    config: Config
    num_blocks: int
    block_size: int
    num_lanes: int  # sequences that can run at once
    budget: Budget
    states_bytes: int
    num_state_lanes: int  # lanes for whose states half of the budget has room
    blocks_bytes: int
    block_bytes: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def describe(self) -> str:
        """Show the arithmetic in one line."""
        config = self.config
        terms = self.budget.origin
        if self.states_bytes > 0:
            joint = " -" if config.num_kvcache_blocks is None else ", beside"
            states = f"{show_bytes(self.states_bytes)} for states of {self.num_state_lanes} lanes"
            terms += f"{joint} {states}"
        shown = show_bytes(self.blocks_bytes)
        if self.blocks_bytes < self.budget.num_bytes - self.states_bytes:
            terms = f"min({terms}, {shown} for max_num_seqs)"
        line = f"KV cache: ({terms} = {shown}) / {self.block_bytes} B"
        if config.tensor_parallel_size > 1:
            line += f", the smallest of {config.tensor_parallel_size} ranks"
        line += f" = {self.num_blocks} blocks of {self.block_size} = {self.num_tokens} tokens"
        if self.num_lanes < min(config.max_num_seqs, self.num_blocks):
            line += f"; max_num_seqs is lowered from {config.max_num_seqs} to {self.num_lanes}"
        return line


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
    budget = find_budget(config, meter)
    state_lanes = count_lanes(config, budget.num_bytes, state_bytes)
    states_bytes = StateSlots(config, state_lanes).count * state_bytes
    blocks_bytes = budget.num_bytes - states_bytes
    if config.num_kvcache_blocks is not None:
        blocks_bytes = config.num_kvcache_blocks * block_bytes
        budget = Budget(states_bytes + blocks_bytes, "as requested")
    elif config.kvcache_memory_bytes is None:
        useful = state_lanes * cdiv(max_model_len, block_size) * block_bytes
        blocks_bytes = min(blocks_bytes, useful)
    # The block size is sent twice, once negated, because a minimum also finds the maximum this way.
    num_blocks = max(0, blocks_bytes // block_bytes)
    numbers = [num_blocks, state_lanes, block_size, -block_size]
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
    plan = CachePlan(
        config=config,
        num_blocks=num_blocks,
        block_size=block_size,
        num_lanes=min(num_lanes, num_blocks),  # a running sequence holds at least one block
        budget=budget,
        states_bytes=states_bytes,
        num_state_lanes=state_lanes,
        blocks_bytes=blocks_bytes,
        block_bytes=block_bytes,
    )
    if num_blocks < 1:
        raise ValueError(f"no room for one block of {plan.describe()}; {ENLARGE_ADVICE}")
    return plan


def find_budget(config: Config, meter: MemoryMeter | None) -> Budget:
    """Find the memory for blocks and states of one rank. A rank with a GPU has a meter."""
    if config.kvcache_memory_bytes is not None:
        return Budget(config.kvcache_memory_bytes, "as requested")
    if meter is None:
        available = find_available_memory()
        num_ranks = config.tensor_parallel_size
        origin = f"{CPU_SHARE} * {show_bytes(available)} available / {num_ranks} ranks"
        return Budget(int(available * CPU_SHARE / num_ranks), origin)
    utilization = config.gpu_memory_utilization
    peak = meter.peak()
    limit = min(utilization * meter.total, GPU_SHARE_OF_FREE * meter.free_before)
    of_total = f"{utilization} * {show_bytes(meter.total)}"
    of_free = f"{GPU_SHARE_OF_FREE} * {show_bytes(meter.free_before)} free"
    origin = f"min({of_total}, {of_free}) - {show_bytes(peak)} taken"
    return Budget(int(limit) - peak, origin)


def count_lanes(config: Config, budget: int, state_bytes: int) -> int:
    """The number of lanes whose states fit into half of `budget`.

    If num_kvcache_blocks is given, the other half is not reserved for blocks. It then holds these
    and what a step allocates, because there was no profile run.
    """
    num_lanes = min(config.max_num_seqs, config.num_kvcache_blocks or config.max_num_seqs)
    if state_bytes == 0:
        return num_lanes
    num_fixed = StateSlots(config, 0).count
    num_per_lane = StateSlots(config, 1).count - num_fixed
    num_fitting = max(0, budget // 2) // state_bytes - num_fixed
    return max(0, min(num_lanes, num_fitting // num_per_lane))
