"""Reads the file that timeline.py writes. Events that repeat facts for Perfetto are skipped."""

import json
from pathlib import Path

from nanovllm.trace.step import Trace, TracedStep, Work
from nanovllm.utils.checks import naming


def read(path: str | Path) -> Trace:
    """Read a trace.

    Raises ValueError for an invalid trace, OSError for an unreadable file.
    """
    trace = Trace({}, [])
    content = Path(path).read_bytes()
    with naming(f"{path} is not a nanovllm trace, or it is truncated", Exception):
        for event in json.loads(content):
            facts = event["args"]
            match event["cat"]:
                case "settings":
                    trace.settings = facts
                case "step":
                    trace.steps.append(TracedStep(**facts, work=[]))
                case "prefill" | "decode" | "preempted":
                    trace.steps[-1].work.append(Work(**facts))
    if not trace.steps:
        raise ValueError(f"{path} contains no steps")
    return trace
