"""How many blocks of KV cache fit into memory, and how many sequences with states or windows.

budget            = kvcache_memory_bytes, or that of the device
budget of a GPU   = min(gpu_memory_utilization * total, GPU_SHARE_OF_FREE * free before loading)
                    - weights - CUDA graphs - peak of the largest step
budget of a CPU   = CPU_SHARE * available after loading the weights / ranks
lanes             = max_num_seqs, or as many as have room for their recurrent states and windows in
                    half of the budget, or in all of it if every layer has a window
windows           = blocks of the second pool, see count_window_blocks
blocks            = num_kvcache_blocks, or what the rest of the budget has room for
upper limit       = lanes * blocks of max_model_len tokens, unless kvcache_memory_bytes is given
several ranks     = the smallest of all ranks, because they share block tables
"""

from bisect import bisect_right
from dataclasses import dataclass

from nanovllm.config import Config
from nanovllm.layers.tensor_parallel import ALONE, TensorParallel
from nanovllm.utils.helpers import cdiv
from nanovllm.worker.memory import MemoryMeter, find_available_memory, show_bytes
from nanovllm.worker.state_slots import StateSlots

# The second pool holds the K/V of a whole step beside the windows. If it does not fit, a step gets
# this share of the budget, and max_num_batched_tokens is lowered.
STEP_SHARE = 0.125
GPU_SHARE_OF_FREE = 0.95  # leaves room for what the driver and other processes allocate
# A small share, because other programs use this memory, too. A quarter of 16 GB has room for 35,000
# tokens of Qwen3-0.6B.
CPU_SHARE = 0.25
ENLARGE_ADVICE = (
    "give the cache more memory (num_kvcache_blocks, kvcache_memory_bytes, gpu_memory_utilization)"
)


@dataclass(frozen=True, kw_only=True)
class CacheUnits:
    """What the caches of one rank are made of."""

    block_bytes: int  # of a block, in all layers of the first pool
    window_block_bytes: int = 0  # of a block, in all layers of the second pool. 0: no second pool
    state_bytes: int = 0  # of a state slot, in all layers
    block_size: int
    max_model_len: int
    window: int = 0  # tokens that a query attends to in layers of the second pool

    def count_window_blocks(self, num_lanes: int, num_step_tokens: int) -> int:
        """Count the blocks with which the second pool never runs out.

        A sequence with n computed tokens holds the blocks that a query at the start of its last
        block attends to, that block, and those of its tokens in the current step, which begin and
        end within a block.
        """
        if self.window_block_bytes == 0:
            return 0
        per_lane = cdiv(self.window - 1, self.block_size) + 2
        num_blocks = num_lanes * per_lane + num_step_tokens // self.block_size
        return min(num_blocks, num_lanes * cdiv(self.max_model_len, self.block_size))


@dataclass(frozen=True)
class Budget:
    """Memory for the blocks and states of one rank."""

    num_bytes: int
    origin: str  # how the number was computed


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """The sizes of the caches, which all ranks have agreed on, and the memory of this rank."""

    config: Config
    units: CacheUnits
    num_blocks: int
    num_window_blocks: int  # of the second pool, 0 if there is none
    num_lanes: int  # sequences that can run at once
    max_num_batched_tokens: int
    budget: Budget
    states_bytes: int
    windows_bytes: int
    num_fitting_lanes: int  # lanes for whose states and windows there is room
    blocks_bytes: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.units.block_size

    def describe(self) -> str:
        """Show the arithmetic in one line."""
        config = self.config
        terms = self.budget.origin
        joint = " -" if config.num_kvcache_blocks is None else ", beside"
        for kind, num_bytes in (("states", self.states_bytes), ("windows", self.windows_bytes)):
            if num_bytes > 0:
                shown = show_bytes(num_bytes)
                terms += f"{joint} {shown} for {kind} of {self.num_fitting_lanes} lanes"
        shown = show_bytes(self.blocks_bytes)
        if self.blocks_bytes < self.budget.num_bytes - self.states_bytes - self.windows_bytes:
            terms = f"min({terms}, {shown} for max_num_seqs)"
        line = f"KV cache: ({terms} = {shown}) / {self.units.block_bytes} B"
        if self.units.block_bytes == 0:
            line = f"KV cache: {show_bytes(self.windows_bytes)} for windows of all layers"
        if config.tensor_parallel_size > 1:
            line += f", the smallest of {config.tensor_parallel_size} ranks"
        block_size = self.units.block_size
        line += f" = {self.num_blocks} blocks of {block_size} = {self.num_tokens} tokens"
        if self.num_window_blocks > 0:
            line += f", and {self.num_window_blocks} blocks for windows of {self.units.window}"
        if self.num_lanes < min(config.max_num_seqs, self.num_blocks):
            line += f"; max_num_seqs is lowered from {config.max_num_seqs} to {self.num_lanes}"
        given = config.max_num_batched_tokens
        if self.max_num_batched_tokens < given:
            lowered = self.max_num_batched_tokens
            line += f"; max_num_batched_tokens is lowered from {given} to {lowered}"
        return line


def plan_cache(
    config: Config,
    meter: MemoryMeter | None,
    units: CacheUnits,
    tp: TensorParallel = ALONE,
) -> CachePlan:
    """Divide the memory of this rank, and agree with the others on the smallest numbers.

    Raises ValueError if there is no memory for a single block, or for what a lane needs.
    """
    budget = find_budget(config, meter)
    block_size = units.block_size
    num_step_tokens = config.max_num_batched_tokens
    fitting_lanes = count_lanes(config, budget.num_bytes, num_step_tokens, units)
    if units.window_block_bytes > 0 and fitting_lanes < config.max_num_seqs:
        num_step_blocks = max(1, int(budget.num_bytes * STEP_SHARE) // units.window_block_bytes)
        num_step_tokens = min(num_step_tokens, num_step_blocks * block_size)
        fitting_lanes = count_lanes(config, budget.num_bytes, num_step_tokens, units)
    states_bytes, windows_bytes = count_lane_bytes(config, fitting_lanes, num_step_tokens, units)
    blocks_bytes = budget.num_bytes - states_bytes - windows_bytes
    useful_blocks = fitting_lanes * cdiv(units.max_model_len, block_size)
    if config.num_kvcache_blocks is not None:
        blocks_bytes = config.num_kvcache_blocks * units.block_bytes
        budget = Budget(states_bytes + windows_bytes + blocks_bytes, "as requested")
    elif config.kvcache_memory_bytes is None or units.block_bytes == 0:
        blocks_bytes = min(blocks_bytes, useful_blocks * units.block_bytes)
    if units.block_bytes > 0:
        num_blocks = max(0, blocks_bytes // units.block_bytes)
    else:  # all layers have windows, so the blocks of the first pool are only numbers
        num_blocks = config.num_kvcache_blocks or useful_blocks
    # The block size is sent twice, once negated, because a minimum also finds the maximum this way.
    numbers = [num_blocks, fitting_lanes, num_step_tokens, block_size, -block_size]
    num_blocks, num_lanes, num_step_tokens, smallest, minus_largest = tp.minimum(numbers)
    if smallest != -minus_largest:
        raise ValueError(
            f"the ranks' attention backends prefer blocks of {smallest} and {-minus_largest}"
            " tokens: set kvcache_block_size"
        )
    if num_lanes < 1:
        kind = "recurrent states" if units.state_bytes > 0 else "windows"
        needed = sum(count_lane_bytes(config, 1, num_step_tokens, units))
        share = "half of the cache" if units.block_bytes > 0 else "the cache"
        raise ValueError(
            f"the {kind} of one sequence take {show_bytes(needed)}, more than {share}:"
            " raise kvcache_memory_bytes or gpu_memory_utilization"
        )
    num_lanes = min(num_lanes, num_blocks)  # a running sequence holds at least one block
    plan = CachePlan(
        config=config,
        units=units,
        num_blocks=num_blocks,
        num_window_blocks=units.count_window_blocks(num_lanes, num_step_tokens),
        num_lanes=num_lanes,
        max_num_batched_tokens=num_step_tokens,
        budget=budget,
        states_bytes=states_bytes,
        windows_bytes=windows_bytes,
        num_fitting_lanes=fitting_lanes,
        blocks_bytes=blocks_bytes,
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


def count_lane_bytes(
    config: Config, num_lanes: int, num_step_tokens: int, units: CacheUnits
) -> tuple[int, int]:
    """The bytes that the recurrent states and the windows of lanes take."""
    num_state_slots = StateSlots(config, num_lanes).count
    num_window_blocks = units.count_window_blocks(num_lanes, num_step_tokens)
    return num_state_slots * units.state_bytes, num_window_blocks * units.window_block_bytes


def count_lanes(config: Config, budget: int, num_step_tokens: int, units: CacheUnits) -> int:
    """The number of lanes whose states and windows fit into half of `budget`.

    All of it is for windows if the first pool takes no memory. If num_kvcache_blocks is given,
    there was no profile run. The other half then holds these blocks and what a step allocates.
    """
    most = min(config.max_num_seqs, config.num_kvcache_blocks or config.max_num_seqs)
    limit = budget // 2 if units.block_bytes > 0 else budget

    def count_bytes(num_lanes: int) -> int:
        return sum(count_lane_bytes(config, num_lanes, num_step_tokens, units))

    return bisect_right(range(1, most + 1), max(0, limit), key=count_bytes)
