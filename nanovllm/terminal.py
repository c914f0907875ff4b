"""What the programs of this project (example.py, bench.py, `python -m nanovllm.trace`) owe to the terminal that they run in."""

import codecs
import io
import os
import sys
from collections.abc import Callable

_PLAIN = str.maketrans("│▁▂▃▄▅▆▇█", "|12345678")  # the timeline's characters


def run_program(main: Callable[[], None]) -> None:
    """Run `main`. Characters that the terminal lacks are replaced; a reader who leaves early (`| head`) ends the program."""
    codecs.register_error("nanovllm", _replace)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="nanovllm")
    try:
        main()
        print(end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's own flush at the end
        sys.exit(1)


def _replace(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return error.object[error.start : error.end].translate(_PLAIN).encode("ascii", "replace").decode(), error.end
