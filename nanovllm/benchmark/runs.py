"""Times the runs of bench.py, and records each one.

Loading and warm-up are not timed. Every run has different token ids, so that no prefix cache can
reuse an earlier run.
"""

import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from nanovllm.benchmark import latency
from nanovllm.benchmark.engines import Engine, NanoVLLM
from nanovllm.benchmark.roofline import PeakRates, compute_roofline_seconds
from nanovllm.benchmark.workloads import Request, make_requests
from nanovllm.models.spec import ModelSpec


@dataclass(frozen=True)
class Run:
    """The record of a run: what was run, and what was measured."""

    engine: str  # or the policy of nanovllm
    run: int | str  # counted from 1, or "median"
    request_rate: float | None  # None: all requests arrive at once
    prompt_tokens: int  # without the cached prefix
    output_tokens: int
    seconds: float
    roofline_seconds: float
    stats: dict[str, int]
    latencies: dict[str, float]  # with a request rate

    def figures(self) -> dict[str, Any]:
        """Return the record and its rates, by their names in JSON."""
        return {
            **asdict(self),
            **self.latencies,
            "prompt_tokens_per_second": self.prompt_tokens / self.seconds,
            "output_tokens_per_second": self.output_tokens / self.seconds,
            "share_of_roofline": self.roofline_seconds / self.seconds,
        }


def time_runs(
    args: Namespace, spec: ModelSpec, engines: dict[str, Engine], peak: PeakRates
) -> Iterator[Run]:
    """Time each engine `args.repeat` times, or once for each of `args.request_rate`."""
    cached_prefix = args.cached_prefix
    shared_prefix = cached_prefix + args.shared_prefix
    requests = make_requests(args, spec.vocab_size, run=0)
    warm_up = [
        each._replace(prompt=each.prompt[cached_prefix:], num_tokens=min(each.num_tokens, 8))
        for each in requests[:8]
    ]
    for engine in engines.values():
        engine.run(warm_up)
    # The same in all runs, which differ in token ids only.
    prompt_tokens = sum(len(each.prompt) - cached_prefix for each in requests)
    output_tokens = sum(each.num_tokens for each in requests)
    least = compute_roofline_seconds(spec, requests, shared_prefix, cached_prefix, peak)
    for number, rate in enumerate(args.request_rate or [None] * args.repeat, start=1):
        requests = make_requests(args, spec.vocab_size, number)
        cached = Request(requests[0].prompt[:cached_prefix], 1)
        # In turn, so that a change of the machine's speed affects all engines.
        for name, engine in engines.items():
            # The second request leaves the snapshot of a model with recurrent states.
            for _ in range(2 if cached_prefix else 0):
                engine.run([cached])
            before = engine.read_stats()
            seconds, latencies = time_run(engine, requests, rate)
            after = engine.read_stats()
            yield Run(
                engine=name,
                run=number,
                request_rate=rate,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                seconds=seconds,
                roofline_seconds=least,
                stats={counter: after[counter] - before[counter] for counter in after},
                latencies=latencies,
            )


def time_run(
    engine: Engine, requests: list[Request], rate: float | None
) -> tuple[float, dict[str, float]]:
    """Return the seconds until the last request has finished, and with a rate the latencies."""
    if rate is not None:
        assert isinstance(engine, NanoVLLM)
        times = latency.serve(engine.llm, requests, rate)
        return max(steps[-1] for steps in times), latency.summarize(requests, times)
    start = time.perf_counter()
    outputs = engine.run(requests)
    seconds = time.perf_counter() - start
    for request, output in zip(requests, outputs, strict=True):
        if len(output) != request.num_tokens:
            raise RuntimeError(
                f"{engine.description}: a request for {request.num_tokens} tokens returned"
                f" {len(output)}"
            )
    return seconds, {}
