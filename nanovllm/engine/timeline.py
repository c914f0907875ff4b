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
from pathlib import Path

from torch import Tensor, cuda

from nanovllm.batch import Batch
from nanovllm.config import Config
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import PrefillFirstScheduler, Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.models.decoder import ModelSpec

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
            self.file = open(
                path, "w+b", buffering=0
            )  # "+": or a pipe would be waited for; now `seek` refuses it
            self.file.write(
                b"[\n" + _encode(_event("M", 0, "thread_name", {"name": "steps"})).encode() + _END
            )
            self.file.seek(-len(_END), os.SEEK_END)
        except (OSError, ValueError) as error:
            raise ValueError(f"trace={os.fspath(path)!r} cannot be written: {error}") from error
        self.num_steps, self.origin = 0, time.perf_counter_ns()
        self.notes: dict[str, object] = {}  # of the last step; none if the next one starts over
        self.times: list[
            int
        ] = []  # when schedule, prepare, forward and sample began, and when sample ended
        self.events: list[_Args] = []

    def make_traced(self, scheduler_class: type[Scheduler]) -> type[Scheduler]:
        """A subclass that records its steps here."""
        return type("TracedScheduler", (_TracedScheduler, scheduler_class), {"timeline": self})

    def make_model_runner(self, config: Config, spec: ModelSpec, directory: Path) -> ModelRunner:
        """A ModelRunner that records here when the phases of a step begin."""
        return _TracedModelRunner(self, config, spec, directory)

    def begin(self, scheduler: Scheduler) -> None:
        """Write what the engine's steps have in common."""
        # For each lane: the event of a decode, and the position from which on there is more to tell.
        self.lanes: list[tuple[str, int]] = [("", 0)] * scheduler.max_num_seqs
        settings: _Args = {
            "num_blocks": scheduler.block_manager.num_blocks,
            "block_size": scheduler.block_manager.block_size,
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "enable_chunked_prefill": not isinstance(scheduler, PrefillFirstScheduler),
        }
        events = [_event("M", 0, "process_name", {"name": "nanovllm", **settings})]
        for lane in range(scheduler.max_num_seqs):
            events.append(_event("M", lane + 1, "thread_name", {"name": f"lane {lane}"}))
        self.write(_encode(events)[1:-1])

    def now(self) -> int:
        """In microseconds."""
        return (time.perf_counter_ns() - self.origin) // 1000

    def write_step(
        self, results: _Args, notes: _Args, shares: list[str], counters: dict[str, dict[str, int]]
    ) -> None:
        """Add a step, the sequences' shares of it, and the state that it has left behind. Notes stand there when they change."""
        begin, *_, end = self.times
        phases = list(zip(_PHASES, self.times, self.times[1:]))
        args = {"step": self.num_steps, "starts_over": not self.notes, **results}
        args |= {f"{name}_ms": (after - before) / 1e3 for name, before, after in phases}
        args |= {name: note for name, note in notes.items() if note != self.notes.get(name)}
        title = f"{results['kind']}: {results['num_tokens']} tokens"
        events = [_event("X", 0, title, args, ts=begin, dur=end - begin), *self.events]
        events += [
            _event("X", 0, name, {}, ts=before, dur=after - before)
            for name, before, after in phases
        ]
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
            warnings.warn(
                f"trace={self.file.name!r} ends here: {error}", RuntimeWarning, stacklevel=2
            )


def _event(phase: str, track: int, name: str, args: object, **when: int) -> _Args:
    return {"ph": phase, "pid": 1, "tid": track, "name": name, "args": args, **when}


class _TracedScheduler(Scheduler):
    timeline: Timeline  # a class attribute, see Timeline.make_traced

    def reset(self, seqs: list[Sequence]) -> None:
        self.timeline.notes = {}
        super().reset(seqs)

    def schedule(self) -> list[Sequence]:
        timeline = self.timeline
        timeline.times, timeline.events = [timeline.now()], []
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
        args = {"request_id": seq.seq_id, "blocks": list(seq.block_table), "is_nan": False}
        event = _event(
            "i", seq.lane + 1, f"preempted {seq.seq_id}", args, ts=self.timeline.times[-1]
        )
        self.timeline.events.append(event)
        super().preempt(seq)

    def postprocess(self, seqs: list[Sequence], samples: list[list[int]]) -> None:
        timeline, manager = self.timeline, self.block_manager
        timeline.times.append(timeline.now())
        queues = {
            "waiting_requests": [
                (seq.seq_id, len(seq.token_ids)) for seq in islice(self.waiting, _NUM_WAITING)
            ],
            "running_requests": [seq.seq_id for seq in self.running],
            "next_free_blocks": list(islice(manager.free_block_ids, _NUM_FREE)),
        }
        drafts: dict[Sequence, list[int]] = getattr(self, "drafts", {})
        shares = [self._describe(seq, drafts.get(seq, [])) for seq in seqs]
        tables = {
            seq: (list(seq.block_table), seq.num_computed_tokens + 1)
            for seq, draft in drafts.items()
            if draft
        }
        num_tokens = sum(seq.num_scheduled_tokens for seq in seqs)
        before = {name: getattr(self, name) for name in _COUNTS}
        super().postprocess(seqs, samples)
        counts = {name: getattr(self, name) - count for name, count in before.items()}
        num_prefills, num_decodes = counts["num_prefill_tokens"], counts["num_decode_tokens"]
        results = {
            "kind": "mixed"
            if num_prefills and num_decodes
            else "prefill"
            if num_prefills
            else "decode",
            "num_tokens": num_tokens,
            **counts,
            "drawn_token_ids": [token_id for token_ids in samples for token_id in token_ids],
            "accepted": [self._describe_draft(seq, *tables[seq]) for seq in seqs if seq in tables],
            "ended": [
                (seq.seq_id, {"finish_reason": seq.finish_reason})
                for seq in seqs
                if seq.finish_reason
            ],
        }
        num_free = len(manager.free_block_ids)
        num_reusable = sum(
            manager.blocks[block_id].hash != -1 for block_id in manager.free_block_ids
        )
        counters = {
            "sequences": {"waiting": len(self.waiting), "running": len(self.running)},
            "blocks": {
                "used": manager.num_blocks - num_free,
                "reusable": num_reusable,
                "empty": num_free - num_reusable,
            },
        }
        timeline.write_step(results, queues, shares, counters)

    def _describe(self, seq: Sequence, draft: list[int]) -> str:
        """The event of a sequence in this step, without its times. A decode within a block repeats the last event of its lane,
        because json.dumps for all of them would take too long."""
        table, start, count = (
            seq.block_table,
            seq.num_computed_tokens,
            seq.num_scheduled_tokens - len(draft),
        )
        is_new = seq in self.admitted
        decode, end = self.timeline.lanes[seq.lane]
        if not is_new and start < end and not draft:
            return decode
        size, num_left = (
            self.block_manager.block_size,
            len(seq.token_ids) - len(draft) - start - count,
        )
        event = f'{{"ph":"X","pid":1,"tid":{seq.lane + 1},"name":"%s {seq.seq_id}","args":'
        args: _Args = {
            "request_id": seq.seq_id,
            "num_tokens": count,
            "num_reused_tokens": start * is_new,
        }
        if is_new:
            decode = event % "decode" + _encode({**args, "num_tokens": 1, "num_reused_tokens": 0})
            args |= {
                "num_prompt_tokens": seq.num_prompt_tokens,
                "token_ids": seq.token_ids[: len(seq.token_ids) - len(draft)],
            }
        self.timeline.lanes[seq.lane] = decode, 0 if num_left else (start // size + 1) * size - 1
        args["num_left"], args["draft_token_ids"], args["blocks"] = (
            num_left,
            draft,
            table[0 if is_new else start // size :],
        )
        args["full_blocks"] = self._list_contents(
            seq, table, start // size, (start + count) // size
        )
        return event % ("decode" if seq.is_decode else "prefill") + _encode(args)

    def _describe_draft(self, seq: Sequence, table: list[int], start: int) -> tuple[int, _Args]:
        """The result of a draft: the number of accepted tokens, and the blocks that these have filled."""
        size, end = self.block_manager.block_size, max(start, len(seq.token_ids) - 1)
        blocks = self._list_contents(seq, table, start // size, end // size)
        return seq.seq_id, {"num_accepted_tokens": end - start, "accepted_blocks": blocks}

    def _list_contents(
        self, seq: Sequence, table: list[int], first: int, last: int
    ) -> list[tuple[int, str, str, str]]:
        """For full blocks: the id, the hash if the block is listed, and the hashes of this prefix and of the one before."""
        if not self.block_manager.enable_prefix_caching:
            return []
        contents = []
        for index in range(first, last):
            block = self.block_manager.blocks[table[index]]
            listed = f"{block.hash:032x}" if block.hash != -1 else ""
            parent = f"{seq.block_hashes[index - 1]:032x}" if index else ""
            contents.append((block.block_id, listed, f"{seq.block_hashes[index]:032x}", parent))
        return contents


class _TracedModelRunner(ModelRunner):
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
            cuda.synchronize(logits.device)  # or the forward pass would be measured as sampling
        times.append(self.timeline.now())
        return logits
