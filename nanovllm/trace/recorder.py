"""Records a trace (`LLM(..., trace="trace.json")`) in the Chrome trace event format.

    steps     | mixed: 13 tokens     | decode: 2 tokens |    with schedule, prepare, forward, sample
    lane 0    | decode 0             | decode 0         |    one sequence until it leaves the lane
    lane 1    | prefill 1            | decode 1         |    tokens that are computed and reused
    counters    waiting and running sequences; used, reusable and empty blocks

ui.perfetto.dev opens the file. The events' args also hold what `python -m nanovllm.trace` needs to
draw the pool of blocks: token ids and texts, blocks, hashes of full blocks, queues and the next
free blocks, each when it changes. A trace contains the prompts and the outputs.

The engine does not import this module. LLM derives its scheduler and its model runner from
TracedScheduler and TracedModelRunner, which share a Timeline. A step is written when it ends. The
file is a complete JSON array after every step, because each write replaces the closing bracket.
"""

import json
import os
import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from torch import Tensor, cuda

from nanovllm.batch import Batch
from nanovllm.engine.prompt_logprobs import ScoringModelRunner
from nanovllm.engine.scheduler import PrefillFirstScheduler, Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.trace.reader import PHASES
from nanovllm.vocabulary import Vocabulary

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
    """Collects the events of the current step. A subclass writes them."""

    def __init__(self) -> None:
        self.origin = time.perf_counter_ns()
        self.num_steps = 0
        self.is_reset = True  # the KV cache has been emptied since the last step
        self.queues: _Args = {}  # as of the last step
        self.times: list[int] = []  # starts of the phases of this step, then the end of the last
        self.preemptions: list[_Args] = []  # events of this step

    def begin(
        self,
        scheduler: Scheduler,
        vocabulary: Vocabulary,
        warn: Callable[[str], None],
    ) -> None:
        """Write the engine's settings and the names of the lanes.

        `warn` is called with what the engine's caller should know.
        """
        self.warn = warn
        self.vocabulary = vocabulary
        self.named: set[int] = set()  # tokens whose texts are written
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
        self.write(events)

    def now(self) -> int:
        """Microseconds since the timeline was made."""
        return (time.perf_counter_ns() - self.origin) // 1000

    def name_tokens(self, token_ids: Iterable[int]) -> dict[int, str]:
        """Return the texts of tokens that no earlier step has written."""
        texts: dict[int, str] = {}
        if self.vocabulary.tokenizer is not None:
            for token_id in token_ids:
                if token_id not in self.named:
                    self.named.add(token_id)
                    texts[token_id] = self.vocabulary.name(token_id)
        return texts

    def write_step(
        self,
        results: _Args,
        queues: _Args,
        works: list[_Args],
        counters: dict[str, dict[str, int]],
    ) -> None:
        """Write a step, the work of its sequences, and the counters after it.

        `works` are events without times. Of `queues` the step holds those that changed.
        """
        begin, end = self.times[0], self.times[-1]
        args: _Args = {"step": self.num_steps, "is_reset": self.is_reset, **results}
        phases: list[_Args] = []
        for name, start, stop in zip(PHASES, self.times, self.times[1:]):
            args[f"{name}_ms"] = (stop - start) / 1e3
            phases.append(_event("X", 0, name, {}, ts=start, dur=stop - start))
        for name, queue in queues.items():
            if self.is_reset or queue != self.queues[name]:
                args[name] = queue
        title = f"{results['kind']}: {results['num_tokens']} tokens"
        moment = {"ts": begin, "dur": end - begin}
        events = [
            _event("X", 0, title, args, **moment),
            *self.preemptions,
            *[{**work, **moment} for work in works],
            *phases,
            *[_event("C", 0, name, numbers, ts=end) for name, numbers in counters.items()],
        ]
        self.queues = queues
        self.is_reset = False
        self.num_steps += 1
        self.write(events)  # last, so that an interrupt that follows finds the state above

    def write(self, events: list[_Args]) -> None:
        """Write events. All events of a step come in one call, that of the step first."""
        raise NotImplementedError

    def close(self) -> None:
        """End the recording."""


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

    def write(self, events: list[_Args]) -> None:
        """Add events. If that fails, keep the complete steps, warn, and record no more."""
        if self.file.closed:
            return
        data = ",\n".join(["", *map(_encode, events)]).encode() + _END
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
            self.warn(message)

    def close(self) -> None:
        self.file.close()


def _event(phase: str, track: int, name: str, args: _Args, **when: int) -> _Args:
    return {"ph": phase, "pid": 1, "tid": track, "name": name, "args": args, **when}


class TracedScheduler(Scheduler):
    """Records what the scheduler plans and what a step results in."""

    timeline: Timeline

    def reset(self, seqs: list[Sequence]) -> None:
        self.timeline.is_reset = True
        super().reset(seqs)

    def schedule(self) -> list[Sequence]:
        timeline = self.timeline
        timeline.times = [timeline.now()]
        timeline.preemptions = []
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
        event = _event("i", seq.lane + 1, name, args, ts=timeline.times[-1])
        timeline.preemptions.append(event)
        super().preempt(seq)

    def postprocess(self, seqs: list[Sequence], samples: list[list[int]]) -> None:
        self.timeline.times.append(self.timeline.now())
        queues = self._describe_queues()
        drafts: dict[Sequence, list[int]] = getattr(self, "drafts", {})
        works = [self._describe_plan(seq, drafts.get(seq, [])) for seq in seqs]
        lengths = [len(seq.token_ids) - len(drafts.get(seq, [])) for seq in seqs]
        tables = [list(seq.block_table) for seq in seqs]  # a finished sequence has none
        shown: list[int] = []  # tokens that this step shows
        for seq in seqs:
            shown += seq.token_ids if seq in self.admitted else drafts.get(seq, [])
        num_tokens = sum(seq.num_scheduled_tokens for seq in seqs)
        before = {name: getattr(self, name, 0) for name in _COUNTERS}
        super().postprocess(seqs, samples)
        counts = {name: getattr(self, name, 0) - before[name] for name in _COUNTERS}
        for seq, work, length, table in zip(seqs, works, lengths, tables):
            work["args"] |= self._describe_result(seq, length, table)
            shown += seq.token_ids[length:]
        results = {
            "kind": _name_kind(counts["num_prefill_tokens"], counts["num_decode_tokens"]),
            "num_tokens": num_tokens,
            **counts,
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

    def _describe_plan(self, seq: Sequence, draft: list[int]) -> _Args:
        """The event of a sequence in this step, without its times and its result."""
        is_new = seq in self.admitted
        start = seq.num_computed_tokens
        num_tokens = seq.num_scheduled_tokens - len(draft)
        first_block = start // self.block_size
        end_block = (start + num_tokens) // self.block_size
        is_within_block = seq.num_scheduled_tokens == 1 and start % self.block_size != 0
        args: _Args = {
            "request_id": seq.seq_id,
            "num_tokens": num_tokens,
            "num_reused_tokens": start if is_new else 0,
            "draft_token_ids": draft,
            "blocks": [] if is_within_block else seq.block_table[first_block:],
            "full_blocks": self._describe_blocks(seq, seq.block_table, first_block, end_block),
        }
        if is_new:
            args["num_prompt_tokens"] = seq.num_prompt_tokens
            args["token_ids"] = seq.token_ids[: len(seq.token_ids) - len(draft)]
            args["blocks"] = list(seq.block_table)
        kind = "decode" if seq.is_decode else "prefill"
        return _event("X", seq.lane + 1, f"{kind} {seq.seq_id}", args)

    def _describe_result(self, seq: Sequence, length: int, block_table: list[int]) -> _Args:
        """What the step has added to a sequence of `length` tokens."""
        new_token_ids = seq.token_ids[length:]
        num_accepted = max(0, len(new_token_ids) - 1)
        first_block = length // self.block_size
        end_block = (length + num_accepted) // self.block_size
        return {
            "new_token_ids": new_token_ids,
            "num_accepted_tokens": num_accepted,
            "accepted_blocks": self._describe_blocks(seq, block_table, first_block, end_block),
            "finish_reason": seq.finish_reason,
        }

    def _describe_blocks(
        self, seq: Sequence, block_table: list[int], first: int, end: int
    ) -> list[tuple[int, str, str, str]]:
        """For full blocks: id, hash if listed, hash of the prefix that it ends, hash before it."""
        if not self.block_manager.enable_prefix_caching:
            return []
        described = []
        for index in range(first, end):
            block = self.block_manager.blocks[block_table[index]]
            listed = f"{block.hash:032x}" if block.hash != -1 else ""
            parent = f"{seq.block_hashes[index - 1]:032x}" if index > 0 else ""
            described.append((block.block_id, listed, f"{seq.block_hashes[index]:032x}", parent))
        return described


def _name_kind(num_prefill_tokens: int, num_decode_tokens: int) -> str:
    if num_prefill_tokens and num_decode_tokens:
        return "mixed"
    return "prefill" if num_prefill_tokens else "decode"


class TracedModelRunner(ScoringModelRunner):
    """Records when the phases of a step begin."""

    timeline: Timeline

    def prepare_batch(self, seqs: list[Sequence]) -> Batch:
        batch = super().prepare_batch(seqs)
        self.timeline.times.append(self.timeline.now())
        return batch

    def forward(self, seqs: list[Sequence]) -> Tensor:
        logits = super().forward(seqs)
        if logits.is_cuda:
            # Otherwise the forward pass would be measured as sampling.
            cuda.synchronize(logits.device)
        self.timeline.times.append(self.timeline.now())
        return logits
