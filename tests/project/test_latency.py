"""bench.py --request-rate measures latencies as `vllm bench serve` defines them."""

import json

import numpy as np
import pytest

from bench import main
from nanovllm import DEMO_MODEL
from nanovllm.benchmark import latency
from nanovllm.benchmark.engines import Request

TINY = ["--model", DEMO_MODEL, "--num-seqs", "6", "--input-len", "4", "20", "--set", "device=cpu"]
RATES = [*TINY, "--output-len", "3", "9", "--request-rate", "500", "2000"]


def test_arrivals_are_one_poisson_pattern_for_all_rates():
    slow = np.array(latency.draw_arrivals(4000, rate=2.0, seed=1))
    fast = np.array(latency.draw_arrivals(4000, rate=8.0, seed=1))
    assert slow[-1] == pytest.approx(2000)
    assert slow == pytest.approx(4 * fast)
    gaps = np.diff(slow)
    assert gaps.min() >= 0
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # as of an exponential distribution
    assert latency.draw_arrivals(4, 2.0, seed=2) != latency.draw_arrivals(4, 2.0, seed=1)


def test_metrics_are_those_of_vllm_bench_serve():
    requests = [Request([1], 4), Request([1], 1)]
    # The first request gets two tokens in its last step, as with drafts.
    summary = latency.summarize(requests, [[1.0, 1.5, 1.6, 2.1], [2.0, 3.0]])
    assert summary["duration"] == 3.0
    assert summary["output_throughput"] == pytest.approx(5 / 3)
    assert summary["p50_ttft_ms"] == pytest.approx(750)
    assert summary["p99_ttft_ms"] == pytest.approx(995)
    assert summary["p50_tpot_ms"] == pytest.approx(200)  # (2.1 - 1.5) / 3
    assert summary["p50_itl_ms"] == pytest.approx(300)  # gaps of 100 and 500
    assert summary["p90_itl_ms"] == pytest.approx(460)
    assert summary["p50_e2el_ms"] == pytest.approx(1050)


def test_every_rate_has_a_row_for_every_policy(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / "latency.svg"
    main([*RATES, "--token-budget", "16", "32", "--json", "-o", str(path)])
    output, errors = capsys.readouterr()
    rows = json.loads(output)["request_rates"]
    policies = ["mixed, budget 16", "mixed, budget 32", "prefill first"]
    found = [(row["request_rate"], row["policy"]) for row in rows]
    assert found == [(rate, policy) for rate in (500, 2000) for policy in policies]
    for row in rows:
        assert row["output_throughput"] > 0
        for metric in latency.METRICS:
            p50, p90, p99 = (row[f"p{percent}_{metric}_ms"] for percent in latency.PERCENTILES)
            assert 0 < p50 <= p90 <= p99
        assert row["policy"] in errors
    assert "<svg" in path.read_text()


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--request-rate", "0"], "out of range"),
        (["--request-rate", "nan"], "out of range"),
        (["--request-rate", "1", "--engine", "transformers"], "--engine"),
        (["--request-rate", "1", "--set", "enable_chunked_prefill=False"], "leave it out of --set"),
        (["--request-rate", "1", "--set", "max_num_batched_tokens=8"], "longest prompt"),
        (["--token-budget", "64"], "need --request-rate"),
        (["-o", "latency.svg"], "need --request-rate"),
    ],
)
def test_contradicting_options_are_rejected(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as end:
        main([*TINY, *arguments])
    assert end.value.code == 2
    assert complaint in capsys.readouterr().err
