"""bench.py --request-rate measures latencies as `vllm bench serve` defines them."""

import json

import numpy as np
import pytest

from bench import main
from nanovllm import DEMO_MODEL
from nanovllm.benchmark import latency
from nanovllm.benchmark.workloads import Request


def test_arrivals_are_one_poisson_pattern_for_all_rates():
    slow = np.array(latency.draw_arrivals(4000, rate=2.0))
    fast = np.array(latency.draw_arrivals(4000, rate=8.0))
    assert slow[-1] == pytest.approx(2000)
    assert slow == pytest.approx(4 * fast)
    gaps = np.diff(slow)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # true of exponential distributions


def test_metrics_are_those_of_vllm_bench_serve():
    requests = [Request([1], 4), Request([1], 1)]
    # The first request gets two tokens in its last step, as with drafts.
    summary = latency.summarize(requests, [[1.0, 1.5, 1.6, 2.1], [2.0, 3.0]])
    expected = {
        "p50_ttft_ms": 750,
        "p99_ttft_ms": 995,
        "p50_tpot_ms": 200,  # (2.1 - 1.5) / 3
        "p50_itl_ms": 300,  # gaps of 100 and 500
        "p90_itl_ms": 460,
    }
    assert {name: summary[name] for name in expected} == pytest.approx(expected)


def test_every_rate_has_a_row_for_every_policy(capsys):
    sizes = ["--num-seqs", "6", "--input-len", "4", "20", "--output-len", "3", "9"]
    rates = ["--request-rate", "500", "2000", "--token-budget", "16", "32"]
    model = ["--model", DEMO_MODEL, "--set", "device=cpu"]
    main([*model, *sizes, *rates, "--json"])
    output, log = capsys.readouterr()
    rows = json.loads(output)["runs"]
    policies = ["mixed steps, budget 16", "mixed steps, budget 32", "prefill first"]
    found = [(row["request_rate"], row["engine"]) for row in rows]
    assert found == [(rate, policy) for rate in (500, 2000) for policy in policies]
    for row in rows:
        assert row["output_tokens_per_second"] > 0
        for metric in ("ttft", "tpot", "itl"):
            p50, p90, p99 = (row[f"p{percent}_{metric}_ms"] for percent in (50, 90, 99))
            assert 0 < p50 <= p90 <= p99
        assert row["engine"] in log
