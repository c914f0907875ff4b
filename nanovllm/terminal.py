"""What example.py, bench.py and `python -m nanovllm.trace` share."""

import os
from collections.abc import Callable


def run_program(main: Callable[[], None]) -> None:
    """Run `main`. A reader of its output who leaves early (`| head`) ends the program."""
    try:
        main()
        print(end="", flush=True)
    except BrokenPipeError:
        os._exit(1)  # without the interpreter's own flush
