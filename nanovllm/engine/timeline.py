"""The timeline of an engine (`LLM(..., trace="trace.json")`), in the Chrome trace event format that ui.perfetto.dev opens.

    steps     | mixed: 13 tokens     | decode: 2 tokens |    and within a step: schedule, prepare, forward, sample
    lane 0    | decode 0             | decode 0         |    a lane is one sequence's until it ends or is preempted
    lane 1    | prefill 1            | decode 1         |    with what is computed, and what was reused
    counters    waiting and running sequences; used, reusable and empty blocks

The events' args also hold, whenever it changes, what `python -m nanovllm.trace` needs to draw the pool of blocks: token ids (a
trace is as private as its prompts), block tables, the hashes of full blocks, the queues and the free blocks that come next.

The engine knows nothing of it: `watch` gives scheduler and executor a class that takes notes, as layers become their twins.
A step is written down when it ends, and not at all if it is cut short. After every step the file is a whole JSON array, for
each write replaces the closing bracket.
"""

import json
import os
import time
import warnings
from itertools import islice

from torch import Tensor, cuda

from nanovllm.batch import Batch
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.executor import Executor
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence

_PHASES = ("schedule", "prepare", "forward", "sample")
_NUM_WAITING, _NUM_FREE = 10, 40  # written down of the queue and of the free blocks: the next ones
Work = tuple[Sequence, int, int, int, list[int], list[int], int, list[int]]  # a sequence's share of a step, as it was planned


class Step:
    """What a step notes on its way. Times are in microseconds: when schedule, prepare, forward, sample begin and sample ends."""

    def __init__(self, origin: int) -> None:
        self.origin = origin
        self.times: list[int] = []
        self.events: list[str] = []
        self.note_time()

    def note_time(self) -> None:
        self.times.append((time.perf_counter_ns() - self.origin) // 1000)


class Lane:
    """The sequence that has it, by its block table, and how much of that is written down."""

    def __init__(self, seq: Sequence, lane: int, block_table: list[int]) -> None:
        self.block_table, self.num_blocks = block_table, 0
        args = {"request_id": seq.seq_id, "num_prompt_tokens": seq.num_prompt_tokens, "num_reused_tokens": 0, "num_tokens": 1}
        self.decode = _event("X", lane + 1, f"decode {seq.seq_id}", {}, **args)[:-2]  # how nearly all of its events begin


class Timeline:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises ValueError if the file cannot be written."""
        try:
            if os.path.exists(path) and not os.path.isfile(path):  # not even opened: a pipe would wait for its reader
                raise ValueError("it must be a regular file, whose end each step can replace")
            self.file = open(path, "wb", buffering=0)
            self.file.write(b"[")
        except (OSError, ValueError) as error:
            raise ValueError(f"trace={os.fspath(path)!r} cannot be written: {error}") from error
        self.end, self.num_steps, self.origin = 1, 0, time.perf_counter_ns()  # end: of the last event
        self.lanes: dict[int, Lane] = {}
        self.queues: dict[str, object] = {}  # as last written
        self.step = Step(self.origin)
        self._write([_event("M", 0, "thread_name", {}, name="steps")])

    def watch(self, scheduler: Scheduler, model_runner: ModelRunner) -> None:
        """Record what these do from now on."""
        scheduler.__class__, model_runner.executor.__class__ = _Scheduler, _Executor
        vars(scheduler)["timeline"] = vars(model_runner.executor)["timeline"] = self
        settings: dict[str, int] = {name: getattr(scheduler.block_manager, name) for name in ("num_blocks", "block_size")}
        for name in ("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill"):
            settings[name] = getattr(scheduler, name)
        self._write([_event("M", 0, "process_name", {}, name="nanovllm", **settings)])

    def note_start_over(self) -> None:
        now = (time.perf_counter_ns() - self.origin) // 1000
        self._write([_event("i", 0, "started over", {"ts": now})])

    def write_step(self, scheduler: Scheduler, works: list[Work], queues: dict[str, object]) -> None:
        """Write down what the step has computed and what it has left behind."""
        begin, end, manager = self.step.times[0], self.step.times[-1], scheduler.block_manager
        when, events = {"ts": begin, "dur": end - begin}, self.step.events
        rest = f',"step":{self.num_steps}}},"ts":{begin},"dur":{end - begin}}}'
        num_tokens = num_decodes = num_drafts = num_accepted = 0
        lanes, size = self.lanes, manager.block_size
        for work in works:
            seq, number, start, count, block_table, blocks, length, draft = work
            lane, new = lanes.get(number), seq.token_ids[length:]
            is_decode = count == 1 and start >= seq.num_prompt_tokens
            is_plain = is_decode and len(new) == 1 and seq.lane == number and not draft and length % size
            if is_plain and lane is not None and lane.block_table is block_table and lane.num_blocks == len(blocks):
                events.append(f'{lane.decode},"start":{start},"new_token_ids":[{new[0]}]{rest}')
                num_decodes += 1
                continue
            if draft:
                num_drafts, num_accepted = num_drafts + len(draft), num_accepted + max(0, len(new) - 1)
                count += max(0, len(new) - 1)
            num_tokens, num_decodes = num_tokens + count * (not is_decode), num_decodes + count * is_decode
            self._describe(manager, work, new, count, is_decode, when)
        num_tokens += num_decodes
        kind = "decode" if num_decodes == num_tokens else "mixed" if num_decodes else "prefill"
        step = {"step": self.num_steps, "kind": kind, "num_tokens": num_tokens, "num_prefill_tokens": num_tokens - num_decodes}
        step |= {"num_decode_tokens": num_decodes, "num_draft_tokens": num_drafts, "num_accepted_tokens": num_accepted}
        step["num_batched_tokens"] = num_tokens - num_accepted + num_drafts
        step |= {name: queue for name, queue in queues.items() if queue != self.queues.get(name)}
        phases = list(zip(_PHASES, self.step.times, self.step.times[1:]))
        step |= {f"{name}_ms": (after - before) / 1e3 for name, before, after in phases}
        num_free, num_reusable = len(manager.free_block_ids), manager.num_reusable
        pool = {"used": manager.num_blocks - num_free, "reusable": num_reusable, "empty": num_free - num_reusable}
        seqs = {"waiting": len(scheduler.waiting), "running": len(scheduler.running)}
        head = [_event("X", 0, f"{kind}: {num_tokens} tokens", when, **step)]
        head += [_event("X", 0, name, {"ts": before, "dur": after - before}) for name, before, after in phases]
        counters = [_event("C", 0, name, {"ts": end}, **counts) for name, counts in (("sequences", seqs), ("blocks", pool))]
        self._write(head + events + counters)
        self.num_steps, self.queues = self.num_steps + 1, queues

    def _describe(
        self, manager: BlockManager, work: Work, new: list[int], count: int, is_decode: bool, when: dict[str, int]
    ) -> None:
        """The event of a sequence's share, which has left K/V of `count` more tokens, with everything that has changed."""
        seq, number, start, planned, block_table, blocks, length, draft = work
        lane, size = self.lanes.get(number), manager.block_size
        args: dict[str, object] = {}
        if lane is None:
            self.step.events.append(_event("M", number + 1, "thread_name", {}, name=f"lane {number}"))
        if is_new := lane is None or lane.block_table is not block_table:
            self.lanes[number] = lane = Lane(seq, number, block_table)
            args["token_ids"] = seq.token_ids[:length]
        args |= {"step": self.num_steps, "request_id": seq.seq_id, "start": start, "num_tokens": count}
        args |= {"num_reused_tokens": start * is_new, "num_prompt_tokens": seq.num_prompt_tokens}
        if len(blocks) > lane.num_blocks:
            args["new_blocks"] = blocks[lane.num_blocks :]
        lane.num_blocks = len(block_table)
        if lane.num_blocks < len(blocks):  # by those of refused drafts
            args["num_returned_blocks"] = len(blocks) - lane.num_blocks
        full = blocks[start // size : (start + count) // size]
        if full and manager.enable_prefix_caching:
            args["full_blocks"] = [
                [block.block_id, "" if block.hash == -1 else f"{block.hash:016x}", block.content_id, block.parent_id]
                for block in map(manager.blocks.__getitem__, full)
            ]
        if new:
            args["new_token_ids"] = new
        if draft:
            args |= {"draft_token_ids": draft, "num_draft_tokens": len(draft), "num_accepted_tokens": count - planned}
        if seq.finish_reason is not None:
            args["finish_reason"] = seq.finish_reason
        self.step.events.append(_event("X", number + 1, f"{'decode' if is_decode else 'prefill'} {seq.seq_id}", when, **args))

    def _write(self, events: list[str]) -> None:
        """Add events. On a full disk the file stays as it was, a warning says so, and nothing more is written."""
        if self.file.closed:
            return
        data = (("\n" if self.end == 1 else ",\n") + ",\n".join(events)).encode()
        try:
            self._replace_end(data)
        except OSError as error:
            with self.file:
                self._replace_end(b"")
            warnings.warn(f"trace={self.file.name!r} ends here: {error}", RuntimeWarning, stacklevel=2)
        self.end += len(data)

    def _replace_end(self, data: bytes) -> None:
        self.file.seek(self.end)
        rest = data + b"\n]\n"
        while rest:  # a write may take only a part
            rest = rest[self.file.write(rest) :]
        self.file.truncate()  # what an interrupted step may have written


def _event(phase: str, track: int, title: str, when: dict[str, int], **args: object) -> str:
    return json.dumps({"ph": phase, "pid": 1, "tid": track, "name": title, **when, "args": args}, separators=(",", ":"))


class _Scheduler(Scheduler):
    timeline: Timeline

    def reset(self, seqs: list[Sequence]) -> None:
        self.timeline.note_start_over()
        super().reset(seqs)

    def schedule(self) -> list[Sequence]:
        self.timeline.step = step = Step(self.timeline.origin)
        seqs = super().schedule()
        step.note_time()
        return seqs

    def preempt(self, seq: Sequence) -> None:
        manager, step = self.block_manager, self.timeline.step
        num_reusable = sum(manager.blocks[block_id].hash != -1 for block_id in seq.block_table)
        is_nan = len(step.times) > 1  # a step that is being planned preempts for blocks, one that has been computed for NaN
        args = {"request_id": seq.seq_id, "num_reusable_blocks": num_reusable, "is_nan": is_nan}
        step.events.append(_event("i", seq.lane + 1, f"preempted {seq.seq_id}", {"ts": step.times[-1]}, **args))
        super().preempt(seq)

    def postprocess(self, seqs: list[Sequence], token_ids: list[int]) -> list[Sequence]:
        self.timeline.step.note_time()
        works: list[Work] = [
            (seq, seq.lane, seq.num_computed_tokens, seq.num_scheduled_tokens, seq.block_table,
             seq.block_table[:] if seq.draft else seq.block_table, len(seq.token_ids), seq.draft)
            for seq in seqs
        ]  # fmt: skip
        queues = {
            "waiting_requests": [(seq.seq_id, len(seq.token_ids)) for seq in islice(self.waiting, _NUM_WAITING)],
            "running_requests": [seq.seq_id for seq in self.running],
            "next_free_blocks": list(islice(self.block_manager.free_block_ids, _NUM_FREE)),
        }
        caught_up = super().postprocess(seqs, token_ids)
        self.timeline.write_step(self, works, queues)
        return caught_up


class _Executor(Executor):
    timeline: Timeline

    def run(self, batch: Batch) -> Tensor:
        step = self.timeline.step  # which another may follow meanwhile, if this one is cut short
        step.note_time()
        logits = super().run(batch)
        if logits.is_cuda:
            cuda.synchronize(logits.device)  # else the model's time would be counted as the sampler's
        step.note_time()
        return logits
