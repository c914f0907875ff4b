"""Times the runs of bench.py.

Loading and warm-up are not timed. Every run has different token ids, so that no prefix cache can
reuse an earlier run.
"""

import time
from argparse import Namespace
from itertools import product

from nanovllm.benchmark import latency
from nanovllm.benchmark.engines import Engine
from nanovllm.benchmark.report import Figures, Table
from nanovllm.benchmark.roofline import PeakRates
from nanovllm.benchmark.setting import Setting
from nanovllm.benchmark.workloads import Request, make_requests


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


def time_case(
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
