"""Decides which sequences run in the next step, and how many tokens of each.

It uses neither tensors nor text. There are two queues, both first come, first served. `waiting`
sequences hold no blocks. `running` sequences hold blocks and a lane each. There are two policies:

    Scheduler              Mixed steps. Running sequences get their next tokens first, oldest first.
                           The rest of the token budget goes to chunks of waiting prompts, so a long
                           prompt stalls no decode (Sarathi-Serve, Agrawal et al. 2024; vLLM V1).
    PrefillFirstScheduler  A step has whole prompts if one is waiting and fits, and decodes
                           otherwise. New prompts stall all decodes (vLLM V0, nano-vLLM).

When blocks run out, the newest running sequence is preempted. It releases its blocks and is
recomputed later, often from its own cached blocks. The oldest sequence is never preempted for
another one, so every sequence finishes.
"""

import weakref
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.extension import Extension
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.outputs import FinishReason


class BlockedHead(NamedTuple):
    """The head of the queue, which did not fit when its prefix was last searched."""

    seq: Sequence
    num_needed_blocks: int  # free blocks that would have been enough
    prefix: list[Block]  # cached blocks that the search found


class Scheduler:
    """Mixed steps.

    `max_num_seqs` limits the sequences that hold blocks, `max_num_batched_tokens` the tokens of a
    step.
    """

    title = "mixed steps"  # in traces and benchmarks
    splits_prompts = True  # False: a prompt must fit into the budget of one step

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        extensions: Iterable[Extension] = (),
    ) -> None:
        self.extensions = Extension(extensions)
        for each in self.extensions.features:
            # A weak reference avoids a cycle, so an engine is freed with its last reference.
            each.scheduler = weakref.proxy(self)
        self.block_manager = block_manager
        self.block_size = block_manager.block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_draft_tokens = 0  # counted by an extension
        self.num_accepted_tokens = 0
        self.reset([])

    def reset(self, seqs: list[Sequence]) -> None:
        """Empty the KV cache and queue `seqs`, oldest first. Only their tokens are kept."""
        self.block_manager.reset()
        for seq in seqs:
            seq.restart()
        # An ordered set: any sequence leaves the queue in O(1).
        self.waiting = OrderedDict[Sequence, None].fromkeys(seqs)
        self.running: list[Sequence] = []  # in the order of admission
        self.free_lanes = list(range(self.max_num_seqs))[::-1]  # a stack, lane 0 on top
        self.blocked: BlockedHead | None = None
        self.extensions.reset()

    def add(self, seq: Sequence) -> None:
        self.waiting[seq] = None

    def schedule(self) -> list[Sequence]:
        """Plan the next step: admit and preempt sequences, and set num_scheduled_tokens of each."""
        self.extensions.begin_step()
        seqs = self.plan()
        self.extensions.planned(seqs)
        return seqs

    def plan(self) -> list[Sequence]:
        """Choose the sequences of a step by this policy.

        A step is not divided into prefill and decode. Prefill, chunk, recomputation and decode
        differ only in the number of tokens that a sequence is behind.
        """
        scheduled: list[Sequence] = []
        budget = self._schedule_running(self.max_num_batched_tokens, scheduled)
        self._schedule_waiting(budget, scheduled)
        return scheduled

    def _schedule_running(
        self, budget: int, scheduled: list[Sequence], only_partial: bool = False
    ) -> int:
        """Schedule running sequences, oldest first. Return the rest of the budget.

        With `only_partial`, skip sequences whose prefill or recomputation is complete.
        """
        index = 0
        while index < len(self.running) and budget > 0:  # preemption shortens the list
            seq = self.running[index]
            index += 1
            if only_partial and not seq.is_partial:
                continue
            num_tokens = len(seq.token_ids)
            num_missing = num_tokens - seq.num_computed_tokens
            if num_missing == 1 and seq.is_decode and num_tokens % self.block_size > 1:
                # Fast path: most decodes neither enter a block nor fill one. 256 of them take 39
                # us, and 260 us without this path. is_decode must be True already, because this
                # path leaves it as it is. After a prefill it is False.
                seq.num_scheduled_tokens = 1
                seq.num_logits = 1
                scheduled.append(seq)
                budget -= 1
                continue
            if not self._grow(seq):
                break
            budget = self._schedule_tokens(seq, budget, scheduled)
        return budget

    def _grow(self, seq: Sequence) -> bool:
        """Get a block for the newest token of `seq`, by preemption if none is free.

        Return False if `seq` itself was preempted. No victim is part of this step, because the
        newest sequence is `seq` or comes after it, and the step has only those before `seq`.
        """
        while not self.block_manager.grow(seq):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is seq:
                return False
        return True

    def _schedule_waiting(self, budget: int, scheduled: list[Sequence]) -> None:
        """Admit waiting sequences, in their order, while budget, lanes and blocks last."""
        while self.waiting and self.free_lanes and budget > 0:
            seq = next(iter(self.waiting))
            if not self._admit(seq, budget):
                break
            budget = self._schedule_tokens(seq, budget, scheduled)

    def _admit(self, seq: Sequence, budget: int) -> bool:
        """Move `seq` from `waiting` to `running` if there are blocks for all its tokens.

        If they are missing, `blocked` remembers what was searched. An admission clears it.
        """
        if self._is_still_blocked(seq):
            return False
        found = self.block_manager.find_prefix(seq)
        prefix = self.extensions.limit_prefix(seq, found)
        num_reused_tokens = len(prefix) * self.block_size
        # With whole prompts, only a recomputation can exceed a step. It is then first in a step.
        fits = len(seq.token_ids) - num_reused_tokens <= budget
        is_first = budget == self.max_num_batched_tokens
        fits_policy = self.splits_prompts or fits or is_first
        if not fits_policy or not self.extensions.may_start(seq):
            return False
        if not self.block_manager.allocate(seq, prefix):
            num_needed = self.block_manager.count_needed_blocks(seq, prefix)
            # `found` and not `prefix`, because an extension may have shortened it.
            self.blocked = BlockedHead(seq, num_needed, found)
            return False
        self.blocked = None
        del self.waiting[seq]
        self.running.append(seq)
        seq.num_computed_tokens = num_reused_tokens
        seq.status = SequenceStatus.RUNNING
        seq.lane = self.free_lanes.pop()
        if seq.num_cached_tokens is None:  # later admissions, after a preemption, are not counted
            # A reset can leave generated tokens, which others may have cached.
            seq.num_cached_tokens = min(num_reused_tokens, seq.num_prompt_tokens)
            self.num_cached_tokens += seq.num_cached_tokens
        self.extensions.admitted(seq)
        return True

    def _is_still_blocked(self, seq: Sequence) -> bool:
        """Return whether `seq` did not fit and cannot fit yet, without another search.

        Searching a long prompt in every step would take longer than the rest of scheduling. A
        sequence fits later if enough blocks are free, or if running sequences have cached blocks of
        its prefix. Blocks that were evicted, the tail first, do not change what it needs.
        """
        blocked = self.blocked
        if blocked is None or blocked.seq is not seq:
            return False
        manager = self.block_manager
        if len(manager.free_block_ids) >= blocked.num_needed_blocks:
            return False
        prefix = blocked.prefix
        if manager.find_next_block(seq, len(prefix)) is not None:
            return False
        while prefix:
            last = manager.find_next_block(seq, len(prefix) - 1)
            if last is not None:
                return last is prefix[-1]
            prefix.pop()
        return True

    def _schedule_tokens(self, seq: Sequence, budget: int, scheduled: list[Sequence]) -> int:
        """Add `seq` to the step, with as many tokens as `budget` allows. Return the rest.

        The blocks that these tokens make full are cached before they are computed, see
        cache_full_blocks.
        """
        start = seq.num_computed_tokens
        num_missing = len(seq.token_ids) - start
        num_tokens = self.extensions.limit_tokens(seq, min(num_missing, budget))
        seq.num_scheduled_tokens = num_tokens
        seq.is_partial = num_tokens < num_missing
        seq.num_logits = 0 if seq.is_partial else 1
        seq.is_decode = num_missing == 1 and start >= seq.num_prompt_tokens
        self.block_manager.cache_full_blocks(seq, start, start + num_tokens)
        self.extensions.scheduled(seq)
        scheduled.append(seq)
        return budget - num_tokens

    def preempt(self, seq: Sequence) -> None:
        """Release the blocks of a running sequence and put it at the head of the queue."""
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        self.waiting[seq] = None
        self.waiting.move_to_end(seq, last=False)
        self.num_preemptions += 1

    def postprocess(self, seqs: list[Sequence], sampled: list[list[int]]) -> None:
        """Record a computed step: append the sampled tokens and finish sequences.

        `sampled` has the new tokens of each sequence, none for a partially prefilled one. The point
        `sampled` comes first. It returns the valid tokens, and may lower num_scheduled_tokens.
        Token -1 stands for logits that are NaN. It is not appended, and ends the sequence.
        """
        sampled = self.extensions.sampled(seqs, sampled)
        for seq, token_ids in zip(seqs, sampled, strict=True):
            if seq.is_decode:
                self.num_decode_tokens += seq.num_scheduled_tokens
            else:
                self.num_prefill_tokens += seq.num_scheduled_tokens
            seq.num_computed_tokens += seq.num_scheduled_tokens
            for token_id in token_ids:
                if token_id < 0:
                    self.finish(seq, "error")
                    break
                seq.token_ids.append(token_id)
                reason = seq.check_end()
                if reason is not None:
                    self.finish(seq, reason)
                    break
        self.extensions.recorded(seqs)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """Finish a waiting or running sequence. Not allowed while a step computes it.

        After an interrupt the sequence may be in neither queue.
        """
        if reason == "error":  # its K/V may be NaN, and no other sequence must reuse them
            for block_id in seq.block_table:
                self.block_manager.uncache(block_id)
        seq.finish_reason = reason
        if seq.status is SequenceStatus.RUNNING:
            self._release(seq)
        self.waiting.pop(seq, None)
        seq.status = SequenceStatus.FINISHED
        self.extensions.finished(seq, reason)

    def _release(self, seq: Sequence) -> None:
        """Take a running sequence out of `running`, with its blocks, lane and computed tokens."""
        self.extensions.releasing(seq)
        self.running.remove(seq)
        self.block_manager.release(seq)
        seq.num_computed_tokens = 0
        self.free_lanes.append(seq.lane)
        seq.lane = -1


class PrefillFirstScheduler(Scheduler):
    """Steps of whole prompts or of decodes.

    Only a recomputation that is longer than a step is split, and only if it is first in its step.
    """

    title = "prefill first"
    splits_prompts = False

    def plan(self) -> list[Sequence]:
        scheduled: list[Sequence] = []
        # The next chunk of a partially prefilled sequence goes first. Its recomputation is longer
        # than one step, or an extension has ended its last chunk early.
        budget = self._schedule_running(self.max_num_batched_tokens, scheduled, only_partial=True)
        self._schedule_waiting(budget, scheduled)
        if not scheduled:
            self._schedule_running(budget, scheduled)
        return scheduled


# The values of the option `policy`.
POLICIES: dict[str, type[Scheduler]] = {
    "mixed": Scheduler,
    "prefill_first": PrefillFirstScheduler,
}
