"""Throughput of nanovllm, alone or compared with transformers and vLLM on the same requests.

    python bench.py                                            a workload for this machine
    python bench.py --engine nanovllm transformers --repeat 3  alternating runs, ratios of medians
    python bench.py --engine nanovllm --json                   one line of JSON, the rest on stderr
    python bench.py --request-rate 2 4 8                       latencies of the scheduling policies

This file has the workload and the timing. The folder nanovllm/benchmark has the rest.
Loading and warm-up are not timed. Every run has different token ids, so that no prefix cache can
reuse an earlier run. `python -m nanovllm.kernels.bench` times single kernels.
"""

import json
import random
import sys
import time
from argparse import Namespace
from contextlib import redirect_stdout
from tempfile import TemporaryDirectory

from nanovllm.benchmark import latency, roofline
from nanovllm.benchmark.arguments import make_parser
from nanovllm.benchmark.engines import Engine, Request, start_engines
from nanovllm.benchmark.report import Figures, Table, describe
from nanovllm.benchmark.setting import make_setting
from nanovllm.utils.terminal import run_program


def make_requests(args: Namespace, vocab_size: int, run: int) -> list[Request]:
    """Make the requests of one run. Runs have the same lengths and different token ids."""
    highest = min(10000, vocab_size - 1)
    # Drawn in the order of nano-vLLM's bench.py, so that lengths equal those of its results.
    rng = random.Random(args.seed)
    prompt_lens: list[int] = []
    for _ in range(args.num_seqs):
        prompt_lens.append(rng.randint(*args.input_len))
        for _ in range(prompt_lens[-1]):
            rng.randint(0, highest)
    output_lens = [rng.randint(*args.output_len) for _ in prompt_lens]
    rng = random.Random(f"seed {args.seed}, run {run}")
    prefix = [rng.randint(0, highest) for _ in range(args.shared_prefix)]
    requests: list[Request] = []
    for prompt_len, output_len in zip(prompt_lens, output_lens):
        prompt = [rng.randint(0, highest) for _ in range(prompt_len)]
        requests.append(Request(prefix + prompt, output_len))
    return requests


def time_run(name: str, engine: Engine, requests: list[Request]) -> float:
    """Submit all requests. Return the seconds until the last one has finished."""
    start = time.perf_counter()
    outputs = engine.run(requests)
    seconds = time.perf_counter() - start
    for request, output in zip(requests, outputs, strict=True):
        if len(output) != request.num_tokens:
            problem = f"a request for {request.num_tokens} tokens returned {len(output)}"
            raise RuntimeError(f"{name}: {problem}")
    return seconds


def compare(engines: dict[str, Engine], runs: list[list[Request]], table: Table) -> Figures:
    """Time the engines in turn, so that a change of the machine's speed affects them all."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for number, requests in enumerate(runs, start=1):
        for name, engine in engines.items():
            seconds = time_run(name, engine, requests)
            times[name].append(seconds)
            table.print_row(f"{name} {number}", seconds, engine.stats)
    return table.summarize(engines, times)


def main(argv: list[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    with TemporaryDirectory() as scratch, redirect_stdout(sys.stderr if args.json else sys.stdout):
        try:
            setting = make_setting(args, scratch)
            # Before the engines take the memory that this needs.
            peak = roofline.measure_peak_rates(setting.device, setting.spec.dtype)
            engines = start_engines(args.engine, setting)
        except (OSError, TypeError, ValueError) as error:
            parser.error(str(error))
        numbers = range(1 + (len(args.request_rate) if args.request_rate else args.repeat))
        warm_up, *runs = [make_requests(args, setting.spec.vocab_size, run) for run in numbers]
        for engine in engines.values():
            engine.run([Request(prompt, min(num_tokens, 8)) for prompt, num_tokens in warm_up[:8]])
        figures = describe(args, setting, engines, peak)
        if args.request_rate:
            figures |= latency.compare_policies(args, engines, runs)
        else:
            table = Table(setting, runs[0], args.shared_prefix, peak)
            figures |= compare(engines, runs, table)
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    run_program(main)
