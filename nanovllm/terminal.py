"""Runs the main functions of programs that print tables and timelines."""

import os
from collections.abc import Callable


def run_program(main: Callable[[], None]) -> None:
    """Run `main`. If the reader of its output stops early (`| head`), end the program."""
    try:
        main()
        print(end="", flush=True)
    except BrokenPipeError:
        os._exit(1)  # without the interpreter's own flush, which would raise again
