"""Renders traces as one HTML page to walk through step by step. page.html is its template."""

import json
from pathlib import Path

from nanovllm.trace.step import Trace


def make_page(traces: list[Trace]) -> str:
    """Render one or two traces as a self-contained HTML page."""
    data = json.dumps(traces, default=vars, separators=(",", ":"))
    # "<" could end the page's script, and a token's text can be "</script>".
    return read_template().replace("TIMELINES", data.replace("<", "\\u003c"))


def save_page(traces: list[Trace], path: str) -> None:
    """Write the page of `make_page`. Raises OSError if that fails."""
    Path(path).write_text(make_page(traces), "utf-8")


def read_template() -> str:
    """Return page.html. The caller replaces TIMELINES by JSON, an empty list for a live page."""
    return Path(__file__).with_name("page.html").read_text("utf-8")
