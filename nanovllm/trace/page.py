"""Renders traces as one HTML page to walk through step by step. page.html is its template."""

import json
from pathlib import Path
from typing import Any

from nanovllm.engine.feature import Facts
from nanovllm.trace.step import TracedStep

# Rows omit these values and empty ones, because most work is a decode within a block.
_USUAL = {"kind": "decode", "num_tokens": 1}


def make_page(timelines: list[list[TracedStep]]) -> str:
    """Render one or two timelines as a self-contained HTML page."""
    runs = [
        {"settings": steps[0].settings, "steps": list(map(shorten, steps))} for steps in timelines
    ]
    # "<" could end the page's script, and a token's text can be "</script>".
    data = json.dumps(runs, separators=(",", ":")).replace("<", "\\u003c")
    return read_template().replace("TIMELINES", data)


def save_page(timelines: list[list[TracedStep]], path: str) -> None:
    """Write the page of `make_page`. Raises OSError if that fails."""
    Path(path).write_text(make_page(timelines), "utf-8")


def read_template() -> str:
    """Return page.html. The caller replaces TIMELINES by JSON, an empty list for a live page."""
    return Path(__file__).with_name("page.html").read_text("utf-8")


def shorten(step: TracedStep) -> Facts:
    """The step as page.html reads it.

    A row is [request_id, new_token_ids], and {lane, unusual values} if there are any.
    """
    rows: list[list[Any]] = []
    for lane, work in step.lanes.items():
        others = dict(work)
        row = [others.pop("request_id"), others.pop("new_token_ids")]
        unusual = {
            key: value for key, value in others.items() if value and value != _USUAL.get(key)
        }
        if unusual:
            row.append({"lane": lane, **unusual})
        rows.append(row)
    preempted = [{"lane": lane, **args} for lane, args in step.preempted.items()]
    return {**step.info, "rows": rows, "preempted": preempted}
