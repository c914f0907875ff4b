"""bench.py runs, says what it ran, compares engines on the same work, and refuses what cannot run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from bench import NanoVLLM, Request, find_floor, main
from nanovllm import DEMO_MODEL
from nanovllm.kernels.bench import Ceilings, find_share

ROOT = Path(__file__).parent.parent
TINY = ["--num-seqs", "5", "--input-len", "4", "20", "--output-len", "3", "9"]


def bench(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}  # its kernels, interpreted, are too slow to time
    return subprocess.run([sys.executable, "bench.py", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_engines_side_by_side() -> None:
    done = bench("--model", DEMO_MODEL, *TINY, "--engine", "nanovllm", "transformers", "--repeat", "2", "--json")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    assert 15 <= report["output_tokens"] <= 45 and 20 <= report["prompt_tokens"] <= 100
    assert {name: len(seconds) for name, seconds in report["seconds"].items()} == {"nanovllm": 2, "transformers": 2}
    assert report["ratios"]["nanovllm/transformers"] > 0 and report["hardware"] and report["versions"]["torch"]
    for name, share in report["share_of_roofline"].items():
        assert share == find_share(report["roofline"]["seconds"], report["median_seconds"][name])
    assert report["transformers"].endswith("static batches of 5") and "of roofline" in done.stderr


def test_built_in_shape_and_shared_prefix() -> None:
    done = bench("--model", "small", *TINY, "--shared-prefix", "32", "--set", "num_kvcache_blocks=64")
    assert done.returncode == 0, done.stderr
    assert "num_cached_tokens 128" in done.stdout and "output tok/s" in done.stdout


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--input-len", "9", "3"], "--input-len"),
        (["--input-len", "0", "3"], "--input-len"),
        (["--num-seqs", "1000000000"], "--num-seqs"),
        (["--seed", "-1"], "--seed"),
        (["--temperature", "1e9"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--batch-size", "4"], "--batch-size"),
        (["--shared-prefix", "5000", "--model", "small"], "max_model_len=5512"),
        (["--output-len", "1", "99999", "--model", "small"], "max_model_len"),
        (["--set", "max_model_len=4"], "max_model_len"),
        (["--set", "max_model_len=None"], "max_model_len"),
        (["--set", "num_kvcache_blocks=1", "--model", "small"], "num_kvcache_blocks"),
        (["--set", "enable_chunked_prefill=False", "--set", "max_num_batched_tokens=16"], "enable_chunked_prefill"),
        (["--model", "bench.py"], "is a file"),
        (["--set", "max_num_seq=3"], "max_num_seq"),
        (["--engine", "tgi"], "tgi"),
        (["--model", "./nowhere"], "no such directory"),
    ],
)
def test_bad_options(arguments: list[str], complaint: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 2 and complaint in done.stderr


def test_floor() -> None:
    sizes = dict(hidden_size=8, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=4)
    config = Qwen3Config(vocab_size=10, num_hidden_layers=3, **sizes)
    # Matrices: 3 layers * (q, o 2 * 8 * 8, k, v 2 * 8 * 4, MLP 3 * 8 * 16) = 1728 weights; head: 8 * 10 = 80.
    # A pair of tokens: 2 * 2 * 3 layers * 2 heads * 4 = 96 FLOPs; K/V of a token: 2 * 3 layers * 4 = 24 numbers.
    requests = [Request([1, 2, 3, 4], 3), Request([1, 2], 2)]
    # Prompts: 2 * 1728 * 6 + 2 * 80 * 2 + 96 * (16 + 4) / 2 = 22,016 FLOPs. Two steps, contexts of 5 and 3, then 6:
    # 2 * 1808 * 2 + 96 * 8 = 8,000 and 2 * 1808 + 96 * 6 = 4,192 FLOPs; 1808 + 24 * 8 = 2,000 and 1,952 numbers.
    slow_processor, slow_memory = Ceilings(1e9, 1e3), Ceilings(1e3, 1e6)
    assert find_floor(config, torch.bfloat16, requests, 0, slow_processor) == pytest.approx(22.016 + 8.0 + 4.192)
    assert find_floor(config, torch.bfloat16, requests, 0, slow_memory) == pytest.approx(0.022016 + 4.0 + 3.904)
    # With the 2 tokens shared: 4 to compute, (16 + 4 - 4) / 2 pairs; the first step reads 6 tokens instead of 8.
    assert find_floor(config, torch.bfloat16, requests, 2, slow_processor) == pytest.approx(14.912 + 8.0 + 4.192)
    assert find_floor(config, torch.float32, requests, 2, slow_memory) == pytest.approx(0.014912 + 7.808 + 7.808)


def test_shares_are_of_a_whole() -> None:
    assert find_share(1.0, 4.0) == 0.25 and find_share(1.0, 1.0) == 1.0 and find_share(4.0, 1.0) is None


@pytest.mark.parametrize("error", [ValueError, OSError])
def test_error_of_a_run_is_no_bad_option(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> None:
        raise error("while it is timed")

    monkeypatch.setattr(NanoVLLM, "run", run)
    with pytest.raises(error, match="while it is timed"):
        main(["--model", DEMO_MODEL, *TINY, "--set", "device=cpu"])
