"""Writes the events of a trace (`LLM(..., trace="trace.json")`) in the Chrome trace event format.

    steps     | mixed: 13 tokens     | decode: 2 tokens |    with schedule, prepare, forward, sample
    lane 0    | decode 0             | decode 0         |    one sequence until it leaves the lane
    lane 1    | prefill 1            | decode 1         |    tokens that are computed and reused
    counters    waiting and running sequences; used, reusable and empty blocks of each pool

ui.perfetto.dev opens the file. The category of an event ("cat") says what it is. Its args also hold
what the page of `python -m nanovllm.trace` needs to draw the pool of blocks: token ids and texts,
blocks, hashes of full blocks, queues and the next free blocks. For a model with recurrent states
they hold slots and snapshots, and for structured outputs the tokens that may come next and those
that the model prefers. For a model with windows they hold the blocks of a sequence in the second
pool, from logical block window_start on, while the step runs. Its end releases what the window has
left. To keep the file small, a step has only the texts that are new. A trace contains the prompts
and the outputs.

A step is written when it ends. The file is a complete JSON array after every step, because each
write replaces the closing bracket. What happens in the engine is described by recorder.py.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator

from nanovllm.engine.feature import Facts
from nanovllm.text.vocabulary import Vocabulary
from nanovllm.trace.step import BLOCK_STATES, TracedStep

Event = Facts

PHASES = ("schedule", "prepare", "forward", "sample")
COUNTERS = {"sequences": ("waiting", "running"), "blocks": BLOCK_STATES}
# How the format draws the categories of events ("ph"). All others have a duration: "X".
_DRAWN = {"settings": "M", "track": "M", "preemption": "i", "counters": "C"}
_END = b"\n]\n"
_encode = json.JSONEncoder(separators=(",", ":")).encode


def make_event(category: str, track: int, name: str, facts: Facts, **when: int) -> Event:
    return {
        "cat": category,
        "ph": _DRAWN.get(category, "X"),
        "pid": 1,
        "tid": track,
        "name": name,
        "args": facts,
        **when,
    }


class Timeline:
    """Measures the phases of a step and collects its events. A subclass writes them."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.times: dict[str, int] = {}  # the start of this step, then the ends of its phases
        self.reset()

    def reset(self) -> None:
        """Record that the KV cache was emptied.

        The next step writes all its texts, because an interrupt may have prevented the last step
        from being written.
        """
        self.is_reset = True  # until the next step is written
        self.named: set[int] = set()  # tokens whose texts are written

    def begin(self, settings: Facts, vocabulary: Vocabulary, warn: Callable[[str], None]) -> None:
        """Write the engine's settings and the names of the lanes.

        `warn` is called with what the engine's caller should know.
        """
        self.warn = warn
        self.vocabulary = vocabulary
        events = [make_event("settings", 0, "process_name", {"name": "nanovllm", **settings})]
        for lane in range(settings["max_num_seqs"]):
            events.append(make_event("track", lane + 1, "thread_name", {"name": f"lane {lane}"}))
        self.write(events)

    def mark_time(self, phase: str) -> None:
        """Record the end of a phase in microseconds, or "start". The last call for it counts."""
        self.times[phase] = time.perf_counter_ns() // 1000

    def write_step(self, step: TracedStep) -> None:
        """Write a step as events. Of its texts, only those that are new.

        Its work and its preemptions get names from their `kind` and `request_id`.
        """
        start = self.times["start"]
        end = self.times["sample"]
        phases = list(self._make_phases())
        events = [self._make_step(step, phases, ts=start, dur=end - start), *phases]
        for lane, work in step.lanes.items():
            name = f"{work['kind']} {work['request_id']}"
            events.append(make_event("work", lane + 1, name, work, ts=start, dur=end - start))
        for lane, seq in step.preempted.items():
            name = f"preempted {seq['request_id']}"
            events.append(make_event("preemption", lane + 1, name, seq, ts=start))
        for name, counters in COUNTERS.items():  # the state after the step
            numbers = {each: step.info[each] for each in counters}
            events.append(make_event("counters", 0, name, numbers, ts=end))
        if "window_pool" in step.info:  # the second pool during the step
            numbers = step.info["window_pool"]
            events.append(make_event("counters", 0, "window blocks", numbers, ts=start))
        self.is_reset = False
        self.num_steps += 1
        self.write(events)  # last, so that an interrupt that follows finds the state above

    def _make_phases(self) -> Iterator[Event]:
        start = self.times["start"]
        for name in PHASES:
            end = self.times[name]
            yield make_event("phase", 0, name, {}, ts=start, dur=end - start)
            start = end

    def _make_step(self, step: TracedStep, phases: list[Event], **when: int) -> Event:
        info: Facts = {"step": self.num_steps, "is_reset": self.is_reset}
        info["texts"] = self._name_tokens(step.lanes.values())
        info |= step.info
        for phase in phases:
            info[f"{phase['name']}_ms"] = phase["dur"] / 1e3
        noun = "token" if info["num_tokens"] == 1 else "tokens"
        return make_event("step", 0, f"{info['kind']}: {info['num_tokens']} {noun}", info, **when)

    def _name_tokens(self, works: Iterable[Facts]) -> dict[int, str]:
        """Return the texts of tokens of this step that no earlier step has written."""
        if self.vocabulary.tokenizer is None:
            return {}
        shown: set[int] = set()
        for work in works:
            for name, value in work.items():
                if name.endswith("token_ids"):
                    shown.update(value)
        new = shown - self.named
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
        first = _encode(make_event("track", 0, "thread_name", {"name": "steps"}))
        try:
            # With "+", opening a named pipe does not wait for a reader, and `seek` rejects it.
            self.file = open(path, "w+b", buffering=0)
            self.file.write(b"[\n" + first.encode() + _END)
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
            self.warn(f"trace={self.file.name!r} is incomplete, recording stopped: {error}")

    def close(self) -> None:
        self.file.close()
