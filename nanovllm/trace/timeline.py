"""Writes the events of a trace (`LLM(..., trace="trace.json")`) in the Chrome trace event format.

    steps     | mixed: 13 tokens     | decode: 2 tokens |    with schedule, prepare, forward, sample
    lane 0    | decode 0             | decode 0         |    one sequence until it leaves the lane
    lane 1    | prefill 1            | decode 1         |    tokens that are computed and reused
    counters    waiting and running sequences; used, reusable and empty blocks

ui.perfetto.dev opens the file. The events' args also hold what the page of `python -m
nanovllm.trace` needs to draw the pool of blocks: token ids and texts, blocks, hashes of full
blocks, queues and the next free blocks. For a model with recurrent states they hold slots and
snapshots, and for structured outputs the tokens that may come next and those that the model
prefers. To keep the file small, a step has only the queues that have changed and the texts that are
new. A trace contains the prompts and the outputs.

A step is written when it ends. The file is a complete JSON array after every step, because each
write replaces the closing bracket. What happens in the engine is described by recorder.py.
"""

import json
import os
import time
from collections.abc import Callable
from typing import Any

from nanovllm.text.vocabulary import Vocabulary

Args = dict[str, Any]
Event = dict[str, Any]

PHASES = ("schedule", "prepare", "forward", "sample")
_END = b"\n]\n"
_encode = json.JSONEncoder(separators=(",", ":")).encode


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def make_event(phase: str, track: int, name: str, args: Args, **when: int) -> Event:
    return {"ph": phase, "pid": 1, "tid": track, "name": name, "args": args, **when}


class Timeline:
    """Measures the phases of a step and collects its events. A subclass writes them."""

    def __init__(self) -> None:
        self.origin = time.perf_counter_ns()
        self.num_steps = 0
        self.times: dict[str, int] = {}  # the start of this step, then the ends of its phases
        self.reset()

    def reset(self) -> None:
        """Record that the KV cache was emptied.

        The next step writes all its queues and texts, because an interrupt may have prevented the
        last step from being written.
        """
        self.is_reset = True
        self.queues: Args = {}  # as the last step wrote them
        self.named: set[int] = set()  # tokens whose texts are written

    def begin(self, settings: Args, vocabulary: Vocabulary, warn: Callable[[str], None]) -> None:
        """Write the engine's settings and the names of the lanes.

        `warn` is called with what the engine's caller should know.
        """
        self.warn = warn
        self.vocabulary = vocabulary
        events = [make_event("M", 0, "process_name", {"name": "nanovllm", **settings})]
        for lane in range(settings["max_num_seqs"]):
            events.append(make_event("M", lane + 1, "thread_name", {"name": f"lane {lane}"}))
        self.write(events)

    def start_step(self) -> None:
        self.times = {}
        self.mark_time("start")

    def mark_time(self, phase: str) -> None:
        """Record the end of a phase. If it ends several times, the last one counts.

        Times are in microseconds since the timeline was made.
        """
        self.times[phase] = (time.perf_counter_ns() - self.origin) // 1000

    @property
    def start(self) -> dict[str, int]:
        """When the step started, for events without a duration."""
        return {"ts": self.times["start"]}

    @property
    def span(self) -> dict[str, int]:
        """When the step started and how long it took, for the events that last as long."""
        return {**self.start, "dur": self.times["sample"] - self.times["start"]}

    def write_step(
        self,
        args: Args,
        queues: Args,
        lane_events: list[Event],
        counters: dict[str, dict[str, int]],
    ) -> None:
        """Write a step, the events of its lanes, and the counters after it.

        Of `queues`, and of the texts of its tokens, the step gets those that are not written yet.
        """
        args |= {"step": self.num_steps, "is_reset": self.is_reset}
        args["texts"] = self._name_tokens(lane_events)
        for name, queue in queues.items():
            if queue != self.queues.get(name):
                args[name] = queue
        title = f"{args['kind']}: {plural(args['num_tokens'], 'token')}"
        events = [make_event("X", 0, title, args, **self.span), *lane_events]
        start = self.times["start"]
        for name in PHASES:
            stop = self.times[name]
            args[f"{name}_ms"] = (stop - start) / 1e3
            events.append(make_event("X", 0, name, {}, ts=start, dur=stop - start))
            start = stop
        for name, numbers in counters.items():
            events.append(make_event("C", 0, name, numbers, ts=start))
        self.queues = queues
        self.is_reset = False
        self.num_steps += 1
        self.write(events)  # last, so that an interrupt that follows finds the state above

    def _name_tokens(self, lane_events: list[Event]) -> dict[int, str]:
        """Return the texts of tokens of this step that no earlier step has written."""
        if self.vocabulary.tokenizer is None:
            return {}
        shown: list[int] = []
        for event in lane_events:
            for name, value in event["args"].items():
                if name.endswith("token_ids"):
                    shown += value
        new = set(shown) - self.named
        self.named |= new
        return {token_id: self.vocabulary.name(token_id) for token_id in sorted(new)}

    def write(self, events: list[Event]) -> None:
        """Write events. All events of a step come in one call, that of the step first."""
        raise NotImplementedError

    def close(self) -> None:
        """End the recording."""


class TraceFile(Timeline):
    """Writes the events to a file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises ValueError if the file cannot be written."""
        super().__init__()
        title = make_event("M", 0, "thread_name", {"name": "steps"})
        try:
            # With "+", opening a named pipe does not wait for a reader, and `seek` rejects it.
            self.file = open(path, "w+b", buffering=0)
            self.file.write(b"[\n" + _encode(title).encode() + _END)
            self.file.seek(-len(_END), os.SEEK_END)
        except (OSError, ValueError) as error:
            raise ValueError(f"trace={os.fspath(path)!r} cannot be written: {error}") from error

    def write(self, events: list[Event]) -> None:
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
