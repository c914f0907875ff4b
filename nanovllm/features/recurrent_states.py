"""Recurrent states: what some layers keep of a sequence instead of K/V (Qwen3.5).

A state has a fixed size, and each token changes all of it. A sequence reads its state from one
state slot and writes it to another one, mostly to that of its lane. It starts from a slot of zeros.
These slots are data in the batch, so nothing is zeroed, copied, or decided by the shape of a batch.
worker/state_slots.py draws which state slots there are.

K/V of a prefix serve any sequence that begins alike, but the state after a prefix is gone when the
next token is computed. A snapshot is a state that is kept. It belongs to the hash of the last block
before it, and a sequence can reuse a prefix only up to a snapshot. A snapshot takes as much memory
as the K/V of many tokens, so it is left only where it has proved useful: at the point up to which
the K/V of an earlier sequence match, such as at the end of a system prompt. The first sequence with
this prefix computes it, the second one computes it again and leaves the snapshot, and all others
reuse it.

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
from dataclasses import dataclass, field, replace

import numpy as np

from nanovllm.batch.batch import Batch
from nanovllm.engine.block_manager import Block
from nanovllm.engine.feature import Facts, Feature
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.outputs import FinishReason
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step
from nanovllm.worker.state_slots import FIRST_LANE, ZEROS, StateSlots


@dataclass
class Slots:
    """Where the state of a sequence is, and where the current step writes it."""

    read: int = ZEROS
    write: int = ZEROS
    # Tokens after which the state is kept for other sequences.
    snapshot_positions: list[int] = field(default_factory=list)
    end: int = 0  # tokens after which the current step writes the state, those of a draft included


class RecurrentStates(Feature):
    """Chooses the slots of a step. The chunk of a prompt ends where a snapshot is wanted.

    Drafts come before it in the list of features.
    """

    serves = "recurrent states"
    keeps_prompts = False  # whether each prompt leaves a snapshot, which a store can keep

    def start(self, engine: LLMEngine) -> bool:
        if not engine.executor.worker.spec.has_states:
            return False
        self.state_slots = StateSlots(engine.config, engine.scheduler.max_num_seqs)
        self.snapshot_slots = self.state_slots.snapshots
        return super().start(engine)

    def reset(self) -> None:
        self.slots: dict[Sequence, Slots] = {}  # of sequences that were the head of the queue
        self._forget_snapshots()

    def _forget_snapshots(self) -> None:
        self.empty_slots = list(self.snapshot_slots)
        self.snapshots = OrderedDict[int, int]()  # hash -> slot, least recently used first
        self.new_snapshots: dict[int, int] = {}  # those that the current step writes

    def limit_prefix(self, seq: Sequence, prefix: list[Block]) -> list[Block]:
        """Cut `prefix` where it ends at a snapshot."""
        slots = self.slots.setdefault(seq, Slots())
        if seq.num_cached_tokens is None:  # after a preemption, the prefix is the sequence's own
            block_size = self.scheduler.block_size
            slots.snapshot_positions = [len(prefix) * block_size]
            if self.keeps_prompts:
                last_block = (len(seq.token_ids) - 1) // block_size
                slots.snapshot_positions.append(last_block * block_size)
        reusable = list(prefix)
        while reusable and reusable[-1].hash not in self.snapshots:
            reusable.pop()
        return reusable

    def may_start(self, seq: Sequence) -> bool:
        """Let a sequence wait for a snapshot that the current step writes.

        Those behind it wait for this step, too, because admission is first come, first served.
        """
        positions = self.slots[seq].snapshot_positions
        return all([self._find_hash(seq, each) not in self.new_snapshots for each in positions])

    def admitted(self, seq: Sequence) -> None:
        slots = self.slots[seq]
        slots.read = ZEROS
        slots.write = FIRST_LANE + seq.lane
        if seq.num_computed_tokens > 0:
            last_block = seq.num_computed_tokens // self.scheduler.block_size - 1
            block_hash = seq.block_hashes[last_block]
            slots.read = self.snapshots[block_hash]
            self.snapshots.move_to_end(block_hash)

    def limit_tokens(self, seq: Sequence, num_tokens: int) -> int:
        for position in self.slots[seq].snapshot_positions:
            distance = position - seq.num_computed_tokens
            if 0 < distance <= num_tokens and self._begin_snapshot(seq, position):
                return distance
        return num_tokens

    def _begin_snapshot(self, seq: Sequence, position: int) -> bool:
        """Let the current step of `seq` write a snapshot.

        Return False if there is such a snapshot already, or if all slots are in use.
        """
        block_hash = self._find_hash(seq, position)
        if block_hash in self.snapshots or block_hash in self.new_snapshots:
            return False
        slot = self.take_slot()
        if slot is None:
            return False
        self.slots[seq].write = slot
        self.new_snapshots[block_hash] = slot
        return True

    def take_slot(self) -> int | None:
        """Take an empty slot, or that of the least recently used snapshot. None if all are used."""
        in_use = {self.slots[each].read for each in self.scheduler.running}
        empty = [slot for slot in self.empty_slots if slot not in in_use]
        evictable = [each for each, slot in self.snapshots.items() if slot not in in_use]
        if empty:
            self.empty_slots.remove(empty[0])
            return empty[0]
        return self.snapshots.pop(evictable[0]) if evictable else None

    def _find_hash(self, seq: Sequence, position: int) -> int:
        """The hash of the last block before `position`, or -1 if there is none."""
        index = position // self.scheduler.block_size - 1
        return self.scheduler.block_manager.hash_block(seq, index) if index >= 0 else -1

    def planned(self, step: Step) -> None:
        for seq, num_tokens, num_logits in step:
            slots = self.slots[seq]
            has_draft = num_logits > 1
            if has_draft and slots.write == slots.read:
                slots.write = self.state_slots.second(seq.lane)
            slots.end = seq.num_computed_tokens + num_tokens

    def prepared(self, step: Step, batch: Batch) -> Batch:
        slots = [self.slots[seq] for seq in step.seqs]
        read, write = np.array([(each.read, each.write) for each in slots], np.int32).T.copy()
        return replace(batch, read_slots=read, write_slots=write)

    def advanced(self, step: Step) -> None:
        """Advance to the new states, and let other sequences find the new snapshots.

        If a draft token was rejected, the new state includes it. The old state is still in its
        slot, and the next step recomputes the accepted tokens.
        """
        for seq, num_tokens, _ in step:
            slots = self.slots[seq]
            if seq.num_computed_tokens == slots.end:
                slots.read = slots.write
            else:
                seq.num_computed_tokens -= num_tokens
            slots.write = FIRST_LANE + seq.lane
        if self.new_snapshots:
            # The head of the queue may reuse more now.
            self.scheduler.block_manager.blocked = None
        self.snapshots.update(self.new_snapshots)
        self.new_snapshots = {}

    def finished(self, seq: Sequence, reason: FinishReason) -> None:
        self.slots.pop(seq, None)
        if reason == "error":  # the states that it has left may be NaN, too
            self._forget_snapshots()

    def describe_settings(self) -> Facts:
        return {"snapshot_slots": [self.snapshot_slots.start, self.snapshot_slots.stop]}

    def describe(self, step: Step) -> tuple[Facts, dict[Sequence, Facts]]:
        kept = [(slot, f"{each:032x}") for each, slot in self.snapshots.items()]
        new = {slot: f"{each:032x}" for each, slot in self.new_snapshots.items()}
        seqs: dict[Sequence, Facts] = {}
        for seq in step.seqs:
            slots = self.slots[seq]
            seqs[seq] = {"slots": [slots.read, slots.write], "snapshot": new.get(slots.write, "")}
        return {"snapshots": kept}, seqs
