"""bench.py runs, says what it ran, compares engines on the same work, and tells right kernels from wrong ones."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config

from bench import Ceilings, Request, check_and_time, find_floor, find_share, make_batches
from nanovllm.layers.attention import torch as torch_backend

ROOT = Path(__file__).parent.parent
TINY = ["--num-seqs", "5", "--input-len", "4", "20", "--output-len", "3", "9"]


def bench(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}  # its kernels, interpreted, are too slow to time
    return subprocess.run(
        [sys.executable, "bench.py", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def test_engines_side_by_side() -> None:
    done = bench("--model", "nanovllm/demo_model", *TINY, "--engine", "nanovllm", "transformers", "--repeat", "2", "--json")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    assert 15 <= report["output_tokens"] <= 45 and 20 <= report["prompt_tokens"] <= 100
    assert {name: len(seconds) for name, seconds in report["seconds"].items()} == {"nanovllm": 2, "transformers": 2}
    assert report["ratios"]["nanovllm/transformers"] > 0 and report["hardware"] and report["versions"]["torch"]
    for name, share in report["share_of_roofline"].items():
        assert share == find_share(report["roofline"]["seconds"], report["median_seconds"][name])
    assert "of roofline" in done.stderr


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
        (["--kernels", "--engine", "transformers"], "--engine"),
        (["--kernels", "--output-len", "1", "9"], "--output-len"),
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


def test_kernels() -> None:
    workload = ["--num-seqs", "3", "--input-len", "4", "20", "--output-len", "3", "24"]
    done = bench("--kernels", "--model", "nanovllm/demo_model", *workload, "--dtype", "float32", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    rows = {(row["kernel"], row["backend"]): row for row in report["kernels"]}
    assert rows.keys() >= {(kernel, "torch") for kernel in ("store_kvcache", "decode", "prefill")}
    for row in rows.values():
        assert all(0 < row[figure] < math.inf for figure in ("seconds", "rate")) and row["max_error"] < 1e-4
        assert row["share"] is None or 0 < row["share"] <= 1
    assert "| decode | 3 x 20 | torch | float32 |" in done.stderr and "flash_attn" in done.stderr
    parts = report["decode_step"]["parts"]
    assert len(parts) == 14 and "3 sequences" in report["decode_step"]["setting"]
    if not torch.cuda.is_available():
        (name,) = (name for name in parts if re.fullmatch(r"layers/linear.py:\d+ multiply", name))
        assert parts[name] > 0 and parts["outside of nanovllm"] > 0


def test_shares_are_of_a_whole() -> None:
    assert find_share(1.0, 4.0) == 0.25 and find_share(1.0, 1.0) == 1.0 and find_share(4.0, 1.0) is None


def forget_a_row(query: Tensor, *arguments) -> Tensor:
    output = torch_backend.attend(query, *arguments)
    output[-1, -1] = 0.0
    return output


def shift_blocks(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    torch_backend.store_kvcache(key, value, kv_cache, slot_mapping.roll(1))


def store_too_much(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    torch_backend.store_kvcache(key, value, kv_cache, slot_mapping)
    slots = kv_cache.flatten(1, 2)  # [2, num_slots, num_kv_heads, head_dim]
    foreign = set(range(slots.shape[1])) - set(slot_mapping.tolist())
    slots[:, foreign.pop()] = 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kernel, changes",
    [
        ("decode", {"attend": forget_a_row}),
        ("prefill", {"attend": forget_a_row}),
        ("prefill", {"store_kvcache": shift_blocks}),
        ("store_kvcache", {"store_kvcache": shift_blocks}),
        ("store_kvcache", {"store_kvcache": store_too_much}),
    ],
)
def test_wrong_kernels_are_refused(kernel: str, changes: dict[str, Callable[..., object]], dtype: torch.dtype) -> None:
    backend = SimpleNamespace(**{**vars(torch_backend), **changes})
    batches = make_batches(2, 2, 40, 1 if kernel == "decode" else 40, 16, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="off by|slots"):
        check_and_time(kernel, backend, batches, 16, dtype)
