"""The timeline of an engine (`LLM(..., trace="trace.json")`), in the Chrome trace event format that ui.perfetto.dev opens.

    steps     | mixed: 13 tokens     | decode: 2 tokens |    and within a step: schedule, prepare, forward, sample
    lane 0    | decode 0             | decode 0         |    a lane is one sequence's until it ends or is preempted
    lane 1    | prefill 1            | decode 1         |    with what was cached, and what is computed
    counters    waiting and running sequences; used, cached and free blocks

The engine knows nothing of it: the parts of one that is watched become traced ones, by a change of class as layers become
their twins. After every step the file is a whole JSON array: each write begins where the closing bracket of the last stands.
`python -m nanovllm.trace` shows it as text or as a picture.
"""

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.batch import Batch
from nanovllm.engine.executor import Executor
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence

_END = b"\n]\n"


class Work(NamedTuple):
    """What a step computes of one sequence."""

    lane: int
    request_id: int
    start: int  # the tokens before it are in the cache
    num_tokens: int
    num_prompt_tokens: int
    block_table: list[int]


class Timeline:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises ValueError if the file cannot be written."""
        self.end = 0  # of the last event in the file
        try:
            if os.path.exists(path) and not os.path.isfile(path):  # not even opened: a pipe would wait for its reader
                raise ValueError("it must be a regular file, whose end each step can replace")
            self.file = open(path, "wb", buffering=0)
            self._write(['[\n{"ph":"M","pid":1,"tid":0,"name":"thread_name","args":{"name":"steps"}}'])
        except (OSError, ValueError) as error:
            raise ValueError(f"trace={os.fspath(path)!r} cannot be written: {error}") from error
        self.origin = time.perf_counter()
        self.num_steps = 0
        self.tenants: list[list[int]] = []  # lane -> block table of the sequence that had it last
        self.clear()

    def clear(self) -> None:
        """Begin a step."""
        self.work: list[Work] = []
        self.spans: list[tuple[str, float, float]] = []  # name, start and duration in microseconds
        self.preempted: list[tuple[int, int]] = []  # lane, request id

    def watch(self, scheduler: Scheduler, model_runner: ModelRunner) -> None:
        """Record what these do from now on."""
        for part, traced in ((scheduler, _Scheduler), (model_runner, _ModelRunner), (model_runner.executor, _Executor)):
            part.__class__, part.timeline = traced, self

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.spans.append((name, (start - self.origin) * 1e6, (time.perf_counter() - start) * 1e6))

    def record(self, scheduler: Scheduler) -> None:
        """Write down the step that has come to its end. Once the file cannot be written, a warning says so and tracing ends."""
        if self.file.closed:
            return
        start = self.spans[0][1]
        end = (time.perf_counter() - self.origin) * 1e6
        where = f'"ts":{start:.1f},"dur":{end - start:.1f},"args":{{"step":{self.num_steps}'
        lanes: list[str] = []
        num_decodes = 0
        for lane, request_id, position, num_tokens, num_prompt_tokens, block_table in self.work:
            is_decode = num_tokens == 1 and position >= num_prompt_tokens
            num_decodes += is_decode
            while lane >= len(self.tenants):
                self.tenants.append([])
                name = f'"thread_name","args":{{"name":"lane {len(self.tenants) - 1}"}}'
                lanes.append(f'{{"ph":"M","pid":1,"tid":{len(self.tenants)},"name":{name}}}')
            num_cached = 0 if self.tenants[lane] is block_table else position
            self.tenants[lane] = block_table
            lanes.append(
                f'{{"ph":"X","pid":1,"tid":{lane + 1},"name":"{"decode" if is_decode else "prefill"} {request_id}",{where},'
                f'"request_id":{request_id},"start":{position},"num_tokens":{num_tokens},"num_cached_tokens":{num_cached},'
                f'"num_prompt_tokens":{num_prompt_tokens}}}}}'
            )
        for lane, request_id in self.preempted:
            lanes.append(
                f'{{"ph":"i","s":"t","pid":1,"tid":{lane + 1},"name":"preempted {request_id}","ts":{start:.1f},'
                f'"args":{{"step":{self.num_steps},"request_id":{request_id}}}}}'
            )
        num_tokens = sum(work.num_tokens for work in self.work)
        kind = "decode" if num_decodes == len(self.work) else "mixed" if num_decodes else "prefill"
        times = "".join(f',"{name}_ms":{duration / 1e3:.3f}' for name, _, duration in self.spans)
        step = (
            f'{{"ph":"X","pid":1,"tid":0,"name":"{kind}: {num_tokens} tokens",{where},"kind":"{kind}","num_tokens":{num_tokens},'
            f'"num_decode_tokens":{num_decodes},"num_prefill_tokens":{num_tokens - num_decodes}{times}}}}}'
        )
        spans = [
            f'{{"ph":"X","pid":1,"tid":0,"name":"{name}","ts":{since:.1f},"dur":{duration:.1f},"args":{{}}}}'
            for name, since, duration in self.spans
        ]
        blocks = scheduler.block_manager
        num_free = len(blocks.free_block_ids)
        counters = {
            "sequences": f'"waiting":{len(scheduler.waiting)},"running":{len(scheduler.running)}',
            "blocks": f'"used":{blocks.num_blocks - num_free},"cached":{blocks.num_reusable},'
            f'"free":{num_free - blocks.num_reusable}',
        }
        counts = [f'{{"ph":"C","pid":1,"name":"{name}","ts":{end:.1f},"args":{{{args}}}}}' for name, args in counters.items()]
        try:
            self._write(["", step, *spans, *lanes, *counts])  # in this order they are read
        except OSError as error:
            self.file.close()
            message = f"trace={self.file.name!r}: no steps are recorded from here on: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        self.num_steps += 1

    def _write(self, events: list[str]) -> None:
        """Append `events`. Raises OSError where the disk is full; the file is then what it was."""
        data = ",\n".join(events).encode()
        try:
            self._replace_end(data)
        except OSError:
            self._replace_end(b"")  # in the place of bytes that are there, which takes no room
            raise
        self.end += len(data)

    def _replace_end(self, data: bytes) -> None:
        self.file.seek(self.end)
        rest = memoryview(data + _END)
        while rest:  # a write may take only a part
            rest = rest[self.file.write(rest) :]
        self.file.truncate()  # what an interrupted step may have written


class _Scheduler(Scheduler):
    timeline: Timeline

    def schedule(self) -> list[Sequence]:
        self.timeline.clear()
        with self.timeline.span("schedule"):
            seqs = super().schedule()
        self.timeline.work = [
            Work(seq.lane, seq.seq_id, seq.num_computed_tokens, seq.num_scheduled_tokens, seq.num_prompt_tokens, seq.block_table)
            for seq in seqs
        ]
        return seqs

    def preempt(self, seq: Sequence) -> None:
        self.timeline.preempted.append((seq.lane, seq.seq_id))
        super().preempt(seq)

    def postprocess(self, seqs: list[Sequence], token_ids: list[int]) -> list[Sequence]:
        caught_up = super().postprocess(seqs, token_ids)
        self.timeline.record(self)
        return caught_up


class _ModelRunner(ModelRunner):
    timeline: Timeline

    def prepare_batch(self, seqs: list[Sequence]) -> Batch:
        with self.timeline.span("prepare"):
            return super().prepare_batch(seqs)

    def sample(self, logits: Tensor, seqs: list[Sequence]) -> tuple[list[int], list[dict[int, float] | None] | None]:
        with self.timeline.span("sample"):
            return super().sample(logits, seqs)


class _Executor(Executor):
    timeline: Timeline

    def run(self, batch: Batch) -> Tensor:
        with self.timeline.span("forward"):
            logits = super().run(batch)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # else it would be counted as the sampler's
            return logits
