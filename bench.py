"""Throughput of nanovllm, alone or compared with other engines on the same requests.

    python bench.py                                                a workload for this machine
    python bench.py --workload nano-vllm                           Qwen3-0.6B, 256 requests of 100
                                                                   to 1024 prompt and output tokens
    python bench.py --engine nanovllm vllm --repeat 3              alternating runs, and ratios
    python bench.py --engine nanovllm nano-vllm --nano-vllm PATH   beside a checkout of nano-vLLM
    python bench.py --request-rate 2 4 8                           latencies of the policies
    python bench.py --json                                         one line of JSON on stdout

The folder nanovllm/benchmark has the parts. `python -m nanovllm.kernels.bench` times kernels.
"""

import json
import sys
from contextlib import redirect_stdout
from tempfile import TemporaryDirectory

from nanovllm.benchmark import roofline
from nanovllm.benchmark.arguments import make_parser
from nanovllm.benchmark.engines import start_engines
from nanovllm.benchmark.report import describe, report_memory
from nanovllm.benchmark.runs import time_case
from nanovllm.benchmark.setting import make_settings
from nanovllm.benchmark.workloads import choose_workload
from nanovllm.utils.helpers import run_program


def main(argv: list[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    with TemporaryDirectory() as scratch, redirect_stdout(sys.stderr if args.json else sys.stdout):
        try:
            workload = choose_workload(args)
            settings = make_settings(args, workload, scratch)
            setting, *_ = settings.values()
            # Before the engines take the memory that this needs.
            peak = roofline.measure_peak_rates(setting.device, setting.spec.dtype)
            engines = start_engines(settings)
        except (OSError, TypeError, ValueError) as error:
            parser.error(str(error))
        figures = describe(args, settings, engines, peak)
        tests = {case.title: time_case(case, settings, engines, peak) for case in args.cases}
        figures |= tests[""] if "" in tests else {"tests": tests}
        if not args.request_rate:
            print(f"\n{workload.reading}\n{roofline.NOTE}")
        figures |= report_memory()
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    run_program(main)
