"""Records the steps of an engine, for a Timeline to write.

Recorder is the last of the engine's extensions. In a step:

    begin_step, planned      collect admissions and preemptions
    prepared, computed       end their phases
    watch                    describes the choice that a grammar leaves to the model
    sampled                  makes a Work for each sequence
    recorded                 completes each Work with the result, and writes the step

A Work is made before the result is recorded, because that removes drafts, and the lane and the
blocks of a sequence that finishes. An interrupted step needs no cleanup, because `begin_step`
discards what an earlier step has collected.
"""

from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from nanovllm.batch import Batch
from nanovllm.engine.block_manager import show_hash
from nanovllm.engine.extension import Extension
from nanovllm.engine.model_runner import LogitsProcessor
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.features.speculation.drafts import count_matches
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


class Recorder(Extension):
    """Records what the scheduler plans and what a step results in."""

    scheduler: Scheduler

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline

    def describe_engine(self) -> Args:
        """Describe what does not change from step to step."""
        scheduler = self.scheduler
        return {
            "num_blocks": scheduler.block_manager.num_blocks,
            "block_size": scheduler.block_size,
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "enable_chunked_prefill": scheduler.splits_prompts,
            **self._merge("describe_settings"),
        }

    def _merge(self, point: str, *args: Any) -> Args:
        """What all extensions say at one of the points that describe."""
        merged: Args = {}
        for each in self.scheduler.extensions.features:
            merged |= getattr(each, point)(*args)
        return merged

    def reset(self) -> None:
        self.timeline.reset()

    def begin_step(self) -> None:
        self.timeline.start_step()
        self.new_seqs: set[Sequence] = set()  # admitted in this step
        self.preemptions: list[Event] = []  # in this step
        self.choices: dict[Sequence, Args] = {}  # those that grammars leave

    def planned(self, seqs: list[Sequence]) -> None:
        self.timeline.mark_time("schedule")

    def prepared(self, seqs: list[Sequence], batch: Batch) -> Batch:
        self.timeline.mark_time("prepare")
        return batch

    def computed(self, batch: Batch, logits: Tensor) -> Tensor:
        if logits.is_cuda:
            # Otherwise the forward pass would be measured as sampling.
            torch.cuda.synchronize(logits.device)
        self.timeline.mark_time("forward")
        return logits

    def watch(self, processors: list[LogitsProcessor]) -> LogitsProcessor:
        """Return a processor that applies all of them, and records what grammars do."""

        def process(logits: Tensor, rows: list[Sequence]) -> Tensor:
            processed = logits
            for each in processors:
                processed = each(processed, rows)
            for row, seq in enumerate(rows):
                is_first = seq not in self.choices  # other rows follow draft tokens
                if seq.params.structured_outputs is not None and is_first:
                    self.choices[seq] = describe_choice(logits[row], processed[row])
            return processed

        return process

    def admitted(self, seq: Sequence) -> None:
        self.new_seqs.add(seq)

    def releasing(self, seq: Sequence) -> None:
        if seq.finish_reason is not None:
            return
        args = {"request_id": seq.seq_id, "blocks": list(seq.block_table)}
        name = f"preempted {seq.seq_id}"
        event = make_event("i", seq.lane + 1, name, args, **self.timeline.start)
        self.preemptions.append(event)

    def sampled(self, seqs: list[Sequence], token_ids: list[list[int]]) -> list[list[int]]:
        self.timeline.mark_time("sample")
        kinds = {_name_kind(seq) for seq in seqs}
        self.step: Args = {
            "kind": "mixed" if len(kinds) > 1 else kinds.pop(),
            "num_tokens": sum(seq.num_scheduled_tokens for seq in seqs),
        }
        self.queues = self._describe_queues()
        self.works = [self._make_work(seq) for seq in seqs]
        self.before = {name: getattr(self.scheduler, name) for name in _COUNTERS}
        return token_ids

    def recorded(self, seqs: list[Sequence]) -> None:
        for name in _COUNTERS:
            self.step[name] = getattr(self.scheduler, name) - self.before[name]
        for work in self.works:
            self._complete(work)
        lane_events = [*self.preemptions, *[work.event for work in self.works]]
        self.timeline.write_step(self.step, self.queues, lane_events, self._count())

    def _describe_queues(self) -> Args:
        scheduler = self.scheduler
        waiting = islice(scheduler.waiting, _NUM_WAITING)
        free = islice(scheduler.block_manager.free_block_ids, _NUM_FREE)
        return {
            "waiting_requests": [(seq.seq_id, len(seq.token_ids)) for seq in waiting],
            "running_requests": [seq.seq_id for seq in scheduler.running],
            "next_free_blocks": list(free),
            **self._merge("describe_step"),
        }

    def _count(self) -> dict[str, dict[str, int]]:
        scheduler = self.scheduler
        manager = scheduler.block_manager
        num_free = len(manager.free_block_ids)
        reusable = [i for i in manager.free_block_ids if manager.blocks[i].is_cached]
        return {
            "sequences": {"waiting": len(scheduler.waiting), "running": len(scheduler.running)},
            "blocks": {
                "used": manager.num_blocks - num_free,
                "reusable": len(reusable),
                "empty": num_free - len(reusable),
            },
        }

    def _make_work(self, seq: Sequence) -> Work:
        """Describe what the step computes of a sequence, before its result."""
        features = {"draft_token_ids": [], **self._merge("describe_sequence", seq)}
        draft: list[int] = features["draft_token_ids"]
        length = len(seq.token_ids) - len(draft)
        block_table = list(seq.block_table)
        is_new = seq in self.new_seqs
        start = seq.num_computed_tokens
        num_tokens = seq.num_scheduled_tokens - len(draft)
        block_size = self.scheduler.block_size
        first_block = 0 if is_new else start // block_size
        is_within_block = seq.num_scheduled_tokens == 1 and start % block_size != 0
        args: Args = {
            "request_id": seq.seq_id,
            "num_tokens": num_tokens,
            "num_reused_tokens": start if is_new else 0,
            "blocks": [] if is_within_block else block_table[first_block:],
            "full_blocks": self._describe_blocks(seq, block_table, start, start + num_tokens),
        }
        if is_new:
            args["num_prompt_tokens"] = seq.num_prompt_tokens
            args["token_ids"] = seq.token_ids[:length]
        args |= features
        args |= self.choices.get(seq, {})
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
        manager = self.scheduler.block_manager
        if not manager.enable_prefix_caching:
            return []
        described = []
        for index in range(start // manager.block_size, end // manager.block_size):
            block = manager.blocks[block_table[index]]
            block_hash = show_hash(seq.block_hashes[index])
            parent = show_hash(seq.block_hashes[index - 1]) if index > 0 else ""
            described.append((block.block_id, block.is_cached, block_hash, parent))
        return described


def _name_kind(seq: Sequence) -> str:
    return "decode" if seq.is_decode else "prefill"


def describe_choice(logits: Tensor, processed: Tensor) -> Args:
    """Describe a row of logits: what the model prefers, and what may be sampled."""
    num_allowed = int((processed > -torch.inf).sum())
    num_choices = min(_NUM_CHOICES, len(logits))
    return {
        "preferred_token_ids": logits.topk(num_choices).indices.tolist(),
        "num_allowed_tokens": num_allowed,
        "allowed_token_ids": processed.topk(min(num_choices, num_allowed)).indices.tolist(),
    }
