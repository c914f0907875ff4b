"""The timeline of an engine (`LLM(..., trace="trace.json")`), in the Chrome trace event format that ui.perfetto.dev opens.

    steps     | mixed: 13 tokens     | decode: 2 tokens |    and within a step: schedule, prepare, forward, sample
    lane 0    | decode 0             | decode 0         |    a lane is one sequence's until it ends or is preempted
    lane 1    | prefill 1            | decode 1         |    with what is computed, and what was reused
    counters    waiting and running sequences; used, reusable and empty blocks

The events' args also hold, when it changes, what `python -m nanovllm.trace` needs to draw the pool of blocks: token ids (a trace
is as private as its prompts), blocks, the hashes of full ones, the queues and the free blocks that come next. A sequence's event
says what was planned, with `blocks`, in which it writes; the step's event says what came of it.

The engine knows nothing of it: `watch` gives scheduler and executor a class that takes notes, as layers become their twins.
A step is written down when it ends. After every step the file is a whole JSON array, for each write replaces the closing bracket.
"""

import json
import os
import time
import warnings
from itertools import islice

from torch import Tensor, cuda

from nanovllm.batch import Batch
from nanovllm.engine.executor import Executor
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence

_PHASES = ("schedule", "prepare", "forward", "sample")
_COUNTS = ("num_prefill_tokens", "num_decode_tokens", "num_draft_tokens", "num_accepted_tokens")
_NUM_WAITING, _NUM_FREE = 10, 40  # written down of the queue and of the free blocks: the next ones
_END = b"\n]\n"
_Args = dict[str, object]
_encode = json.JSONEncoder(separators=(",", ":")).encode


class Timeline:
    """The file, and what is noted for it until a step ends."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises ValueError if the file cannot be written."""
        try:
            self.file = open(path, "w+b", buffering=0)  # "+": or a pipe would be waited for; now `seek` refuses it
            self.file.write(b"[\n" + _encode(_event("M", 0, "thread_name", {"name": "steps"})).encode() + _END)
            self.file.seek(-len(_END), os.SEEK_END)
        except (OSError, ValueError) as error:
            raise ValueError(f"trace={os.fspath(path)!r} cannot be written: {error}") from error
        self.num_steps, self.origin = 0, time.perf_counter_ns()
        self.notes: dict[str, object] = {}  # of the last step; none if the next one starts over
        self.times: list[int] = []  # when schedule, prepare, forward and sample began, and when sample ended
        self.events: list[_Args] = []

    def watch(self, scheduler: Scheduler, model_runner: ModelRunner) -> None:
        """Record what these do from now on."""
        scheduler.__class__, model_runner.executor.__class__ = _Scheduler, _Executor
        vars(scheduler)["timeline"] = vars(model_runner.executor)["timeline"] = self
        # Who has a lane, by its block table; the event of its decodes; from which position on there is more to tell.
        self.lanes: list[tuple[list[int] | None, str, int]] = [(None, "", 0)] * scheduler.max_num_seqs
        settings = {"num_blocks": scheduler.block_manager.num_blocks, "block_size": scheduler.block_manager.block_size}
        for name in ("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill"):
            settings[name] = getattr(scheduler, name)
        names = [_event("M", lane + 1, "thread_name", {"name": f"lane {lane}"}) for lane in range(scheduler.max_num_seqs)]
        self.write(_encode([_event("M", 0, "process_name", {"name": "nanovllm", **settings}), *names])[1:-1])

    def now(self) -> int:
        """In microseconds."""
        return (time.perf_counter_ns() - self.origin) // 1000

    def write_step(self, results: _Args, notes: _Args, shares: list[str], counters: dict[str, dict[str, int]]) -> None:
        """Add a step, the sequences' shares of it, and the state that it has left behind. Notes stand there when they change."""
        begin, *_, end = self.times
        phases = list(zip(_PHASES, self.times, self.times[1:]))
        args = {"step": self.num_steps, "starts_over": not self.notes, **results}
        args |= {f"{name}_ms": (after - before) / 1e3 for name, before, after in phases}
        args |= {name: note for name, note in notes.items() if note != self.notes.get(name)}
        title = f"{results['kind']}: {results['num_tokens']} tokens"
        events = [_event("X", 0, title, args, ts=begin, dur=end - begin), *self.events]
        events += [_event("X", 0, name, {}, ts=before, dur=after - before) for name, before, after in phases]
        events += [_event("C", 0, name, numbers, ts=end) for name, numbers in counters.items()]
        times = f',"ts":{begin},"dur":{end - begin}}}'
        self.write(_encode(events)[1:-1] + ",\n" + (times + ",\n").join(shares) + times)
        self.notes, self.num_steps = notes, self.num_steps + 1

    def write(self, events: str) -> None:
        """Add events. On a full disk the file stays as it was, a warning says so, and nothing more is written."""
        if self.file.closed:
            return
        data, end = b",\n" + events.encode() + _END, self.file.seek(-len(_END), os.SEEK_END)
        try:
            while data:  # a write may take only a part
                data = data[self.file.write(data) :]
        except OSError as error:
            with self.file:
                self.file.truncate(end)
                self.file.seek(end)
                self.file.write(_END)
            warnings.warn(f"trace={self.file.name!r} ends here: {error}", RuntimeWarning, stacklevel=2)


def _event(phase: str, track: int, name: str, args: object, **when: int) -> _Args:
    return {"ph": phase, "pid": 1, "tid": track, "name": name, "args": args, **when}


class _Scheduler(Scheduler):
    timeline: Timeline

    def reset(self, seqs: list[Sequence]) -> None:
        self.timeline.notes = {}
        super().reset(seqs)

    def schedule(self) -> list[Sequence]:
        timeline = self.timeline
        timeline.times, timeline.events = [timeline.now()], []
        seqs = super().schedule()
        timeline.times.append(timeline.now())
        return seqs

    def preempt(self, seq: Sequence) -> None:
        times = self.timeline.times
        # A step that is being planned preempts for blocks, one that has been computed for NaN.
        args = {"request_id": seq.seq_id, "blocks": seq.block_table, "is_nan": len(times) > 1}
        self.timeline.events.append(_event("i", seq.lane + 1, f"preempted {seq.seq_id}", args, ts=times[-1]))
        super().preempt(seq)

    def postprocess(self, seqs: list[Sequence], token_ids: list[int]) -> list[Sequence]:
        timeline, manager = self.timeline, self.block_manager
        timeline.times.append(timeline.now())
        queues = {
            "waiting_requests": [(seq.seq_id, len(seq.token_ids)) for seq in islice(self.waiting, _NUM_WAITING)],
            "running_requests": [seq.seq_id for seq in self.running],
            "next_free_blocks": list(islice(manager.free_block_ids, _NUM_FREE)),
        }
        shares = list(map(self._describe, seqs))
        drafted = [(seq, seq.block_table, len(seq.token_ids)) for seq in seqs if seq.draft]
        before = {name: getattr(self, name) for name in _COUNTS}
        caught_up = super().postprocess(seqs, token_ids)
        counts = {name: getattr(self, name) - count for name, count in before.items()}
        num_prefills, num_decodes, num_drafts, num_accepted = counts.values()
        results = {
            "kind": "mixed" if num_prefills and num_decodes else "prefill" if num_prefills else "decode",
            "num_tokens": num_prefills + num_decodes - num_accepted + num_drafts,
            **counts,
            "drawn_token_ids": token_ids,
            "accepted": [self._describe_draft(*draft) for draft in drafted],
            "ended": [(seq.seq_id, {"finish_reason": seq.finish_reason}) for seq in caught_up if seq.finish_reason],
        }
        num_free, num_reusable = len(manager.free_block_ids), manager.num_reusable
        counters = {
            "sequences": {"waiting": len(self.waiting), "running": len(self.running)},
            "blocks": {"used": manager.num_blocks - num_free, "reusable": num_reusable, "empty": num_free - num_reusable},
        }
        timeline.write_step(results, queues, shares, counters)
        return caught_up

    def _describe(self, seq: Sequence) -> str:
        """The event of its share of this step, but for the times. A decode within a block repeats its last one: all of them by
        json.dumps would take too long."""
        table, start, count = seq.block_table, seq.num_computed_tokens, seq.num_scheduled_tokens
        known_table, decode, end = self.timeline.lanes[seq.lane]
        if table is known_table and start < end and not seq.draft:
            return decode
        size, is_new, num_left = self.block_manager.block_size, table is not known_table, len(seq.token_ids) - start - count
        event = f'{{"ph":"X","pid":1,"tid":{seq.lane + 1},"name":"%s {seq.seq_id}","args":'
        args: _Args = {"request_id": seq.seq_id, "num_tokens": count, "num_reused_tokens": start * is_new}
        if is_new:
            decode = event % "decode" + _encode({**args, "num_tokens": 1, "num_reused_tokens": 0})
            args |= {"num_prompt_tokens": seq.num_prompt_tokens, "token_ids": seq.token_ids}
        self.timeline.lanes[seq.lane] = table, decode, 0 if num_left else (start // size + 1) * size - 1
        args["num_left"], args["draft_token_ids"], args["blocks"] = num_left, seq.draft, table[0 if is_new else start // size :]
        args["full_blocks"] = self._list_contents(table[start // size : (start + count) // size])
        return event % ("decode" if seq.is_decode else "prefill") + _encode(args)

    def _describe_draft(self, seq: Sequence, table: list[int], start: int) -> tuple[int, _Args]:
        """What came of the draft of a sequence that had `start` tokens: how many were right, and the blocks these have filled."""
        size, end = self.block_manager.block_size, max(start, len(seq.token_ids) - 1)
        blocks = self._list_contents(table[start // size : end // size])
        return seq.seq_id, {"num_accepted_tokens": end - start, "accepted_blocks": blocks}

    def _list_contents(self, block_ids: list[int]) -> list[tuple[int, str, int, int]]:
        """Of full blocks: the id, the hash if that leads there, content_id, parent_id."""
        blocks = [self.block_manager.blocks[block_id] for block_id in block_ids]
        return [(b.block_id, f"{b.hash:016x}" if b.hash != -1 else "", b.content_id, b.parent_id) for b in blocks]


class _Executor(Executor):
    timeline: Timeline

    def run(self, batch: Batch) -> Tensor:
        timeline, times = self.timeline, self.timeline.times  # the next step has others, if this one is cut short
        times.append(timeline.now())
        logits = super().run(batch)
        if logits.is_cuda:
            cuda.synchronize(logits.device)  # else the model's time would be counted as the sampler's
        times.append(timeline.now())
        return logits
