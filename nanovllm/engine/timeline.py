"""The timeline of an engine (`LLM(..., trace="trace.json")`), in the Chrome trace event format that ui.perfetto.dev opens.

    steps     | mixed: 13 tokens     | decode: 2 tokens |    and within a step: schedule, prepare, forward, sample
    lane 0    | decode 0             | decode 0         |    a lane is one sequence's until it ends or is preempted
    lane 1    | prefill 1            | decode 1         |    with what is computed, and what was reused
    counters    waiting and running sequences; used, reusable and empty blocks

The engine knows nothing of it: `watch` gives scheduler and executor a class that takes notes, as layers become their twins.
A step is written down when it ends, and not at all if it is cut short. After every step the file is a whole JSON array, for
each write replaces the closing bracket. `python -m nanovllm.trace` shows it as text or as a picture.
"""

import json
import os
import time
import warnings

from torch import Tensor, cuda

from nanovllm.batch import Batch
from nanovllm.engine.executor import Executor
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence

_PHASES = ("schedule", "prepare", "forward", "sample")
_WORK = (  # a sequence's share of a step: by hand, since there are hundreds of these in a step
    '{"ph": "X", "pid": 1, "tid": %d, "name": "%s %d", "ts": %d, "dur": %d, "args": {"step": %d, "request_id": %d,'
    ' "start": %d, "num_tokens": %d, "num_reused_tokens": %d, "num_prompt_tokens": %d}}'
)


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
        self.block_tables: dict[int, list[int]] = {}  # lane -> that of the sequence which had it last
        self._write([_event("M", 0, "thread_name", {}, name="steps")])

    def watch(self, scheduler: Scheduler, model_runner: ModelRunner) -> None:
        """Record what these do from now on."""
        scheduler.__class__, model_runner.executor.__class__ = _Scheduler, _Executor
        vars(scheduler)["timeline"] = vars(model_runner.executor)["timeline"] = self

    def begin_step(self) -> None:
        self.events: list[str] = []
        self.times: list[int] = []  # microseconds: when schedule, prepare, forward and sample begin, when sample ends
        self.note_time()

    def note_time(self, times: list[int] | None = None) -> None:
        """In this step's `times`, or in those of the step that the caller belongs to: it may have been cut short meanwhile."""
        (self.times if times is None else times).append((time.perf_counter_ns() - self.origin) // 1000)

    def describe(self, seqs: list[Sequence]) -> None:
        """Note what the step has computed of `seqs`, before this counts as computed."""
        self.note_time()
        begin, duration = self.times[0], self.times[-1] - self.times[0]
        self.new_block_tables = {seq.lane: seq.block_table for seq in seqs}
        num_tokens = {"prefill": 0, "decode": 0}
        for seq in seqs:
            start, count, track = seq.num_computed_tokens, seq.num_scheduled_tokens, seq.lane + 1
            kind = "decode" if count == 1 and start >= seq.num_prompt_tokens else "prefill"
            num_tokens[kind] += count
            if seq.lane not in self.block_tables:
                self.events.append(_event("M", track, "thread_name", {}, name=f"lane {seq.lane}"))
            num_reused = 0 if self.block_tables.get(seq.lane) is seq.block_table else start
            args = self.num_steps, seq.seq_id, start, count, num_reused, seq.num_prompt_tokens
            self.events.append(_WORK % (track, kind, seq.seq_id, begin, duration, *args))
        kind = "mixed" if all(num_tokens.values()) else "decode" if num_tokens["decode"] else "prefill"
        step = {"step": self.num_steps, "kind": kind, "num_tokens": sum(num_tokens.values())}
        step |= {f"num_{kind}_tokens": count for kind, count in num_tokens.items()}
        for name, start, end in zip(_PHASES, self.times, self.times[1:]):
            step[f"{name}_ms"] = (end - start) / 1e3
            self.events.append(_event("X", 0, name, {"ts": start, "dur": end - start}))
        when = {"ts": begin, "dur": duration}
        self.events.insert(0, _event("X", 0, f"{kind}: {step['num_tokens']} tokens", when, **step))

    def end_step(self, scheduler: Scheduler) -> None:
        """Count what the step has left behind, and write it all down."""
        manager, when = scheduler.block_manager, {"ts": self.times[-1]}
        num_free, num_reusable = len(manager.free_block_ids), manager.num_reusable
        blocks = {"used": manager.num_blocks - num_free, "reusable": num_reusable, "empty": num_free - num_reusable}
        seqs = {"waiting": len(scheduler.waiting), "running": len(scheduler.running)}
        self._write([*self.events, _event("C", 0, "sequences", when, **seqs), _event("C", 0, "blocks", when, **blocks)])
        self.num_steps += 1
        self.block_tables |= self.new_block_tables

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
    return json.dumps({"ph": phase, "pid": 1, "tid": track, "name": title, **when, "args": args})


class _Scheduler(Scheduler):
    timeline: Timeline

    def schedule(self) -> list[Sequence]:
        self.timeline.begin_step()
        seqs = super().schedule()
        self.timeline.note_time()
        return seqs

    def preempt(self, seq: Sequence) -> None:
        when = {"ts": self.timeline.times[0]}
        self.timeline.events.append(_event("i", seq.lane + 1, f"preempted {seq.seq_id}", when, request_id=seq.seq_id))
        super().preempt(seq)

    def postprocess(self, seqs: list[Sequence], token_ids: list[int]) -> list[Sequence]:
        self.timeline.describe(seqs)
        caught_up = super().postprocess(seqs, token_ids)
        self.timeline.end_step(self)
        return caught_up


class _Executor(Executor):
    timeline: Timeline

    def run(self, batch: Batch) -> Tensor:
        timeline, times = self.timeline, self.timeline.times
        timeline.note_time(times)
        logits = super().run(batch)
        if logits.is_cuda:
            cuda.synchronize(logits.device)  # else the model's time would be counted as the sampler's
        timeline.note_time(times)
        return logits
