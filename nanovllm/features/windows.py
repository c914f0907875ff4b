"""Sliding windows: layers in which a query attends to the last tokens only (Gemma 3, Mistral).

K/V that have left the window are never read again. Layers with a window therefore have blocks of
their own, in a second pool, which a running sequence releases as its window moves. With block size
4 and a window of 6 tokens, a sequence that has computed 18 tokens holds these blocks:

    logical block     0    1    2    3    4
    block table    |  7 |  2 |  5 |  9 |  4 |    first pool: layers that attend to all tokens
    window table   |    |    |  6 |  3 |  1 |    second pool: token 16 attends to 11 up to 16
                     `----'
                       released, and cached until they are taken for other tokens

A sequence keeps what a query at the start of its last block attends to, here token 16 although
token 18 comes next. A preempted sequence, and a prompt that continues this one, can then start at a
block boundary. What a sequence holds is bounded, so the pool is sized for all lanes when the engine
starts (worker/cache_plan.py), never runs out, and changes nothing about admission and preemption.

The K/V of a prefix can be reused if all of its blocks are cached in the first pool, and the last
window before its end in the second:

    first pool     |  7 |  2 |  5 |  9 |         all blocks of the prefix
    second pool              |  6 |  3 |         those that token 16, the first new one, attends to

A block is cached in both pools under the same hash. The second pool evicts blocks that a window has
left before others, because the middle of a long text is rarely the end of a prefix. Two kinds of
blocks are kept longer. One is the last window of a sequence. The other is the window before the
point where a later prompt stopped matching, such as the end of a system prompt.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace

import numpy as np

from nanovllm.batch.batch import Batch
from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.feature import Facts, Feature
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.outputs import FinishReason
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step
from nanovllm.layers.attention import find_first_visible
from nanovllm.utils.helpers import cdiv


class WindowPool(BlockManager):
    """A pool that evicts the blocks of `passed`, oldest first, before other cached blocks."""

    def reset(self) -> None:
        super().reset()
        self.passed = OrderedDict[int, None]()  # free blocks that a window has left

    def share(self, block: Block) -> None:
        super().share(block)
        self.passed.pop(block.block_id, None)

    def take(self) -> int:
        first = next(iter(self.free_block_ids))
        if self.passed and self.blocks[first].is_cached:
            first, _ = self.passed.popitem(last=False)
            self.free_block_ids.move_to_end(first, last=False)
        self.passed.pop(first, None)
        return super().take()


@dataclass
class HeldBlocks:
    """The logical blocks that a sequence holds in the second pool, from `start` to `end`.

    Their physical blocks are in the row of the sequence's lane.
    """

    start: int = 0
    end: int = 0
    num_cached: int = 0  # blocks at the start of the sequence that were cached or shared
    num_found: int = 0  # blocks of the prefix that the first pool had when the sequence came


class Windows(Feature):
    """Manages the second pool. Comes after the features that change what a step computes."""

    serves = "sliding windows"

    def start(self, engine: LLMEngine) -> bool:
        worker = engine.executor.worker
        if worker.plan.num_window_blocks == 0:
            return False  # no context is longer than the window, so there is one pool
        assert worker.spec.window is not None
        self.window = worker.spec.window  # tokens, the largest window of a layer
        self.block_size = worker.block_size
        self.pool = WindowPool(
            worker.plan.num_window_blocks, self.block_size, worker.config.enable_prefix_caching
        )
        # The window tables of all lanes. An entry without a block is 0.
        self.tables = np.zeros((worker.plan.num_lanes, worker.block_table_width), np.int32)
        return super().start(engine)

    def reset(self) -> None:
        self.pool.reset()
        self.pool.root_hash = self.scheduler.block_manager.root_hash  # sequences have one hash
        self.held: dict[Sequence, HeldBlocks] = {}  # of sequences that were the head of the queue
        self.tables[:] = 0

    def find_start(self, num_blocks: int) -> int:
        """Return the first block that the token after the first `num_blocks` blocks attends to."""
        position = num_blocks * self.block_size
        return find_first_visible(position, self.window) // self.block_size

    def limit_prefix(self, seq: Sequence, prefix: list[Block]) -> list[Block]:
        """Cut `prefix` where the last window before its end is cached."""
        held = self.held.setdefault(seq, HeldBlocks())
        if seq.num_cached_tokens is None:  # after a preemption, the prefix is the sequence's own
            held.num_found = len(prefix)
        num_blocks = len(prefix)
        index = num_blocks
        while index > self.find_start(num_blocks):
            index -= 1
            if self.pool.find_block(seq, index) is None:
                num_blocks = index  # the prefix has to end before this block
        return prefix[:num_blocks]

    def admitted(self, seq: Sequence) -> None:
        """Share the window before the first token that is computed."""
        held = self.held[seq]
        held.end = seq.num_computed_tokens // self.block_size
        held.start = self.find_start(held.end)
        held.num_cached = held.end
        for index in range(held.start, held.end):
            block = self.pool.find_block(seq, index)
            assert block is not None  # limit_prefix has just found it
            self.pool.share(block)
            self.tables[seq.lane, index] = block.block_id

    def scheduled(self, seq: Sequence, end: int) -> None:
        self._resize(seq, end)
        self._cache(seq, min(end, seq.num_known_tokens))

    def planned(self, step: Step) -> None:
        for seq, num_tokens, num_logits in step:
            if num_logits > 1:  # has a draft
                self._resize(seq, seq.num_computed_tokens + num_tokens)

    def prepared(self, step: Step, batch: Batch) -> Batch:
        """Add the window tables of the sequences, and the slots of the tokens in them."""
        lanes = [seq.lane for seq in step.seqs]
        tables = self.tables[lanes, : batch.block_tables.shape[1]]
        lane_of_token = np.repeat(lanes, step.num_tokens)
        blocks, offsets = np.divmod(batch.positions, self.block_size)
        slots = self.tables[lane_of_token, blocks] * self.block_size + offsets
        return replace(batch, window_slots=slots, window_tables=tables)

    def advanced(self, step: Step) -> None:
        """Cache what became known. Release blocks of rejected drafts, and what windows leave."""
        for seq, num_tokens, _ in step:
            held = self.held[seq]
            end = seq.num_computed_tokens
            num_full = end // self.block_size
            if num_tokens == 1 and end % self.block_size != 0 and held.end == num_full + 1:
                continue  # fast path: most decodes stay within a block
            self._cache(seq, end)
            self._resize(seq, end)
            start = self.find_start(num_full)
            end_of_prefix = range(self.find_start(held.num_found), held.num_found)
            for index in range(held.start, start):
                self._release(seq, index, is_passed=index not in end_of_prefix)
            held.start = start

    def releasing(self, seq: Sequence) -> None:
        # Accepted draft tokens can have filled a block in the step that ends the sequence.
        self._cache(seq, min(seq.num_computed_tokens, len(seq.token_ids)))
        self._resize(seq, self.held[seq].start * self.block_size)

    def finished(self, seq: Sequence, reason: FinishReason) -> None:
        self.held.pop(seq, None)
        if reason == "error":  # what its window has left can have NaN, too
            self.pool.uncache_sequence(seq)

    def _resize(self, seq: Sequence, num_tokens: int) -> None:
        """Take or release blocks, so that the last one is that of the first `num_tokens` tokens."""
        held = self.held[seq]
        end = cdiv(num_tokens, self.block_size)
        for index in range(held.end, end):
            self.tables[seq.lane, index] = self.pool.take()
        for index in reversed(range(end, held.end)):
            self._release(seq, index)
        held.end = end

    def _release(self, seq: Sequence, index: int, is_passed: bool = False) -> None:
        block_id = int(self.tables[seq.lane, index])
        self.tables[seq.lane, index] = 0
        self.pool.release_block(seq, index, block_id)
        if is_passed and self.pool.blocks[block_id].ref_count == 0:
            self.pool.passed[block_id] = None

    def _cache(self, seq: Sequence, num_tokens: int) -> None:
        """Cache the blocks that the first `num_tokens` tokens make full."""
        held = self.held[seq]
        num_full = num_tokens // self.block_size
        for index in range(held.num_cached, num_full):
            self.pool.cache_block(seq, index, int(self.tables[seq.lane, index]))
        held.num_cached = num_full

    def stats(self) -> dict[str, int]:
        return {
            "num_window_blocks": self.pool.num_blocks,
            "num_free_window_blocks": len(self.pool.free_block_ids),
        }

    def describe_settings(self) -> Facts:
        return {"window": self.window, "num_window_blocks": self.pool.num_blocks}

    def describe(self, step: Step) -> tuple[Facts, dict[Sequence, Facts]]:
        seqs: dict[Sequence, Facts] = {}
        for seq in step.seqs:
            held = self.held[seq]
            ids = self.tables[seq.lane, held.start : held.end].tolist()
            seqs[seq] = {"window_start": held.start, "window_blocks": ids}
        return {"window_pool": self.pool.count_states()}, seqs
