"""Renders traces as one HTML page to walk through step by step. page.html is its template."""

import json
from pathlib import Path
from typing import Any

from nanovllm.trace.reader import Step

# A decode within a block. Rows omit these values, because most work is such a decode.
_COMMON_WORK = {
    "kind": "decode",
    "num_tokens": 1,
    "num_reused_tokens": 0,
    "num_accepted_tokens": 0,
    "draft_token_ids": [],
    "preferred_token_ids": [],
    "num_allowed_tokens": 0,
    "allowed_token_ids": [],
    "slots": [],
    "snapshot": "",
    "blocks": [],
    "full_blocks": [],
    "accepted_blocks": [],
    "finish_reason": None,
}


def make_page(timelines: list[list[Step]]) -> str:
    """Render one or two timelines as a self-contained HTML page."""
    runs: list[dict[str, Any]] = []
    for steps in timelines:
        shortened = [shorten(step) for step in steps]
        runs.append({"settings": steps[0].settings, "steps": shortened})
    # "<" could end the page's script, and a token's text can be "</script>".
    data = json.dumps(runs, separators=(",", ":")).replace("<", "\\u003c")
    return read_template().replace("TIMELINES", data)


def read_template() -> str:
    """Return page.html. The caller replaces TIMELINES by JSON, an empty list for a live page."""
    template = Path(__file__).with_name("page.html").read_text("utf-8")
    return template.replace("COMMON_WORK", json.dumps(_COMMON_WORK))


def shorten(step: Step) -> dict[str, Any]:
    """The step as page.html reads it.

    A row is [request_id, new_token_ids], and {lane, uncommon values} if there are any.
    """
    rows: list[list[Any]] = []
    for lane, work in step.lanes.items():
        uncommon: dict[str, Any] = {}
        for name, value in work.items():
            if _COMMON_WORK.get(name) != value:
                uncommon[name] = value
        row = [uncommon.pop("request_id"), uncommon.pop("new_token_ids")]
        if uncommon:
            row.append({"lane": lane, **uncommon})
        rows.append(row)
    preempted = [{"lane": lane, **args} for lane, args in step.preempted.items()]
    return {**step.info, "rows": rows, "preempted": preempted}
