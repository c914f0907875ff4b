"""Throughput of nanovllm, alone or compared with other engines on the same requests.

    python bench.py                                            a workload for this machine
    python bench.py --engine nanovllm transformers --repeat 3  alternating runs, ratios of medians
    python bench.py --engine nano-vllm nanovllm --nano-vllm PATH  beside a checkout of nano-vLLM
    python bench.py --engine nanovllm --json                   one line of JSON, the rest on stderr
    python bench.py --request-rate 2 4 8                       latencies of the scheduling policies
    python bench.py --workload llama-bench                     figures that other projects publish

This file has the timing. The folder nanovllm/benchmark has the rest.
Loading and warm-up are not timed. Every run has different token ids, so that no prefix cache can
reuse an earlier run. `python -m nanovllm.kernels.bench` times single kernels.
"""

import json
import sys
import time
from argparse import Namespace
from contextlib import redirect_stdout
from itertools import product
from tempfile import TemporaryDirectory

from nanovllm.benchmark import latency, roofline
from nanovllm.benchmark.arguments import make_parser
from nanovllm.benchmark.engines import Engine, start_engines
from nanovllm.benchmark.memory import PeakMemory
from nanovllm.benchmark.report import Figures, Table, describe, plot_decode, report_bandwidth
from nanovllm.benchmark.roofline import PeakRates
from nanovllm.benchmark.setting import Setting, make_settings
from nanovllm.benchmark.workloads import DEPTHS, Request, choose_workload, make_requests
from nanovllm.utils.helpers import run_program


def time_run(name: str, engine: Engine, requests: list[Request]) -> float:
    """Submit all requests. Return the seconds until the last one has finished."""
    with PeakMemory() as memory:
        start = time.perf_counter()
        outputs = engine.run(requests)
        seconds = time.perf_counter() - start
    engine.stats |= memory.figures
    for request, output in zip(requests, outputs, strict=True):
        if len(output) != request.num_tokens:
            problem = f"a request for {request.num_tokens} tokens returned {len(output)}"
            raise RuntimeError(f"{name}: {problem}")
    return seconds


def measure(
    case: Namespace, settings: dict[str, Setting], engines: dict[str, Engine], peak: PeakRates
) -> Figures:
    """Time the runs of a case, or with --request-rate the latencies of its requests."""
    numbers = range(1 + (len(case.request_rate) if case.request_rate else case.repeat))
    vocab_size = min(setting.spec.vocab_size for setting in settings.values())
    warm_up, *runs = [make_requests(case, vocab_size, run) for run in numbers]
    for engine in engines.values():
        engine.run([Request(prompt[case.cached_prefix :], min(n, 8)) for prompt, n in warm_up[:8]])
    if case.request_rate:
        return latency.compare_policies(case, engines, runs)
    table = Table(case, settings, runs[0], peak)
    # In turn, so that a change of the machine's speed affects all engines.
    for requests, (name, engine) in product(runs, engines.items()):
        # The second request leaves the snapshot of a model with recurrent states.
        for _ in range(2 if case.cached_prefix else 0):
            engine.run([Request(requests[0].prompt[: case.cached_prefix], 1)])
        table.add_run(name, time_run(name, engine, requests), engine.stats)
    return table.summarize()


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
        tests = {case.title: measure(case, settings, engines, peak) for case in args.cases}
        figures |= tests[""] if "" in tests else {"tests": tests}
        if not args.request_rate:
            print(f"\n{workload.reading}\n{roofline.NOTE}")
            if args.output:
                plot_decode(tests, DEPTHS, args.output)
        figures |= report_bandwidth(setting.device, peak)
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    run_program(main)
