"""Throughput of nanovllm, alone or compared with other engines on the same requests.

    python bench.py                                                a workload for this machine
    python bench.py --workload nano-vllm                           Qwen3-0.6B, 256 requests of 100
                                                                   to 1024 prompt and output tokens
    python bench.py --engine nanovllm vllm --repeat 3              alternating runs, and ratios
    python bench.py --engine nanovllm nano-vllm --nano-vllm PATH   beside a checkout of nano-vLLM
    python bench.py --request-rate 2 4 8                           latencies of the policies
    python bench.py --json                                         one line of JSON on stdout, or
                                                                   one for each part of a workload

The folder nanovllm/benchmark has the parts. `python -m nanovllm.kernels.bench` times
the attention kernels.
"""

import json
import sys
from argparse import ArgumentParser
from contextlib import ExitStack, redirect_stdout
from typing import Any

import torch

from nanovllm.benchmark import latency, report, roofline
from nanovllm.benchmark.arguments import list_variants, make_parser, open_model
from nanovllm.benchmark.engines import ENGINES, Engine, NanoVLLM
from nanovllm.benchmark.runs import time_runs
from nanovllm.benchmark.workloads import WORKLOADS
from nanovllm.utils.helpers import run_program


def main(argv: list[str] | None = None) -> None:
    if argv is None:
        argv = sys.argv[1:]
    parser = make_parser()
    args = parser.parse_args(argv)
    workload = WORKLOADS[args.workload]
    stdout = sys.stdout
    with redirect_stdout(sys.stderr if args.json else stdout):
        for title, line in workload.lines.items():
            print(f"\n{title}: bench.py {line}" if title else "")
            figures = measure(parser, [*line.split(), *argv])
            if args.json:
                print(json.dumps({"title": title, **figures}), file=stdout)
        if args.request_rate:
            print(f"\n{latency.READING}")
        else:
            print(f"\n{workload.reading}\n{roofline.NOTE}")


def measure(parser: ArgumentParser, arguments: list[str]) -> dict[str, Any]:
    """Measure what a command line asks for, with engines of its own. Return the figures."""
    args = parser.parse_args(arguments)
    with ExitStack() as stack:
        try:
            variants = list_variants(args)
            checkpoint, spec = open_model(args.model, variants)
            options, *_ = variants.values()
            # Before the engines take the memory that this needs.
            peak = roofline.measure_peak_rates(torch.device(options["device"]), spec.dtype)
            engines: dict[str, Engine] = {}
            for name, options in variants.items():
                make_engine = ENGINES.get(name, NanoVLLM)  # or a policy of nanovllm
                engines[name] = make_engine(checkpoint, options, args.nano_vllm)
                stack.callback(engines[name].exit)
        except (OSError, TypeError, ValueError) as error:
            parser.error(str(error))
        figures = report.describe(args, variants, engines, peak)
        runs = time_runs(args, spec, engines, peak)
        return figures | report.report_runs(runs, has_rates=bool(args.request_rate))


if __name__ == "__main__":
    run_program(main)
