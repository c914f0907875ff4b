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

from collections import OrderedDict
from collections.abc import Collection

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.feature import Features
from nanovllm.engine.outputs import FinishReason
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step


class Scheduler:
    """Mixed steps. `max_num_seqs` limits the sequences that hold blocks."""

    title = "mixed steps"  # in traces, benchmarks and the playground
    splits_prompts = True  # False: a prompt must fit into the budget of one step

    def __init__(
        self, block_manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self.features = Features()
        self.block_manager = block_manager
        self.block_size = block_manager.block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.reset([])

    def reset(self, seqs: Collection[Sequence]) -> None:
        """Empty the KV cache and queue `seqs`, oldest first. Only their tokens are kept."""
        self.block_manager.reset()
        for seq in seqs:
            seq.restart()
        # An ordered set: any sequence leaves the queue in O(1).
        self.waiting = OrderedDict[Sequence, None].fromkeys(seqs)
        self.running: list[Sequence] = []  # in the order of admission
        self.free_lanes = list(range(self.max_num_seqs))[::-1]  # a stack, lane 0 on top
        for feature in self.features.reset:
            feature.reset()

    def add(self, seq: Sequence) -> None:
        self.waiting[seq] = None

    def schedule(self) -> Step:
        """Plan the next step: admit and preempt sequences, and choose the tokens of each."""
        step = Step()
        for feature in self.features.begin_step:
            feature.begin_step()
        self.plan(step)
        for feature in self.features.planned:
            feature.planned(step)
        return step

    def plan(self, step: Step) -> None:
        """Choose the sequences of a step by this policy.

        A step is not divided into prefill and decode. Prefill, chunk, recomputation and decode
        differ only in the number of tokens that a sequence is behind.
        """
        budget = self._schedule_running(step, self.max_num_batched_tokens)
        self._schedule_waiting(step, budget)

    def _schedule_running(self, step: Step, budget: int, skip_decodes: bool = False) -> int:
        """Schedule running sequences, oldest first. Return the rest of the budget.

        With `skip_decodes`, only those that have sampled nothing since their admission.
        """
        index = 0
        while index < len(self.running) and budget > 0:  # preemption shortens the list
            seq = self.running[index]
            index += 1
            num_tokens = len(seq.token_ids)
            has_sampled = num_tokens > seq.num_admitted_tokens
            if has_sampled and skip_decodes:
                continue
            if has_sampled and num_tokens >= seq.max_num_tokens:
                continue  # the newest token is pending, and ends the sequence
            num_missing = num_tokens - seq.num_computed_tokens
            if num_missing == 1 and has_sampled and num_tokens % self.block_size > 1:
                # Fast path: most decodes neither enter a block nor fill one.
                step.add(seq, 1, 1)
                budget -= 1
                continue
            if not self._grow(seq):
                break
            budget = self._schedule_tokens(step, seq, budget)
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

    def _schedule_waiting(self, step: Step, budget: int) -> None:
        """Admit waiting sequences, in their order, while budget, lanes and blocks last."""
        while self.waiting and self.free_lanes and budget > 0:
            seq = next(iter(self.waiting))
            if not self._admit(seq, budget):
                break
            budget = self._schedule_tokens(step, seq, budget)

    def _admit(self, seq: Sequence, budget: int) -> bool:
        """Move `seq` from `waiting` to `running` if there are blocks for all its tokens."""
        # A sequence that is preempted while its step is in flight waits until its token is read,
        # because hashes need the id.
        if seq.has_pending_token or self.block_manager.is_still_blocked(seq):
            return False
        prefix = self.block_manager.find_prefix(seq)
        for feature in self.features.limit_prefix:
            prefix = feature.limit_prefix(seq, prefix)
        num_reused_tokens = len(prefix) * self.block_size
        # With whole prompts, only a recomputation can exceed a step. It is then first in a step.
        fits = len(seq.token_ids) - num_reused_tokens <= budget
        is_first = budget == self.max_num_batched_tokens
        if not (self.splits_prompts or fits or is_first):
            return False
        if not all([feature.may_start(seq) for feature in self.features.may_start]):
            return False
        if not self.block_manager.allocate(seq, prefix):
            return False
        del self.waiting[seq]
        self.running.append(seq)
        seq.num_computed_tokens = num_reused_tokens
        seq.num_admitted_tokens = len(seq.token_ids)
        seq.lane = self.free_lanes.pop()
        if seq.num_cached_tokens is None:  # later admissions, after a preemption, are not counted
            # After a reset, generated tokens can be hit, too. They do not count.
            seq.num_cached_tokens = min(num_reused_tokens, seq.num_prompt_tokens)
            self.num_cached_tokens += seq.num_cached_tokens
        for feature in self.features.admitted:
            feature.admitted(seq)
        return True

    def _schedule_tokens(self, step: Step, seq: Sequence, budget: int) -> int:
        """Add `seq` to the step, with as many tokens as `budget` allows. Return the rest."""
        start = seq.num_computed_tokens
        num_missing = len(seq.token_ids) - start
        num_tokens = min(num_missing, budget)
        for feature in self.features.limit_tokens:
            num_tokens = feature.limit_tokens(seq, num_tokens)
        step.add(seq, num_tokens, 1 if num_tokens == num_missing else 0)
        end = start + num_tokens
        self.block_manager.cache_full_blocks(seq, start, min(end, seq.num_known_tokens))
        for feature in self.features.scheduled:
            feature.scheduled(seq, end)
        return budget - num_tokens

    def preempt(self, seq: Sequence) -> None:
        """Release the blocks of a running sequence and put it at the head of the queue."""
        self._release(seq)
        self.waiting[seq] = None
        self.waiting.move_to_end(seq, last=False)
        self.num_preemptions += 1

    def advance(self, step: Step) -> None:
        """Count the tokens of a step as computed, and append a pending token where it samples.

        Rows are those that ModelRunner.sample has sampled.
        """
        row = 0
        for index, (seq, num_tokens, num_logits) in enumerate(step):
            if step.is_decode(index):
                self.num_decode_tokens += num_tokens
            else:
                self.num_prefill_tokens += num_tokens
            seq.num_computed_tokens += num_tokens
            end = seq.num_computed_tokens
            if end % self.block_size < num_tokens:
                # Tokens that were pending or drafts when the step was planned may fill a block.
                self.block_manager.cache_full_blocks(seq, end - num_tokens, end)
            if num_logits > 0:
                seq.token_ids.append(~row)
            row += num_logits
        for feature in self.features.advanced:
            feature.advanced(step)

    def postprocess(self, step: Step, sampled: list[list[int]]) -> None:
        """Replace pending tokens by sampled ones, and finish sequences.

        Accepted draft tokens, which come before a pending one, are replaced by the same tokens.
        `sampled` has the valid new tokens of each sequence, none for a partially prefilled one.
        Token -1 stands for logits that are NaN. It is not appended, and ends the sequence.
        """
        for seq, token_ids in zip(step.seqs, sampled, strict=True):
            if seq.finish_reason is not None:
                continue  # aborted while the step was in flight
            # The pending token and accepted draft tokens before it.
            del seq.token_ids[len(seq.token_ids) - len(token_ids) :]
            for token_id in token_ids:
                if token_id < 0:
                    self.finish(seq, "error")
                    break
                if seq.ends_with_prompt:
                    self.finish(seq, "length")
                    break
                seq.token_ids.append(token_id)
                reason = seq.check_end()
                if reason is not None:
                    self.finish(seq, reason)
                    break
        for feature in self.features.recorded:
            feature.recorded(step)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """Finish a waiting or running sequence."""
        if reason == "error":  # its K/V may be NaN, and no other sequence must reuse them
            self.block_manager.uncache_sequence(seq)
        if seq.has_pending_token:  # aborted while a step is in flight
            seq.token_ids.pop()
        seq.finish_reason = reason
        if seq.lane >= 0:
            self._release(seq)
        self.waiting.pop(seq, None)
        for feature in self.features.finished:
            feature.finished(seq, reason)

    def _release(self, seq: Sequence) -> None:
        """Take a running sequence out of `running`, with its blocks, lane and computed tokens."""
        for feature in self.features.releasing:
            feature.releasing(seq)
        self.running.remove(seq)
        self.block_manager.release(seq)
        seq.num_computed_tokens = 0
        self.free_lanes.append(seq.lane)
        seq.lane = -1


class PrefillFirstScheduler(Scheduler):
    """Steps of whole prompts, or of decodes."""

    title = "prefill first"
    splits_prompts = False

    def plan(self, step: Step) -> None:
        # The next chunk of a partially prefilled sequence goes first. Its recomputation is longer
        # than one step, or a feature has ended its last chunk early.
        budget = self._schedule_running(step, self.max_num_batched_tokens, skip_decodes=True)
        self._schedule_waiting(step, budget)
        if not step.seqs:
            self._schedule_running(step, budget)


# The values of the option `policy`. The playground, benchmarks and the tour list them, too.
POLICIES: dict[str, type[Scheduler]] = {
    "mixed": Scheduler,
    "prefill_first": PrefillFirstScheduler,
}
