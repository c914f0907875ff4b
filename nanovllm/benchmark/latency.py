"""Latency under load: requests arrive over time, at a given rate.

The metrics and their names in JSON are those of `vllm bench serve`:

    ttft  time to first token: from the arrival to the end of the step that samples the first token
    tpot  time per output token: from the first token to the last, per token after the first
    itl   inter-token latency: from one step that gives a request tokens to the next such step

A request has one ttft and one tpot. The itl of all requests form one list, so that a single pause
shows in its tail. Sarathi-Serve (Agrawal et al. 2024) calls itl "time between tokens".
"""

import time
from bisect import bisect

import numpy as np

from nanovllm import LLM, SamplingParams
from nanovllm.benchmark.workloads import Request

PERCENTILES = (50, 90, 99)
READING = """\
Look at the p99 of ttft, the wait for the first token, and of itl, the pauses between tokens, in
milliseconds. Compare policies at the same rate."""


def draw_arrivals(num_requests: int, rate: float) -> list[float]:
    """Draw the arrival times of a Poisson process, in seconds.

    They are scaled so that the last request arrives at num_requests / rate. The pattern is always
    the same, and is stretched or compressed for another rate.
    """
    times = np.random.default_rng(0).exponential(size=num_requests).cumsum()
    return (times * (num_requests / rate / times[-1])).tolist()


def serve(llm: LLM, requests: list[Request], rate: float) -> list[list[float]]:
    """Serve each request from its arrival on.

    Returns for each request the seconds of its arrival and of every step that gave it tokens.
    A request that arrives during a step is added after the step, and its wait counts.
    """
    arrivals = draw_arrivals(len(requests), rate)
    times = [[arrival] for arrival in arrivals]
    times_of: dict[int, list[float]] = {}  # by request id
    start = time.perf_counter()
    while len(times_of) < len(requests) or not llm.is_finished():
        num_arrived = bisect(arrivals, time.perf_counter() - start)
        for index in range(len(times_of), num_arrived):
            params = requests[index].make_params(SamplingParams)
            request_id = llm.add_request(requests[index].prompt, params)
            times_of[request_id] = times[index]
        for output in llm.step():
            times_of[output["request_id"]].append(time.perf_counter() - start)
    return times


def summarize(requests: list[Request], times: list[list[float]]) -> dict[str, float]:
    """Return percentiles of the metrics in milliseconds."""
    seconds: dict[str, list[float]] = {"ttft": [], "tpot": [], "itl": []}
    for request, (arrival, *steps) in zip(requests, times, strict=True):
        seconds["ttft"].append(steps[0] - arrival)
        seconds["itl"] += np.diff(steps).tolist()
        if request.num_tokens > 1:
            seconds["tpot"].append((steps[-1] - steps[0]) / (request.num_tokens - 1))
    return {
        f"p{percent}_{metric}_ms": 1000 * np.percentile(values or [0.0], percent)
        for metric, values in seconds.items()
        for percent in PERCENTILES
    }
