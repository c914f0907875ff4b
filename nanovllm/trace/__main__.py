"""Show a trace, the file written by LLM(..., trace="trace.json"), with lanes as rows.

    python -m nanovllm.trace trace.json                    text, as many steps as fit
    python -m nanovllm.trace trace.json -o timeline.html   a page, of one trace or two

A letter names a request. It is upper case if a step prefills or recomputes a chunk of the request,
and lower case if it decodes.
"""

import argparse
import shutil
from pathlib import Path

from nanovllm.trace import read, render, save_page
from nanovllm.utils.helpers import run_program


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m nanovllm.trace",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "trace",
        type=Path,
        nargs="+",
        help="trace written by LLM(..., trace=...), one or, for a page, two",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write a page instead of text")
    args = parser.parse_args(argv)
    try:
        traces = [read(path) for path in args.trace]
        if args.output is not None:
            save_page(traces, args.output)
        elif len(traces) > 1:
            raise ValueError("only a page can show two traces: pass -o timeline.html")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if args.output is None:
        print(render(traces[0].steps, shutil.get_terminal_size((100, 24)).columns))


if __name__ == "__main__":
    run_program(main)
