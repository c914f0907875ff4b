"""Seconds until an engine is ready, on a quiet machine and beside a process that uses all cores.

    python -m nanovllm.benchmark.start --model qwen3-0.6b --quantization int4 --repeat 3

The options for an engine are those of bench.py. An engine starts in a new process, after its
imports. A first start is not counted, because it reads the files into memory and compiles the
kernels. The second figure should be at most twice the first, since half of each core is left. It is
much more if threads wait for each other often.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from typing import Any

import torch

from nanovllm import LLM
from nanovllm.benchmark.arguments import make_parser
from nanovllm.benchmark.setting import make_settings
from nanovllm.benchmark.workloads import choose_workload
from nanovllm.utils.helpers import run_program

# Uses a core until its parent ends, also if that is killed.
BUSY_LOOP = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"


def time_start(model: str, options: dict[str, Any]) -> float:
    """Return the seconds until an engine is ready."""
    start = time.perf_counter()
    with LLM(model, **options):
        return time.perf_counter() - start


def run_alone(model: str, options: dict[str, Any]) -> float:
    """As time_start, in a new process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(time_start, model, options).result()


def compare_loads(run: Callable[[], float], repeat: int) -> dict[str, float]:
    """Return the median of the seconds that `run` returns, on a quiet and on a busy machine."""
    run()
    quiet = statistics.median([run() for _ in range(repeat)])
    with ExitStack() as stack:
        for _ in range(torch.get_num_threads()):
            process = subprocess.Popen([sys.executable, "-c", BUSY_LOOP])
            stack.callback(process.wait)
            stack.callback(process.kill)  # callbacks run in reverse order
        busy = statistics.median([run() for _ in range(repeat)])
    return {"start_quiet_seconds": quiet, "start_busy_seconds": busy}


def main(argv: list[str] | None = None) -> None:
    parser = make_parser()
    parser.description = "Measure how long an engine takes to start."
    args = parser.parse_args(argv)
    with TemporaryDirectory() as scratch:
        try:
            setting, *others = make_settings(args, choose_workload(args), scratch).values()
            if others or args.engine != ["nanovllm"] or args.request_rate:
                raise ValueError("give one --model, and no --engine, --workload or --request-rate")
        except (OSError, TypeError, ValueError) as error:
            parser.error(str(error))
        figures = compare_loads(lambda: run_alone(setting.model, setting.options), args.repeat)
    if args.json:
        print(json.dumps(figures))
        return
    for name, seconds in figures.items():
        print(f"{name}: {seconds:.2f}")


if __name__ == "__main__":
    run_program(main)
