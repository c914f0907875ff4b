"""What the programs of this project (example.py, bench.py, `python -m nanovllm.trace`) owe to the terminal that they run in."""

import io
import os
import sys
from collections.abc import Callable


def run_program(main: Callable[[], None]) -> None:
    """Run `main`. Characters that the terminal lacks become "?"; a reader who leaves early (`| head`) ends the program."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        main()
        print(end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's own flush at the end
        sys.exit(1)
