"""Writes a trace (`LLM(..., trace="trace.json")`) as a file in the Chrome trace event format.

    steps     | mixed: 13 tokens     | decode: 2 tokens |    with schedule, prepare, forward, sample
    lane 0    | decode 0             | decode 0         |    one sequence until it leaves the lane
    lane 1    | prefill 1            | decode 1         |    tokens that are computed and reused
    counters    waiting and running sequences; used, reusable and empty blocks of each pool

ui.perfetto.dev opens the file. The category of an event ("cat") says what it is. Its args are the
fields that step.py explains, so that reader.py can restore them. A trace contains the prompts and
the outputs.

A step is written when it ends. The file is a complete JSON array after every step, because each
write replaces the closing bracket.
"""

import json
import os

from nanovllm.engine.feature import Facts
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.trace.recorder import Recorder
from nanovllm.trace.step import TracedStep

# How the format draws the categories of events ("ph"). All others have a duration: "X".
_DRAWN = {"settings": "M", "track": "M", "preempted": "i", "counters": "C"}
_END = b"\n]\n"
_encode = json.JSONEncoder(separators=(",", ":")).encode


def make_event(category: str, track: int, name: str, facts: Facts, **when: int) -> Facts:
    return {
        "cat": category,
        "ph": _DRAWN.get(category, "X"),
        "pid": 1,
        "tid": track,
        "name": name,
        "args": facts,
        **when,
    }


def make_events(step: TracedStep) -> list[Facts]:
    """Return the events of a step, that of the whole step first."""
    facts = {**vars(step)}
    del facts["work"]  # each work has its own event
    start = end = step.start_us
    events: list[Facts] = []
    for phase in ("schedule", "prepare", "forward", "sample"):
        duration = round(facts[f"{phase}_ms"] * 1e3)
        events.append(make_event("phase", 0, phase, {}, ts=end, dur=duration))
        end += duration
    whole = {"ts": start, "dur": end - start}
    noun = "token" if step.num_tokens == 1 else "tokens"
    name = f"{step.kind}: {step.num_tokens} {noun}"
    events.insert(0, make_event("step", 0, name, facts, **whole))
    for work in step.work:
        name = f"{work.kind} {work.request_id}"
        events.append(make_event(work.kind, work.lane + 1, name, vars(work), **whole))
    for name in ("sequences", "blocks"):  # as the step leaves them
        events.append(make_event("counters", 0, name, facts[name], ts=end))
    if "window_pool" in step.features:  # the second pool during the step
        pool = step.features["window_pool"]
        events.append(make_event("counters", 0, "window blocks", pool, ts=start))
    return events


class TraceFile(Recorder):
    """Records the steps in a file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises ValueError if the file cannot be written."""
        first = _encode(make_event("track", 0, "thread_name", {"name": "steps"}))
        try:
            # With "+", opening a named pipe does not wait for a reader, and `seek` rejects it.
            self.file = open(path, "w+b", buffering=0)
            self.file.write(b"[\n" + first.encode() + _END)
            self.file.seek(-len(_END), os.SEEK_END)
        except (OSError, ValueError) as error:
            raise ValueError(f"trace={os.fspath(path)!r} cannot be written: {error}") from error

    def start(self, engine: LLMEngine) -> bool:
        """Write the engine's settings and the names of the lanes."""
        is_used = super().start(engine)
        self.warnings = engine.warnings
        settings = self.trace.settings
        events = [make_event("settings", 0, "process_name", {"name": "nanovllm", **settings})]
        for lane in range(settings["max_num_seqs"]):
            events.append(make_event("track", lane + 1, "thread_name", {"name": f"lane {lane}"}))
        self._append(events)
        return is_used

    def write(self, step: TracedStep) -> None:
        self._append(make_events(step))

    def _append(self, events: list[Facts]) -> None:
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
            self.warnings.append(
                f"trace={self.file.name!r} is incomplete, recording stopped: {error}"
            )

    def exit(self) -> None:
        self.file.close()
