"""Decides which sequences compute how many tokens in the next step. Knows neither tensors nor text.

Two queues, first come first served: `waiting` (no blocks) and `running` (blocks and a lane each). Two policies:

    mixed           everybody who runs gets its next token, oldest first, and what is left of the token budget goes to
                    pieces of prompts: a long prompt delays nobody (Sarathi-Serve, Agrawal et al. 2024; vLLM V1)
    prefill first   a step is whole prompts if one is waiting and fits, else one token for those who run, oldest first:
                    arriving prompts hold them up (Orca's iterations, Yu et al. 2022; vLLM 0.x)

When blocks run out, the newest running sequence is preempted: it gives its blocks back and is computed again later,
often from its own cached blocks. The oldest is never preempted for another, so everybody gets its turn and nothing hangs.
"""

from collections import OrderedDict
from heapq import heappop, heappush

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.speculation import Speculator
from nanovllm.outputs import FinishReason


class Scheduler:
    """`max_num_seqs` bounds the sequences that hold blocks, `max_num_batched_tokens` the tokens of one step."""

    def __init__(
        self, block_manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int, enable_chunked_prefill: bool = True
    ) -> None:
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_chunked_prefill = enable_chunked_prefill
        self.speculator: Speculator | None = None
        self.num_prefill_tokens = self.num_decode_tokens = self.num_cached_tokens = self.num_preemptions = 0
        self.num_draft_tokens = self.num_accepted_tokens = 0
        self.reset([])

    def reset(self, seqs: list[Sequence]) -> None:
        """Start over with nothing computed and nothing cached: `seqs`, oldest first, wait. Only their tokens stay."""
        self.block_manager.reset()
        self.waiting: OrderedDict[Sequence, None] = OrderedDict.fromkeys(seqs)  # a queue that can lose any member in O(1)
        self.running: list[Sequence] = []  # in the order of their admission: the newest is preempted
        self.free_lanes = list(range(self.max_num_seqs))  # a heap
        for seq in seqs:
            seq.status, seq.lane, seq.num_computed_tokens, seq.num_cached_tokens = SequenceStatus.WAITING, -1, 0, None
            seq.block_table, seq.block_hashes, seq.guesser = [], [], None  # the last two may know tokens that are gone

    def add(self, seq: Sequence) -> None:
        self.waiting[seq] = None

    def schedule(self) -> list[Sequence]:
        """The sequences of the next step, each with `num_scheduled_tokens` set and blocks to put them in."""
        scheduled: list[Sequence] = []
        budget = self.max_num_batched_tokens
        if self.enable_chunked_prefill:
            budget = self._schedule_running(self.running, budget, scheduled)
            budget = self._schedule_waiting(budget, scheduled)
        else:
            # Only the newest can be amid its tokens: a recomputation longer than a step is cut, and its next piece comes first.
            cut = [seq for seq in self.running[-1:] if len(seq.token_ids) - seq.num_computed_tokens > 1]
            budget = self._schedule_running(cut, budget, scheduled)
            budget = self._schedule_waiting(budget, scheduled)
            if not scheduled:
                budget = self._schedule_running(self.running, budget, scheduled)
        if self.speculator is not None and scheduled:
            # Last of all: what is left of the budget and of the blocks. If a sequence does not catch up, no budget is left.
            self.speculator.draft(scheduled, budget)
            for seq in scheduled:
                while not self.block_manager.grow(seq, len(seq.draft)):
                    seq.draft.pop()
        return scheduled

    def _schedule_running(self, seqs: list[Sequence], budget: int, scheduled: list[Sequence]) -> int:
        """The next tokens of `seqs`, the end of `running`, preempting from its end where blocks run out.

        Adds to `scheduled` and returns what is left of the budget.
        """
        block_size = self.block_manager.block_size
        for seq in seqs[:budget]:  # a copy: preemption shortens `running`
            if seq.lane == -1:  # preempted meanwhile, as are all that come after it
                break
            while len(seq.token_ids) > len(seq.block_table) * block_size and not self.block_manager.grow(seq):
                self.preempt(victim := self.running[-1])
                if victim is seq:
                    return budget
            budget -= self._plan_tokens(seq, budget)
            scheduled.append(seq)
        return budget

    def _schedule_waiting(self, budget: int, scheduled: list[Sequence]) -> int:
        """Admit from the head of `waiting` while there are tokens in the budget, lanes and blocks. Returns as above."""
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            seq = next(iter(self.waiting))
            prefix = self.block_manager.find_prefix(seq)
            num_cached_tokens = len(prefix) * self.block_manager.block_size
            is_whole = len(seq.token_ids) - num_cached_tokens <= budget
            # Prefill first cuts nothing, except what no step can hold: that starts a step of its own.
            must_wait = not self.enable_chunked_prefill and not is_whole and budget < self.max_num_batched_tokens
            if must_wait or not self.block_manager.allocate(seq, prefix):
                break
            del self.waiting[seq]
            self.running.append(seq)
            seq.status, seq.lane = SequenceStatus.RUNNING, heappop(self.free_lanes)
            if seq.num_cached_tokens is None:  # not when a preempted one finds its own blocks again
                seq.num_cached_tokens = min(num_cached_tokens, seq.num_prompt_tokens)
                self.num_cached_tokens += seq.num_cached_tokens
            budget -= self._plan_tokens(seq, budget)
            scheduled.append(seq)
        return budget

    def _plan_tokens(self, seq: Sequence, budget: int) -> int:
        """How many tokens of `seq` this step computes. Most are decodes within a block: nothing is called for these."""
        num_computed_tokens, block_size = seq.num_computed_tokens, self.block_manager.block_size
        num_tokens = len(seq.token_ids) - num_computed_tokens
        if num_tokens > budget:
            num_tokens = budget
        seq.num_scheduled_tokens = num_tokens
        if num_computed_tokens % block_size + num_tokens >= block_size:  # a block becomes full
            self.block_manager.cache_full_blocks(seq, num_computed_tokens + num_tokens)
        return num_tokens

    def preempt(self, seq: Sequence) -> None:
        """Take the blocks of a running sequence and put it at the head of the queue. Its tokens stay."""
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        self.waiting[seq] = None
        self.waiting.move_to_end(seq, last=False)
        self.num_preemptions += 1

    def postprocess(self, seqs: list[Sequence], token_ids: list[int]) -> list[Sequence]:
        """Account for a step that computed `seqs`. `token_ids`: for each sequence that caught up, in order, the token after its
        newest one, then one after each token of its draft. Returns these sequences.

        Token -1: the logits are NaN. Since NaN spreads to all that a sequence computes, and from there to whoever shares
        its blocks, they are no longer found, and it is computed again on its own. If that fails too, it ends.
        """
        caught_up: list[Sequence] = []
        suspects: list[Sequence] = []
        drawn = iter(token_ids)
        for seq in seqs:
            if seq.is_decode:
                self.num_decode_tokens += 1
            else:
                self.num_prefill_tokens += seq.num_scheduled_tokens
            seq.num_computed_tokens += seq.num_scheduled_tokens
            if seq.num_computed_tokens < len(seq.token_ids):
                continue
            caught_up.append(seq)
            reason: FinishReason | None = "error"
            if (token_id := next(drawn)) >= 0:
                seq.token_ids.append(token_id)
                reason = seq.check_end()
            if seq.draft:
                reason = self._accept(seq, [next(drawn) for _ in seq.draft], reason)
            if reason == "error":
                suspects.append(seq)
            elif reason is not None:
                self.finish(seq, reason)
        for seq in reversed(suspects):  # so that the oldest comes to stand first
            for block_id in seq.block_table:
                self.block_manager.forget(block_id)
            if seq.was_nan:
                self.finish(seq, "error")
            else:
                seq.was_nan = True
                self.preempt(seq)
        return caught_up

    def _accept(self, seq: Sequence, token_ids: list[int], reason: FinishReason | None) -> FinishReason | None:
        """Append `token_ids`, drawn behind each token of the draft, as long as the draft was right and `reason` is no end.

        Accepted tokens have their K/V in the cache, and only now can others find their blocks. What only refused ones needed is
        given back. Returns the reason if an accepted token is the last one.
        """
        for guessed, token_id in zip(seq.draft, token_ids):
            if reason is not None or guessed != seq.token_ids[-1] or token_id < 0:  # NaN: it is computed and drawn again
                break
            seq.token_ids.append(token_id)
            reason = seq.check_end()
        num_computed_tokens = max(seq.num_computed_tokens, len(seq.token_ids) - 1)  # the first if no token is new
        num_accepted = num_computed_tokens - seq.num_computed_tokens
        self.num_draft_tokens += len(seq.draft)
        self.num_accepted_tokens += num_accepted
        self.num_decode_tokens += num_accepted
        self.block_manager.cache_full_blocks(seq, num_computed_tokens)
        self.block_manager.free(seq, num_computed_tokens)
        return reason

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End `seq`, waiting or running; not while a step computes it."""
        if seq.status is SequenceStatus.RUNNING:
            self._release(seq)
        self.waiting.pop(seq, None)
        seq.status, seq.finish_reason = SequenceStatus.FINISHED, reason

    def _release(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.block_manager.free(seq)
        heappush(self.free_lanes, seq.lane)
        seq.lane = -1
