"""Latency under load: requests arrive over time, at a given rate.

The metrics and their names in JSON are those of `vllm bench serve`:

    ttft  time to first token: from the arrival to the end of the step that samples the first token
    tpot  time per output token: from the first token to the last, per token after the first
    itl   inter-token latency: from one step that gives a request tokens to the next such step

A request has one ttft and one tpot. The itl of all requests form one list, so that a single pause
shows in its tail. Sarathi-Serve (Agrawal et al. 2024) calls itl "time between tokens".
"""

import argparse
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from nanovllm.benchmark.engines import Engine, NanoVLLM, Request

PERCENTILES = (50, 90, 99)
METRICS = ("ttft", "tpot", "itl")
READING = """\
Look at the p99 of ttft, the wait for the first token, and of itl, the pauses between tokens.
Compare policies at the same rate."""
Row = dict[str, Any]  # a line of the table, for JSON


def draw_arrivals(num_requests: int, rate: float, seed: int) -> list[float]:
    """Draw the arrival times of a Poisson process, in seconds.

    They are scaled so that the last request arrives at num_requests / rate. A seed gives one
    pattern, which is stretched or compressed for another rate.
    """
    gaps = np.random.default_rng(seed).exponential(size=num_requests)
    times = gaps.cumsum()
    return (times * (num_requests / rate / times[-1])).tolist()


def serve(engine: NanoVLLM, requests: list[Request], arrivals: list[float]) -> list[list[float]]:
    """Serve each request from its arrival on.

    Returns for each request the seconds of its arrival and of every step that gave it tokens.
    A request that arrives during a step is added after the step, and its wait counts.
    """
    llm = engine.llm
    times: list[list[float]] = [[arrival] for arrival in arrivals]
    index_of: dict[int, int] = {}  # request id -> index
    start = time.perf_counter()
    while len(index_of) < len(requests) or not llm.is_finished():
        now = time.perf_counter() - start
        for index in range(len(index_of), len(requests)):
            if arrivals[index] > now:
                break
            prompt, num_tokens = requests[index]
            request_id = llm.add_request(prompt, engine.make_params(max_tokens=num_tokens))
            index_of[request_id] = index
        if llm.is_finished():
            time.sleep(arrivals[len(index_of)] - now)
            continue
        for output in llm.step():
            times[index_of[output["request_id"]]].append(time.perf_counter() - start)
    return times


def summarize(requests: list[Request], times: list[list[float]]) -> dict[str, float]:
    """Return the throughput in output tokens/s and percentiles of the metrics in milliseconds."""
    seconds: dict[str, list[float]] = {metric: [] for metric in METRICS}
    for (_, num_tokens), (arrival, *steps) in zip(requests, times, strict=True):
        seconds["ttft"].append(steps[0] - arrival)
        seconds["itl"] += np.diff(steps).tolist()
        if num_tokens > 1:
            seconds["tpot"].append((steps[-1] - steps[0]) / (num_tokens - 1))
    duration = max(steps[-1] for steps in times)
    num_output_tokens = sum(num_tokens for _, num_tokens in requests)
    summary = {"duration": duration, "output_throughput": num_output_tokens / duration}
    for metric in METRICS:
        values = 1000 * np.percentile(seconds[metric] or [0.0], PERCENTILES)
        for percent, value in zip(PERCENTILES, values.tolist()):
            summary[f"p{percent}_{metric}_ms"] = value
    return summary


def compare_policies(
    args: argparse.Namespace, engines: Mapping[str, Engine], runs: list[list[Request]]
) -> dict[str, list[Row]]:
    """Serve the requests of a run at each rate with each policy. Print and return the latencies."""
    print_head()
    rows: list[Row] = []
    for rate, requests in zip(args.request_rate, runs, strict=True):
        arrivals = draw_arrivals(len(requests), rate, args.seed)
        for policy, engine in engines.items():
            assert isinstance(engine, NanoVLLM), "the others do not show their steps"
            summary = summarize(requests, serve(engine, requests, arrivals))
            print_row(rate, policy, summary)
            rows.append({"request_rate": rate, "policy": policy, **summary})
    print(f"\n{READING}")
    return {"request_rates": rows}


def print_head() -> None:
    titles = "".join(f"{f'{metric} p50/p90/p99, ms':>28}" for metric in METRICS)
    print(f"\n{'requests/s':>10}  {'policy':24}{'output tok/s':>12}{titles}")


def print_row(rate: float, policy: str, summary: dict[str, float]) -> None:
    cells = ""
    for metric in METRICS:
        values = [f"{summary[f'p{percent}_{metric}_ms']:.0f}" for percent in PERCENTILES]
        cells += f"{' / '.join(values):>28}"
    print(f"{rate:10g}  {policy:24}{summary['output_throughput']:12.1f}{cells}", flush=True)
