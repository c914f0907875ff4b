"""Records a trace (`LLM(..., trace="trace.json")`) in the Chrome trace event format.

    steps     | mixed: 13 tokens     | decode: 2 tokens |    with schedule, prepare, forward, sample
    lane 0    | decode 0             | decode 0         |    one sequence until it leaves the lane
    lane 1    | prefill 1            | decode 1         |    tokens that are computed and reused
    counters    waiting and running sequences; used, reusable and empty blocks

ui.perfetto.dev opens the file. The events' args also hold what `python -m nanovllm.trace` needs to
draw the pool of blocks: token ids and texts, blocks, hashes of full blocks, queues and the next
free blocks, each when it changes. A trace is as private as its prompts. The event of a sequence
describes the plan, with the blocks that are written. The event of the step describes the result.

The engine does not know this module. LLM asks a Timeline for subclasses of its scheduler and its
model runner that record. A step is written when it ends. The file is a complete JSON array after
every step, because each write replaces the closing bracket.
"""

import json
import os
import time
import warnings
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor, cuda
from transformers import PreTrainedTokenizerBase

from nanovllm.batch import Batch
from nanovllm.config import Config
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.prompt_logprobs import ScoringModelRunner
from nanovllm.engine.scheduler import PrefillFirstScheduler, Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.models.decoder import ModelSpec
from nanovllm.trace.reader import PHASES

_COUNTERS = (
    "num_prefill_tokens",
    "num_decode_tokens",
    "num_draft_tokens",
    "num_accepted_tokens",
)
_NUM_WAITING = 10  # requests of the queue that a step records
_NUM_FREE = 40  # free blocks that a step records
_END = b"\n]\n"
_Args = dict[str, Any]
_encode = json.JSONEncoder(separators=(",", ":")).encode


class Timeline:
    """The data of the current step until it is written. A subclass writes events."""

    def __init__(self) -> None:
        self.origin = time.perf_counter_ns()
        self.num_steps = 0
        self.queues: _Args = {}  # as of the last step; empty after a reset
        self.times: list[int] = []  # starts of the phases of this step, then the end of the last
        self.events: list[_Args] = []  # of this step

    def make_traced(self, scheduler_class: type[Scheduler]) -> type[Scheduler]:
        """Derive a class that records its steps here."""
        return type("TracedScheduler", (_TracedScheduler, scheduler_class), {"timeline": self})

    def make_model_runner(self, config: Config, spec: ModelSpec, directory: Path) -> ModelRunner:
        """Make a ModelRunner that records here when the phases of a step begin."""
        return _TracedModelRunner(self, config, spec, directory)

    def begin(self, scheduler: Scheduler, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Write the engine's settings and the names of the lanes."""
        self.tokenizer = tokenizer
        self.named: set[int] = set()  # tokens whose texts are written
        # For each lane: the event of a decode, and the position up to which it can be repeated.
        self.lanes: list[tuple[str, int]] = [("", 0)] * scheduler.max_num_seqs
        manager = scheduler.block_manager
        process = {
            "name": "nanovllm",
            "num_blocks": manager.num_blocks,
            "block_size": manager.block_size,
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "enable_chunked_prefill": not isinstance(scheduler, PrefillFirstScheduler),
        }
        events = [_event("M", 0, "process_name", process)]
        for lane in range(scheduler.max_num_seqs):
            events.append(_event("M", lane + 1, "thread_name", {"name": f"lane {lane}"}))
        self.write(_join(events))

    def now(self) -> int:
        """Microseconds since the engine started."""
        return (time.perf_counter_ns() - self.origin) // 1000

    def name_tokens(self, token_ids: Iterable[int]) -> dict[int, str]:
        """The texts of those tokens that no step before has named."""
        texts: dict[int, str] = {}
        if self.tokenizer is not None:
            for token_id in token_ids:
                if token_id >= 0 and token_id not in self.named:
                    self.named.add(token_id)
                    texts[token_id] = str(self.tokenizer.decode([token_id]))
        return texts

    def write_step(
        self, results: _Args, queues: _Args, works: list[str], counters: dict[str, dict[str, int]]
    ) -> None:
        """Write a step, the work of its sequences, and the counters after it.

        `works` are encoded events without times. Of `queues` the step holds those that changed.
        """
        begin, end = self.times[0], self.times[-1]
        args: _Args = {"step": self.num_steps, "starts_over": not self.queues, **results}
        phases: list[_Args] = []
        for name, start, stop in zip(PHASES, self.times, self.times[1:]):
            args[f"{name}_ms"] = (stop - start) / 1e3
            phases.append(_event("X", 0, name, {}, ts=start, dur=stop - start))
        for name, queue in queues.items():
            if queue != self.queues.get(name):
                args[name] = queue
        title = f"{results['kind']}: {results['num_tokens']} tokens"
        step = _event("X", 0, title, args, ts=begin, dur=end - begin)
        counts = [_event("C", 0, name, numbers, ts=end) for name, numbers in counters.items()]
        times = f',"ts":{begin},"dur":{end - begin}}}'
        self.write(
            _join([step, *self.events, *phases, *counts])
            + ",\n"
            + ",\n".join(work + times for work in works)
        )
        self.queues = queues
        self.num_steps += 1

    def write(self, events: str) -> None:
        """Write encoded events, separated by commas. All events of a step come in one call."""
        raise NotImplementedError


class TraceFile(Timeline):
    """Writes the events to a file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises ValueError if the file cannot be written."""
        super().__init__()
        title = _event("M", 0, "thread_name", {"name": "steps"})
        try:
            # With "+", opening a named pipe does not wait for a reader, and `seek` rejects it.
            self.file = open(path, "w+b", buffering=0)
            self.file.write(b"[\n" + _encode(title).encode() + _END)
            self.file.seek(-len(_END), os.SEEK_END)
        except (OSError, ValueError) as error:
            raise ValueError(f"trace={os.fspath(path)!r} cannot be written: {error}") from error

    def write(self, events: str) -> None:
        """Add events. If the disk is full, the file keeps its complete steps, and warns."""
        if self.file.closed:
            return
        data = b",\n" + events.encode() + _END
        end = self.file.seek(-len(_END), os.SEEK_END)
        try:
            while data:  # a write may take only a part
                num_written = self.file.write(data)
                data = data[num_written:]
        except OSError as error:
            with self.file:
                self.file.truncate(end)
                self.file.seek(end)
                self.file.write(_END)
            message = f"trace={self.file.name!r} is incomplete, recording stopped: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)


def _event(phase: str, track: int, name: str, args: _Args, **when: int) -> _Args:
    return {"ph": phase, "pid": 1, "tid": track, "name": name, "args": args, **when}


def _join(events: list[_Args]) -> str:
    return _encode(events)[1:-1]


class _TracedScheduler(Scheduler):
    """Records what the scheduler plans and what a step results in."""

    timeline: Timeline  # set by Timeline.make_traced

    def reset(self, seqs: list[Sequence]) -> None:
        self.timeline.queues = {}
        super().reset(seqs)

    def schedule(self) -> list[Sequence]:
        timeline = self.timeline
        timeline.times = [timeline.now()]
        timeline.events = []
        self.admitted: set[Sequence] = set()  # in this step
        seqs = super().schedule()
        timeline.times.append(timeline.now())
        return seqs

    def _admit(self, seq: Sequence, budget: int) -> bool:
        is_admitted = super()._admit(seq, budget)
        if is_admitted:
            self.admitted.add(seq)
        return is_admitted

    def preempt(self, seq: Sequence) -> None:
        timeline = self.timeline
        args = {"request_id": seq.seq_id, "blocks": list(seq.block_table)}
        name = f"preempted {seq.seq_id}"
        timeline.events.append(_event("i", seq.lane + 1, name, args, ts=timeline.times[-1]))
        super().preempt(seq)

    def postprocess(self, seqs: list[Sequence], samples: list[list[int]]) -> None:
        self.timeline.times.append(self.timeline.now())
        queues = self._describe_queues()
        drafts: dict[Sequence, list[int]] = getattr(self, "drafts", {})
        works = [self._describe_work(seq, drafts.get(seq, [])) for seq in seqs]
        drafting: list[tuple[Sequence, list[int], int]] = []  # sequence, blocks, start of its draft
        sampled = [token_id for token_ids in samples for token_id in token_ids]
        shown = [*sampled]
        for seq in seqs:
            if seq in self.admitted:
                shown += seq.token_ids
            shown += drafts.get(seq, [])
            if drafts.get(seq):
                drafting.append((seq, list(seq.block_table), seq.num_computed_tokens + 1))
        num_tokens = sum(seq.num_scheduled_tokens for seq in seqs)
        before = {name: getattr(self, name) for name in _COUNTERS}
        super().postprocess(seqs, samples)
        counts = {name: getattr(self, name) - before[name] for name in _COUNTERS}
        results = {
            "kind": _name_kind(counts["num_prefill_tokens"], counts["num_decode_tokens"]),
            "num_tokens": num_tokens,
            **counts,
            "drawn_token_ids": sampled,
            "accepted": [self._describe_draft(*each) for each in drafting],
            "ended": [
                (seq.seq_id, {"finish_reason": seq.finish_reason})
                for seq in seqs
                if seq.finish_reason is not None
            ],
        }
        texts = self.timeline.name_tokens(shown)
        if texts:
            results["texts"] = texts
        self.timeline.write_step(results, queues, works, self._count())

    def _describe_queues(self) -> _Args:
        waiting = islice(self.waiting, _NUM_WAITING)
        free = islice(self.block_manager.free_block_ids, _NUM_FREE)
        return {
            "waiting_requests": [(seq.seq_id, len(seq.token_ids)) for seq in waiting],
            "running_requests": [seq.seq_id for seq in self.running],
            "next_free_blocks": list(free),
        }

    def _count(self) -> dict[str, dict[str, int]]:
        manager = self.block_manager
        num_free = len(manager.free_block_ids)
        num_reusable = sum(manager.blocks[i].hash != -1 for i in manager.free_block_ids)
        return {
            "sequences": {"waiting": len(self.waiting), "running": len(self.running)},
            "blocks": {
                "used": manager.num_blocks - num_free,
                "reusable": num_reusable,
                "empty": num_free - num_reusable,
            },
        }

    def _describe_work(self, seq: Sequence, draft: list[int]) -> str:
        """Encode the event of a sequence in this step, without its times.

        A decode within a block repeats the last event of its lane, because encoding one for each
        sequence would take too long.
        """
        is_new = seq in self.admitted
        start = seq.num_computed_tokens
        decode, repeatable_end = self.timeline.lanes[seq.lane]
        if start < repeatable_end and not is_new and not draft:
            return decode
        count = seq.num_scheduled_tokens - len(draft)
        num_tokens = len(seq.token_ids) - len(draft)
        num_left = num_tokens - start - count
        first_block = start // self.block_size
        end_block = (start + count) // self.block_size
        args: _Args = {
            "request_id": seq.seq_id,
            "num_tokens": count,
            "num_reused_tokens": start if is_new else 0,
        }
        if is_new:
            plain = {**args, "num_tokens": 1, "num_reused_tokens": 0}
            decode = _encode_work("decode", seq, plain)
            args["num_prompt_tokens"] = seq.num_prompt_tokens
            args["token_ids"] = seq.token_ids[:num_tokens]
        repeatable_end = (first_block + 1) * self.block_size - 1 if num_left == 0 else 0
        self.timeline.lanes[seq.lane] = decode, repeatable_end
        args["num_left"] = num_left
        args["draft_token_ids"] = draft
        args["blocks"] = seq.block_table[0 if is_new else first_block :]
        args["full_blocks"] = self._describe_blocks(seq, seq.block_table, first_block, end_block)
        return _encode_work("decode" if seq.is_decode else "prefill", seq, args)

    def _describe_draft(
        self, seq: Sequence, block_table: list[int], start: int
    ) -> tuple[int, _Args]:
        """The number of accepted draft tokens, and the blocks that these have filled."""
        end = max(start, len(seq.token_ids) - 1)
        first_block, end_block = start // self.block_size, end // self.block_size
        blocks = self._describe_blocks(seq, block_table, first_block, end_block)
        return seq.seq_id, {"num_accepted_tokens": end - start, "accepted_blocks": blocks}

    def _describe_blocks(
        self, seq: Sequence, block_table: list[int], first: int, end: int
    ) -> list[tuple[int, str, str, str]]:
        """For full blocks: id, hash if the block is listed, hash of this prefix and its parent."""
        if not self.block_manager.enable_prefix_caching:
            return []
        described = []
        for index in range(first, end):
            block = self.block_manager.blocks[block_table[index]]
            listed = f"{block.hash:032x}" if block.hash != -1 else ""
            parent = f"{seq.block_hashes[index - 1]:032x}" if index > 0 else ""
            described.append((block.block_id, listed, f"{seq.block_hashes[index]:032x}", parent))
        return described


def _encode_work(kind: str, seq: Sequence, args: _Args) -> str:
    """An event without times and without its closing brace."""
    name = f"{kind} {seq.seq_id}"
    return f'{{"ph":"X","pid":1,"tid":{seq.lane + 1},"name":"{name}","args":{_encode(args)}'


def _name_kind(num_prefill_tokens: int, num_decode_tokens: int) -> str:
    if num_prefill_tokens and num_decode_tokens:
        return "mixed"
    return "prefill" if num_prefill_tokens else "decode"


class _TracedModelRunner(ScoringModelRunner):
    """Records when the phases of a step begin."""

    def __init__(
        self, timeline: Timeline, config: Config, spec: ModelSpec, directory: Path
    ) -> None:
        self.timeline = timeline
        super().__init__(config, spec, directory)

    def prepare_batch(self, seqs: list[Sequence]) -> Batch:
        batch = super().prepare_batch(seqs)
        self.timeline.times.append(self.timeline.now())
        return batch

    def run(self, seqs: list[Sequence]) -> Tensor:
        times = self.timeline.times  # an interrupted step must not add to those of the next one
        logits = super().run(seqs)
        if logits.is_cuda:
            # Otherwise the forward pass would be measured as sampling.
            cuda.synchronize(logits.device)
        times.append(self.timeline.now())
        return logits
