"""Records the steps of an engine, for a Timeline to write.

LLM derives its scheduler and its model runner from TracedScheduler and TracedModelRunner, which
share the Timeline. The engine therefore does not import this module. In a step:

    schedule             collects admissions and preemptions
    prepare_batch, forward   end their phases
    process_logits       describes the choice that a grammar leaves to the model
    postprocess          makes a Work for each sequence, lets the scheduler record the result,
                         completes each Work with the result, and writes the step

A Work is made first, because the result removes drafts, and the lane and the blocks of a sequence
that finishes. An interrupted step needs no cleanup, because `schedule` discards what an earlier
step has collected.
"""

from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from nanovllm.batch import Batch
from nanovllm.engine.scheduler import PrefillFirstScheduler, Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.features.prompt_logprobs import ScoringModelRunner
from nanovllm.features.recurrent_states import StatefulScheduler
from nanovllm.features.speculation.drafts import SpeculativeScheduler, count_matches
from nanovllm.trace.timeline import Args, Event, Timeline, make_event

_COUNTERS = (
    "num_prefill_tokens",
    "num_decode_tokens",
    "num_draft_tokens",
    "num_accepted_tokens",
)
_NUM_WAITING = 10  # requests of the queue that a step records
_NUM_FREE = 40  # free blocks that a step records
_NUM_CHOICES = 12  # tokens that a step records of those that a grammar allows


@dataclass
class Work:
    """What a step does with a sequence. The result completes the args of the event."""

    seq: Sequence
    length: int  # number of tokens before the step, without the draft
    block_table: list[int]  # a copy
    event: Event


class TracedScheduler(Scheduler):
    """Records what the scheduler plans and what a step results in."""

    timeline: Timeline

    def describe_settings(self) -> Args:
        """Describe what does not change from step to step."""
        settings: Args = {
            "num_blocks": self.block_manager.num_blocks,
            "block_size": self.block_size,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "enable_chunked_prefill": not isinstance(self, PrefillFirstScheduler),
        }
        if isinstance(self, StatefulScheduler):
            settings["snapshot_slots"] = [self.snapshot_slots.start, self.snapshot_slots.stop]
        return settings

    def reset(self, seqs: list[Sequence]) -> None:
        self.timeline.reset()
        super().reset(seqs)

    def schedule(self) -> list[Sequence]:
        self.timeline.start_step()
        self.admitted: set[Sequence] = set()  # in this step
        self.preemptions: list[Event] = []  # in this step
        seqs = super().schedule()
        self.timeline.mark_time()
        return seqs

    def _admit(self, seq: Sequence, budget: int) -> bool:
        is_admitted = super()._admit(seq, budget)
        if is_admitted:
            self.admitted.add(seq)
        return is_admitted

    def preempt(self, seq: Sequence) -> None:
        args = {"request_id": seq.seq_id, "blocks": list(seq.block_table)}
        name = f"preempted {seq.seq_id}"
        event = make_event("i", seq.lane + 1, name, args, ts=self.timeline.times[0])
        self.preemptions.append(event)
        super().preempt(seq)

    def postprocess(self, seqs: list[Sequence], sampled: list[list[int]]) -> None:
        self.timeline.mark_time()
        kinds = {_name_kind(seq) for seq in seqs}
        args: Args = {
            "kind": "mixed" if len(kinds) > 1 else kinds.pop(),
            "num_tokens": sum(seq.num_scheduled_tokens for seq in seqs),
        }
        queues = self._describe_queues()
        works = [self._make_work(seq) for seq in seqs]
        before = {name: getattr(self, name, 0) for name in _COUNTERS}
        super().postprocess(seqs, sampled)
        for name in _COUNTERS:
            args[name] = getattr(self, name, 0) - before[name]
        for work in works:
            self._complete(work)
        lane_events = [*self.preemptions, *[work.event for work in works]]
        self.timeline.write_step(args, queues, lane_events, self._count())

    def _describe_queues(self) -> Args:
        waiting = islice(self.waiting, _NUM_WAITING)
        free = islice(self.block_manager.free_block_ids, _NUM_FREE)
        queues: Args = {
            "waiting_requests": [(seq.seq_id, len(seq.token_ids)) for seq in waiting],
            "running_requests": [seq.seq_id for seq in self.running],
            "next_free_blocks": list(free),
        }
        if isinstance(self, StatefulScheduler):
            snapshots = self.snapshots.items()
            queues["snapshots"] = [(slot, format_hash(each)) for each, slot in snapshots]
        return queues

    def _count(self) -> dict[str, dict[str, int]]:
        manager = self.block_manager
        num_free = len(manager.free_block_ids)
        reusable = [i for i in manager.free_block_ids if manager.blocks[i].is_cached]
        return {
            "sequences": {"waiting": len(self.waiting), "running": len(self.running)},
            "blocks": {
                "used": manager.num_blocks - num_free,
                "reusable": len(reusable),
                "empty": num_free - len(reusable),
            },
        }

    def _make_work(self, seq: Sequence) -> Work:
        """Describe what the step computes of a sequence, before its result."""
        draft: list[int] = []
        if isinstance(self, SpeculativeScheduler):
            draft = self.drafts.get(seq, [])
        length = len(seq.token_ids) - len(draft)
        block_table = list(seq.block_table)
        is_new = seq in self.admitted
        start = seq.num_computed_tokens
        num_tokens = seq.num_scheduled_tokens - len(draft)
        first_block = 0 if is_new else start // self.block_size
        is_within_block = seq.num_scheduled_tokens == 1 and start % self.block_size != 0
        args: Args = {
            "request_id": seq.seq_id,
            "num_tokens": num_tokens,
            "num_reused_tokens": start if is_new else 0,
            "draft_token_ids": draft,
            "blocks": [] if is_within_block else block_table[first_block:],
            "full_blocks": self._describe_blocks(seq, block_table, start, start + num_tokens),
        }
        if is_new:
            args["num_prompt_tokens"] = seq.num_prompt_tokens
            args["token_ids"] = seq.token_ids[:length]
        if isinstance(self, StatefulScheduler):
            hashes = {slot: format_hash(each) for each, slot in self.new_snapshots.items()}
            args["slots"] = [seq.read_slot, seq.write_slot]
            args["snapshot"] = hashes.get(seq.write_slot, "")
        args |= self.timeline.choices.get(seq.seq_id, {})
        name = f"{_name_kind(seq)} {seq.seq_id}"
        event = make_event("X", seq.lane + 1, name, args, **self.timeline.span)
        return Work(seq, length, block_table, event)

    def _complete(self, work: Work) -> None:
        """Describe what the step has added to a sequence."""
        seq = work.seq
        new_token_ids = seq.token_ids[work.length :]
        num_accepted = count_matches(work.event["args"]["draft_token_ids"], new_token_ids)
        end = work.length + num_accepted
        work.event["args"] |= {
            "new_token_ids": new_token_ids,
            "num_accepted_tokens": num_accepted,
            "accepted_blocks": self._describe_blocks(seq, work.block_table, work.length, end),
            "finish_reason": seq.finish_reason,
        }

    def _describe_blocks(
        self, seq: Sequence, block_table: list[int], start: int, end: int
    ) -> list[tuple[int, bool, str, str]]:
        """Describe the blocks that the tokens from position `start` to `end` make full.

        For each: its id, whether it is cached, its hash, and the hash of the block before it.
        """
        if not self.block_manager.enable_prefix_caching:
            return []
        described = []
        for index in range(start // self.block_size, end // self.block_size):
            block = self.block_manager.blocks[block_table[index]]
            block_hash = format_hash(seq.block_hashes[index])
            parent = format_hash(seq.block_hashes[index - 1]) if index > 0 else ""
            described.append((block.block_id, block.is_cached, block_hash, parent))
        return described


def _name_kind(seq: Sequence) -> str:
    return "decode" if seq.is_decode else "prefill"


def format_hash(block_hash: int) -> str:
    return f"{block_hash:032x}"


class TracedModelRunner(ScoringModelRunner):
    """Records when the phases of a step end, and what grammars do to the logits."""

    timeline: Timeline

    def prepare_batch(self, seqs: list[Sequence]) -> Batch:
        batch = super().prepare_batch(seqs)
        self.timeline.mark_time()
        return batch

    def forward(self, seqs: list[Sequence]) -> Tensor:
        logits = super().forward(seqs)
        if logits.is_cuda:
            # Otherwise the forward pass would be measured as sampling.
            torch.cuda.synchronize(logits.device)
        self.timeline.mark_time()
        return logits

    def process_logits(self, logits: Tensor, rows: list[Sequence]) -> Tensor:
        processed = super().process_logits(logits, rows)
        for row, seq in enumerate(rows):
            is_first = seq.seq_id not in self.timeline.choices  # other rows follow draft tokens
            if seq.params.structured_outputs is not None and is_first:
                self.timeline.choices[seq.seq_id] = describe_choice(logits[row], processed[row])
        return processed


def describe_choice(logits: Tensor, processed: Tensor) -> Args:
    """Describe a row of logits: what the model prefers, and what may be sampled."""
    num_allowed = int((processed > -torch.inf).sum())
    num_choices = min(_NUM_CHOICES, len(logits))
    return {
        "preferred_token_ids": logits.topk(num_choices).indices.tolist(),
        "num_allowed_tokens": num_allowed,
        "allowed_token_ids": processed.topk(min(num_choices, num_allowed)).indices.tolist(),
    }
