"""Reports to stderr, and a quiet end if the reader of a program's output stops."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress


def report(message: str) -> None:
    """Print a line about the engine or the server to stderr, if that is open."""
    if sys.stderr is not None:  # print would take stdout
        with suppress(OSError):  # the reader has ended, or the disk is full
            print(f"nanovllm: {message}", file=sys.stderr, flush=True)


def run_program(main: Callable[[], None]) -> None:
    """Run `main`. If the reader of its output stops early (`| head`), end the program."""
    try:
        main()
        print(end="", flush=True)
    except BrokenPipeError:
        os._exit(1)  # without the interpreter's own flush, which would raise again
