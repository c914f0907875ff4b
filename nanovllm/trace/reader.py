"""Converts the events that timeline.py writes to steps, which text, plot and page show."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK_STATES = ("used", "reusable", "empty")


@dataclass
class Step:
    """One step of a trace: counters, queues, and the work of each lane."""

    # Kind, numbers of tokens, milliseconds, the queues when they change, counters after the step.
    info: dict[str, Any]
    settings: dict[str, Any]  # the engine's, from the first event
    lanes: dict[int, dict[str, Any]] = field(default_factory=dict)  # lane -> kind, tokens, result
    preempted: dict[int, dict[str, Any]] = field(default_factory=dict)  # lane -> request_id, blocks


def read(path: str | Path) -> list[Step]:
    """Read the steps of a trace.

    Raises ValueError for an invalid trace, OSError for an unreadable file.
    """
    reader = Reader()
    try:
        for event in json.loads(Path(path).read_bytes()):
            reader.add(event)
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        problem = f"{path} is not a nanovllm trace, or it is truncated"
        raise ValueError(f"{problem}: {error!r}") from error
    if not reader.steps:
        raise ValueError(f"{path} contains no steps")
    return reader.steps


class Reader:
    """Collects steps from the events of a trace. The live page gives it events as they happen."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.settings: dict[str, Any] = {}

    def add(self, event: dict[str, Any]) -> None:
        lane = event["tid"] - 1
        args = event["args"]
        kind = event["name"].split()[0]
        if "kind" in args:  # a step begins
            self.steps.append(Step(args, self.settings))
        elif "block_size" in args:
            self.settings.update(args)
        elif event["ph"] == "C":
            self.steps[-1].info.update(args)
        elif kind == "preempted":
            self.steps[-1].preempted[lane] = args
        elif kind in ("prefill", "decode"):
            self.steps[-1].lanes[lane] = {"kind": kind, **args}
