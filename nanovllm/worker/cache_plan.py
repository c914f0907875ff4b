"""How many blocks of KV cache fit into memory, and how many sequences with states or windows.

budget            = kvcache_memory_bytes, or that of the device
budget of a GPU   = min(gpu_memory_utilization * total, GPU_SHARE_OF_FREE * free before loading)
                    - weights - CUDA graphs - peak of the largest step
budget of a CPU   = CPU_SHARE * available after loading the weights / ranks
several ranks     = the smallest budget of all ranks, because they share block tables
lanes             = max_num_seqs, or as many as have room for their recurrent states and windows in
                    half of the budget, or in all of it if every layer has a window
windows           = blocks of the second pool, see CachePlanner.count_window_blocks
blocks            = num_kvcache_blocks, or what the rest of the budget has room for
upper limit       = lanes * blocks of max_model_len tokens, unless the option num_kvcache_blocks or
                    kvcache_memory_bytes is given
"""

from bisect import bisect_right
from dataclasses import dataclass

from nanovllm.config import Config
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
class CachePlan:
    """The sizes of the KV cache, the same on all ranks. The default is no cache."""

    num_blocks: int = 0
    num_window_blocks: int = 0  # of the second pool. 0: all layers share one pool
    num_lanes: int = 0  # sequences that can run at once
    num_tokens: int = 0  # that have room in the blocks
    max_num_batched_tokens: int = 0
    description: str = ""  # the arithmetic in one line


def find_budget(config: Config, meter: MemoryMeter | None) -> tuple[int, str]:
    """Find the bytes for blocks and states of one rank, and say how they were computed.

    A rank with a GPU has a meter, whose peak includes weights, CUDA graphs and the largest step.
    """
    if config.kvcache_memory_bytes is not None:
        return config.kvcache_memory_bytes, "kvcache_memory_bytes"
    if meter is None:
        available = find_available_memory()
        num_ranks = config.tensor_parallel_size
        origin = f"{CPU_SHARE} * {show_bytes(available)} available / {num_ranks} ranks"
        return int(available * CPU_SHARE / num_ranks), origin
    utilization = config.gpu_memory_utilization
    peak = meter.peak()
    limit = min(utilization * meter.total, GPU_SHARE_OF_FREE * meter.free_before)
    origin = (
        f"min({utilization} * {show_bytes(meter.total)},"
        f" {GPU_SHARE_OF_FREE} * {show_bytes(meter.free_before)} free) - {show_bytes(peak)} taken"
    )
    return int(limit) - peak, origin


@dataclass(frozen=True, kw_only=True)
class CachePlanner:
    """Divides the memory of a rank among lanes, which come first, and blocks."""

    config: Config
    block_bytes: int  # of a block, in all layers of the first pool
    window_block_bytes: int = 0  # of a block, in all layers of the second pool. 0: no second pool
    state_bytes: int = 0  # of a state slot, in all layers
    block_size: int
    blocks_per_lane: int  # of a sequence of max_model_len tokens
    window: int = 0  # tokens that a query attends to in layers of the second pool

    def plan(self, num_bytes: int, origin: str) -> CachePlan:
        """Divide `num_bytes`. `origin` says how the number was computed.

        Raises ValueError if there is no memory for a single block, or for what a lane needs.
        """
        config = self.config
        num_step_tokens = config.max_num_batched_tokens
        num_lanes = self.count_lanes(num_bytes, num_step_tokens)
        if self.window_block_bytes > 0 and num_lanes < self.most_lanes:
            num_step_blocks = max(1, int(num_bytes * STEP_SHARE) // self.window_block_bytes)
            num_step_tokens = min(num_step_tokens, num_step_blocks * self.block_size)
            num_lanes = self.count_lanes(num_bytes, num_step_tokens)
        lane_bytes = self.count_lane_bytes(max(1, num_lanes), num_step_tokens)
        num_blocks = config.num_kvcache_blocks or self.count_blocks(
            num_bytes - lane_bytes, num_lanes
        )
        total = f"{show_bytes(num_bytes)} ({origin})"
        if num_lanes == 0 or num_blocks < 1:
            raise ValueError(
                f"no room for one sequence in {total}: a block takes"
                f" {show_bytes(self.block_bytes)}, and its states or windows, which may use half,"
                f" take {show_bytes(lane_bytes)}: {ENLARGE_ADVICE}"
            )
        num_lanes = min(num_lanes, num_blocks)  # a running sequence holds at least one block
        num_tokens = num_blocks * self.block_size
        description = (
            f"KV cache: of {total}, {show_bytes(num_blocks * self.block_bytes)} for {num_blocks}"
            f" blocks of {self.block_size} = {num_tokens} tokens, {show_bytes(lane_bytes)} for"
            f" states and windows; at most {num_lanes} sequences and {num_step_tokens} tokens in a"
            " step"
        )
        return CachePlan(
            num_blocks=num_blocks,
            num_window_blocks=self.count_window_blocks(num_lanes, num_step_tokens),
            num_lanes=num_lanes,
            num_tokens=num_tokens,
            max_num_batched_tokens=num_step_tokens,
            description=description,
        )

    @property
    def most_lanes(self) -> int:
        """max_num_seqs, or fewer given blocks, because a running sequence holds one."""
        config = self.config
        return min(config.max_num_seqs, config.num_kvcache_blocks or config.max_num_seqs)

    def count_lanes(self, num_bytes: int, num_step_tokens: int) -> int:
        """Count the lanes whose states and windows fit into half of `num_bytes`, up to most_lanes.

        All of it is for windows if the first pool takes no memory. The half also holds if
        num_kvcache_blocks is given. There was no profile run then, so the other half is for these
        blocks and what a step allocates.
        Lanes without states and windows take no memory, so `num_bytes` can be negative then.
        """
        limit = num_bytes // 2 if self.block_bytes > 0 else num_bytes

        def count_bytes(num_lanes: int) -> int:
            return self.count_lane_bytes(num_lanes, num_step_tokens)

        lanes = range(1, self.most_lanes + 1)
        return bisect_right(lanes, max(0, limit), key=count_bytes)

    def count_lane_bytes(self, num_lanes: int, num_step_tokens: int) -> int:
        """Count the bytes of all state slots of so many lanes, and of their windows."""
        num_state_slots = StateSlots(self.config, num_lanes).count
        num_window_blocks = self.count_window_blocks(num_lanes, num_step_tokens)
        return num_state_slots * self.state_bytes + num_window_blocks * self.window_block_bytes

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
        return min(num_blocks, num_lanes * self.blocks_per_lane)

    def count_blocks(self, num_bytes: int, num_lanes: int) -> int:
        """Count the blocks that fit into `num_bytes`, but by default no more than lanes can use."""
        most = num_lanes * self.blocks_per_lane
        if self.block_bytes == 0:  # all layers have windows, so these blocks are only numbers
            return most
        num_blocks = num_bytes // self.block_bytes
        return num_blocks if self.config.kvcache_memory_bytes is not None else min(num_blocks, most)
