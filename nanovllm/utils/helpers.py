"""Small helpers that several folders share."""

import ast
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from nanovllm.utils.checks import naming


def cdiv(a: int, b: int) -> int:
    """Divide and round up."""
    return -(-a // b)


def as_list(value: Any) -> list[Any]:
    """Return a value of JSON that can be a list, a single item or null as a list."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def report(message: str) -> None:
    """Print a line about the engine or the server to stderr, if that is open."""
    if sys.stderr is not None:  # print would take stdout
        with suppress(OSError):  # the reader has ended, or the disk is full
            print(f"nanovllm: {message}", file=sys.stderr, flush=True)


# For messages that would be the same for each step, each update, or each engine of this process.
report_once = cache(report)


def run_program(main: Callable[[], None]) -> None:
    """Run `main`. If the reader of its output stops early (`| head`), end the program."""
    try:
        main()
        print(end="", flush=True)
    except BrokenPipeError:
        os._exit(1)  # without the interpreter's own flush, which would raise again


def parse_value(text: str) -> object:
    """Read a value of a command line: a Python literal, or else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file. Raises ValueError, naming the file, if there is none."""
    with naming(path, OSError, ValueError, RecursionError):
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError(f"expected a JSON object, found {type(content).__name__}")
    return content
