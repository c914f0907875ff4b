"""Throughput of nanovllm, alone or compared with transformers and vLLM on the same requests.

    python bench.py                                            a workload for this machine
    python bench.py --engine nanovllm transformers --repeat 3  alternating runs, ratios of medians
    python bench.py --engine nanovllm --json                   one line of JSON, the rest on stderr
    python bench.py --request-rate 2 4 8                       latencies of the scheduling policies

Without --request-rate, a run is one batch of requests, all submitted at the start and timed until
the last one finishes.
Loading and warm-up are not timed. Every run has different token ids, so that no prefix cache can
reuse an earlier run. Times are compared with the roofline of this machine, the minimum time for the
necessary memory traffic and FLOPs at measured peak rates. `python -m nanovllm.kernels.bench` times
single kernels.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

from nanovllm.benchmark import latency, report, roofline
from nanovllm.benchmark.arguments import find_policies, make_parser, make_setting
from nanovllm.benchmark.engines import ENGINES, Engine, NanoVLLM, Request, Setting
from nanovllm.utils.terminal import run_program

WORKLOAD = ("num_seqs", "input_len", "output_len", "shared_prefix", "temperature", "seed")


def make_requests(args: argparse.Namespace, vocab_size: int, run: int) -> list[Request]:
    """Make the requests of one run. Runs have the same lengths and different token ids."""
    highest = min(10000, vocab_size - 1)
    # Drawn in the order of nano-vLLM's bench.py, so that the lengths equal those of its published
    # results.
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
    """Return the seconds of a run. Raises RuntimeError if an output has the wrong length."""
    start = time.perf_counter()
    outputs = engine.run(requests)
    seconds = time.perf_counter() - start
    for request, token_ids in zip(requests, outputs, strict=True):
        if len(token_ids) != request.num_tokens:
            problem = f"a request for {request.num_tokens} tokens returned {len(token_ids)}"
            raise RuntimeError(f"{name}: {problem}")
    return seconds


def prepare(
    args: argparse.Namespace, setting: Setting, engines: Mapping[str, Engine]
) -> dict[str, Any]:
    """Warm the engines up with a few requests. Print and return a description of the run."""
    requests = make_requests(args, setting.hf_config.vocab_size, run=0)[:8]
    for engine in engines.values():
        engine.run([Request(prompt, min(num_tokens, 8)) for prompt, num_tokens in requests])
    described: dict[str, Any] = {
        "hardware": report.describe_hardware(setting.device),
        "versions": report.find_versions(dict.fromkeys(["torch", "transformers", *args.engine])),
        "model": args.model,
        "options": setting.options,
        "workload": {name: getattr(args, name) for name in WORKLOAD},
        **{name: engine.description for name, engine in engines.items()},
    }
    report.print_setting(described)
    return described


def compare_policies(
    args: argparse.Namespace, setting: Setting, engines: dict[str, NanoVLLM]
) -> dict[str, Any]:
    """Serve the same requests with each policy at each rate, and print a table of latencies."""
    described = prepare(args, setting, engines)
    latency.print_head()
    rows: list[dict[str, Any]] = []
    for run, rate in enumerate(args.request_rate, start=1):
        requests = make_requests(args, setting.hf_config.vocab_size, run)
        arrivals = latency.draw_arrivals(len(requests), rate, args.seed)
        for policy, engine in engines.items():
            times = latency.serve(engine, requests, arrivals)
            summary = latency.summarize(requests, times)
            latency.print_row(rate, policy, summary)
            rows.append({"request_rate": rate, "policy": policy, **summary})
    if args.output:
        latency.plot(rows, args.output)
    return {**described, "request_rates": rows}


def compare_engines(
    args: argparse.Namespace,
    setting: Setting,
    engines: dict[str, Engine],
    peak: roofline.PeakRates,
) -> dict[str, Any]:
    """Time the engines in turn, print a table, and return the report for JSON."""
    described = prepare(args, setting, engines)
    vocab_size = setting.hf_config.vocab_size
    requests = make_requests(args, vocab_size, run=0)
    least = roofline.compute_roofline_seconds(
        setting.hf_config,
        setting.dtype,
        requests,
        args.shared_prefix,
        peak,
        setting.quantization,
    )
    print(f"roofline: at least {least:.3g} seconds, at {peak} ({roofline.NOTE})", flush=True)
    num_prompt_tokens = sum(len(request.prompt) for request in requests)
    num_output_tokens = sum(request.num_tokens for request in requests)
    report.print_head()

    def show(label: str, seconds: float, stats: dict[str, int]) -> None:
        report.print_row(label, num_prompt_tokens, num_output_tokens, seconds, least, stats)

    times: dict[str, list[float]] = {name: [] for name in engines}
    for run in range(1, args.repeat + 1):
        requests = make_requests(args, vocab_size, run)
        for name, engine in engines.items():
            times[name].append(time_run(name, engine, requests))
            show(f"{name} {run}", times[name][-1], engine.stats)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    if args.repeat > 1:
        for name, seconds in medians.items():
            show(f"{name} median", seconds, {})
    first, *others = medians
    ratios = {f"{first}/{other}": medians[other] / medians[first] for other in others}
    for pair, ratio in ratios.items():
        print(f"{pair}: {ratio:.2f}x throughput (ratio of medians)")
    num_tokens = num_prompt_tokens + num_output_tokens
    fractions = {n: roofline.find_roofline_fraction(least, s) for n, s in medians.items()}
    return {
        **described,
        "prompt_tokens": num_prompt_tokens,
        "output_tokens": num_output_tokens,
        "seconds": times,
        "median_seconds": medians,
        "output_tokens_per_second": {n: num_output_tokens / s for n, s in medians.items()},
        "total_tokens_per_second": {n: num_tokens / s for n, s in medians.items()},
        "ratios": ratios,
        "roofline": {**peak._asdict(), "seconds": least, "note": roofline.NOTE},
        "share_of_roofline": fractions,
        "stats_of_last_run": {name: engine.stats for name, engine in engines.items()},
    }


def main(argv: list[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    output = redirect_stdout(sys.stderr) if args.json else nullcontext()
    with TemporaryDirectory() as scratch, output:
        try:
            setting = make_setting(args, scratch)
            if args.request_rate:
                policies: dict[str, NanoVLLM] = {}
                for name, policy in find_policies(args).items():
                    options = {**setting.options, **policy}
                    policies[name] = NanoVLLM(replace(setting, options=options))
                measure = partial(compare_policies, args, setting, policies)
            else:
                # Before the engines take the memory that it needs.
                peak = roofline.measure_peak_rates(setting.device, setting.dtype)
                engines = {name: ENGINES[name](setting) for name in dict.fromkeys(args.engine)}
                measure = partial(compare_engines, args, setting, engines, peak)
        except (OSError, TypeError, ValueError) as error:
            parser.error(str(error))
        figures = measure()
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    run_program(main)
