"""Recurrent states: what some layers keep of a sequence instead of K/V (Qwen3.5).

A state has a fixed size, and each token changes all of it. A sequence reads its state from one slot
and writes it to another one, mostly to that of its lane. It starts from a slot of zeros. The slots
are data in the batch, so nothing is zeroed, copied, or decided by the shape of a batch. slots.py
draws which slots there are.

K/V of a prefix serve any sequence that begins alike, but the state after a prefix is gone when the
next token is computed. A snapshot is a state that is kept. It belongs to the hash of the last block
before it, and a sequence can reuse a prefix only up to a snapshot. A snapshot takes as much memory
as the K/V of many tokens, so it is left only where it has proved useful: where the K/V of an
earlier sequence stop to match, such as at the end of a system prompt. The first sequence with this
prefix computes it, the second one computes it again and leaves the snapshot, and all others reuse
it.

    first    | system prompt | question         |
    second   | system prompt * other question   |    * a chunk ends here, its state is kept
    third      system prompt | another question |    starts from the snapshot

A step writes a snapshot directly, and the next step of the sequence reads it. A slot can be taken
for a new snapshot unless a running sequence reads it or the current step writes it. Empty slots go
first, then that of the least recently used snapshot. Slots need no reference counts, because only
running sequences read them. No slot is written by one sequence and read by another one in the same
step.
"""

from collections import OrderedDict

from nanovllm.engine.block_manager import Block
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.outputs import FinishReason
from nanovllm.worker.state_slots import FIRST_LANE, ZEROS, find_second_slot


class StatefulScheduler(Scheduler):
    """Chooses the slots of a step. The chunk of a prompt ends where a snapshot is wanted.

    LLM uses a subclass of this class, of SpeculativeScheduler for drafts, and of the policy.
    """

    snapshot_slots = range(0)

    def reset(self, seqs: list[Sequence]) -> None:
        super().reset(seqs)
        self.snapshots = OrderedDict[int, int]()  # hash -> slot, least recently used first
        self.new_snapshots: dict[int, int] = {}  # those that the current step writes

    def _limit_prefix(self, seq: Sequence, prefix: list[Block]) -> list[Block]:
        """Cut `prefix` where it ends at a snapshot."""
        if seq.num_cached_tokens is None:  # after a preemption, the prefix is the sequence's own
            seq.snapshot_position = len(prefix) * self.block_size
        num_blocks = len(prefix)
        while num_blocks > 0 and prefix[num_blocks - 1].hash not in self.snapshots:
            num_blocks -= 1
        return prefix[:num_blocks]

    def _may_start(self, seq: Sequence, num_new_tokens: int, budget: int) -> bool:
        """Let a sequence wait for a snapshot that the current step writes.

        Those behind it wait for this step, too, because admission is first come, first served.
        """
        if self._find_snapshot_hash(seq) in self.new_snapshots:
            return False
        return super()._may_start(seq, num_new_tokens, budget)

    def _admit(self, seq: Sequence, budget: int) -> bool:
        if not super()._admit(seq, budget):
            return False
        seq.read_slot = ZEROS
        seq.write_slot = FIRST_LANE + seq.lane
        if seq.num_computed_tokens > 0:
            last_block = seq.num_computed_tokens // self.block_size - 1
            block_hash = seq.block_hashes[last_block]
            seq.read_slot = self.snapshots[block_hash]
            self.snapshots.move_to_end(block_hash)
        return True

    def _schedule_tokens(self, seq: Sequence, budget: int, scheduled: list[Sequence]) -> int:
        num_tokens = budget
        distance = seq.snapshot_position - seq.num_computed_tokens
        if 0 < distance <= budget and self._begin_snapshot(seq):
            num_tokens = distance
        super()._schedule_tokens(seq, num_tokens, scheduled)
        return budget - seq.num_scheduled_tokens

    def _begin_snapshot(self, seq: Sequence) -> bool:
        """Let the current step of `seq` write a snapshot.

        Return False if there is such a snapshot already, or if all slots are in use.
        """
        block_hash = self._find_snapshot_hash(seq)
        if block_hash in self.snapshots or block_hash in self.new_snapshots:
            return False
        slot = self._take_snapshot_slot()
        if slot is None:
            return False
        seq.write_slot = slot
        self.new_snapshots[block_hash] = slot
        return True

    def _take_snapshot_slot(self) -> int | None:
        """Return an empty slot, or else that of the least recently used snapshot, which is evicted.

        Return None if all slots are in use.
        """
        in_use = {each.read_slot for each in self.running}
        in_use.update(self.new_snapshots.values())
        unused = set(self.snapshot_slots) - in_use
        if not unused:
            return None
        empty = unused.difference(self.snapshots.values())
        if empty:
            return min(empty)
        oldest = next(each for each, slot in self.snapshots.items() if slot in unused)
        return self.snapshots.pop(oldest)

    def _find_snapshot_hash(self, seq: Sequence) -> int:
        """The hash of the last block before snapshot_position, or -1 if no snapshot is wanted."""
        num_blocks = seq.snapshot_position // self.block_size
        return seq.block_hashes[num_blocks - 1] if num_blocks > 0 else -1

    def schedule(self) -> list[Sequence]:
        seqs = super().schedule()
        for seq in seqs:
            has_draft = seq.num_logits > 1
            if has_draft and seq.write_slot == seq.read_slot:
                seq.write_slot = find_second_slot(seq.lane, self.max_num_seqs)
        return seqs

    def postprocess(self, seqs: list[Sequence], sampled: list[list[int]]) -> None:
        """Advance to the new states, and let other sequences find the new snapshots.

        If a draft token was rejected, the new state includes it. The old state is still in its
        slot, and the next step recomputes the accepted tokens.
        """
        starts = [seq.num_computed_tokens for seq in seqs]
        ends = [seq.num_computed_tokens + seq.num_scheduled_tokens for seq in seqs]
        super().postprocess(seqs, sampled)
        for seq, start, end in zip(seqs, starts, ends):
            if seq.status is not SequenceStatus.RUNNING:
                continue
            if seq.num_computed_tokens == end:
                seq.read_slot = seq.write_slot
            else:
                seq.num_computed_tokens = start
            seq.write_slot = FIRST_LANE + seq.lane
        if self.new_snapshots:
            self.blocked = None  # the head of the queue may reuse more now
        self.snapshots.update(self.new_snapshots)
        self.new_snapshots = {}

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        super().finish(seq, reason)
        if reason == "error":  # the states that it has left may be NaN, too
            for block_hash in seq.block_hashes:
                self.snapshots.pop(block_hash, None)
                self.new_snapshots.pop(block_hash, None)
