"""Converts the events that timeline.py writes to steps, which text and page show."""

import json
from pathlib import Path

from nanovllm.engine.feature import Facts
from nanovllm.trace.step import TracedStep
from nanovllm.utils.checks import naming


def read(path: str | Path) -> list[TracedStep]:
    """Read the steps of a trace.

    Raises ValueError for an invalid trace, OSError for an unreadable file.
    """
    reader = Reader()
    content = Path(path).read_bytes()
    with naming(f"{path} is not a nanovllm trace, or it is truncated", Exception):
        for event in json.loads(content):
            reader.add(event)
    if not reader.steps:
        raise ValueError(f"{path} contains no steps")
    return reader.steps


class Reader:
    """Collects steps from the events of a trace. The live page gives it events as they happen."""

    def __init__(self) -> None:
        self.steps: list[TracedStep] = []
        self.settings: Facts = {}

    def add(self, event: Facts) -> None:
        kind = event["cat"]
        facts = event["args"]
        lane = event["tid"] - 1
        if kind == "settings":
            self.settings.update(facts)
        elif kind == "step":
            self.steps.append(TracedStep(facts, {}, {}, self.settings))
        elif kind == "work":
            self.steps[-1].lanes[lane] = facts
        elif kind == "preemption":
            self.steps[-1].preempted[lane] = facts
