"""bench.py compares engines on the same work and rejects invalid options. So does kernels/bench.py,
which also detects wrong kernels.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3Config

from bench import main
from nanovllm import DEMO_MODEL
from nanovllm.benchmark.engines import NanoVLLM, Request
from nanovllm.benchmark.roofline import (
    PeakRates,
    compute_roofline_seconds,
    find_matmul_rate,
    find_roofline_fraction,
    measure_peak_rates,
)
from nanovllm.kernels import bench as kernels_bench
from nanovllm.kernels.bench import QWEN3_HEADS, TOLERANCES
from nanovllm.kernels.check import Shape, compare_with_torch, make_batch
from nanovllm.layers import attention as oracle

ROOT = Path(__file__).parents[2]
TINY = ["--num-seqs", "5", "--input-len", "4", "20", "--output-len", "3", "9"]


def bench(*command):
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
    }  # its kernels, interpreted, are too slow to time
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def expect_rejection(main, arguments, capsys):
    """Return the message for invalid arguments."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    return capsys.readouterr().err


def test_engines_side_by_side():
    done = bench(
        "bench.py",
        "--model",
        DEMO_MODEL,
        *TINY,
        "--engine",
        "nanovllm",
        "transformers",
        "--repeat",
        "2",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    assert 15 <= report["output_tokens"] <= 45 and 20 <= report["prompt_tokens"] <= 100
    assert {name: len(seconds) for name, seconds in report["seconds"].items()} == {
        "nanovllm": 2,
        "transformers": 2,
    }
    assert (
        report["ratios"]["nanovllm/transformers"] > 0
        and report["hardware"]
        and report["versions"]["torch"]
    )
    for name, share in report["share_of_roofline"].items():
        assert share == find_roofline_fraction(
            report["roofline"]["seconds"], report["median_seconds"][name]
        )
    assert report["transformers"].endswith("static batches of 5") and "of roofline" in done.stderr


def test_built_in_shape_and_shared_prefix(capsys):
    main(
        [
            "--model",
            "small",
            *TINY,
            "--shared-prefix",
            "32",
            "--set",
            "num_kvcache_blocks=64",
            "--set",
            "device=cpu",
        ]
    )
    output = capsys.readouterr().out
    assert "num_cached_tokens 128" in output and "output tok/s" in output


def test_it_ends_when_nobody_reads_on():
    command = [sys.executable, "bench.py", "--model", DEMO_MODEL, *TINY]
    with subprocess.Popen(command, cwd=ROOT, stdout=PIPE, stderr=PIPE, text=True) as process:
        process.stdout.close()  # as `| head` does
        assert "Traceback" not in process.stderr.read() and process.wait() == 1


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
        (
            ["--set", "num_kvcache_blocks=1", "--model", "small", "--set", "device=cpu"],
            "num_kvcache_blocks",
        ),
        (
            ["--set", "enable_chunked_prefill=False", "--set", "max_num_batched_tokens=16"],
            "enable_chunked_prefill",
        ),
        (["--model", "bench.py"], "no such directory"),
        (["--set", "max_num_seq=3"], "max_num_seq"),
        (["--engine", "tgi"], "tgi"),
        (["--model", "./nowhere"], "no such directory"),
    ],
)
def test_bad_options(arguments, complaint, capsys):
    assert complaint in expect_rejection(main, arguments, capsys)


def test_floor():
    sizes = dict(
        hidden_size=8,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
    )
    config = Qwen3Config(vocab_size=10, num_hidden_layers=3, **sizes)
    # Matrices: 3 layers * (q, o 2 * 8 * 8, k, v 2 * 8 * 4, MLP 3 * 8 * 16) = 1728 weights; head: 8 * 10 = 80.
    # A pair of tokens: 2 * 2 * 3 layers * 2 heads * 4 = 96 FLOPs; K/V of a token: 2 * 3 layers * 4 = 24 numbers.
    requests = [Request([1, 2, 3, 4], 3), Request([1, 2], 2)]
    # Prompts: 2 * 1728 * 6 + 2 * 80 * 2 + 96 * (16 + 4) / 2 = 22,016 FLOPs. Two steps, contexts of 5 and 3, then 6:
    # 2 * 1808 * 2 + 96 * 8 = 8,000 and 2 * 1808 + 96 * 6 = 4,192 FLOPs; 1808 + 24 * 8 = 2,000 and 1,952 numbers.
    slow_processor = PeakRates(1e9, 1e3, "bfloat16")
    slow_memory = PeakRates(1e3, 1e6, "bfloat16")
    assert compute_roofline_seconds(
        config, torch.bfloat16, requests, 0, slow_processor
    ) == pytest.approx(22.016 + 8.0 + 4.192)
    assert compute_roofline_seconds(
        config, torch.bfloat16, requests, 0, slow_memory
    ) == pytest.approx(0.022016 + 4.0 + 3.904)
    # With the 2 tokens shared: 4 to compute, (16 + 4 - 4) / 2 pairs; the first step reads 6 tokens instead of 8.
    assert compute_roofline_seconds(
        config, torch.bfloat16, requests, 2, slow_processor
    ) == pytest.approx(14.912 + 8.0 + 4.192)
    assert compute_roofline_seconds(
        config, torch.float32, requests, 2, slow_memory
    ) == pytest.approx(0.014912 + 7.808 + 7.808)


def test_ceilings_are_measured_first(monkeypatch):
    """Before the engines take the memory that copies and GEMMs need."""
    seen, make = [], NanoVLLM.__init__
    ceilings = PeakRates(1e12, 1e12, "float32")
    monkeypatch.setattr(
        "nanovllm.benchmark.roofline.measure_peak_rates",
        lambda *_: seen.append("ceilings") or ceilings,
    )
    monkeypatch.setattr(NanoVLLM, "__init__", lambda *args: seen.append("engine") or make(*args))
    main(["--model", DEMO_MODEL, *TINY, "--set", "device=cpu"])
    assert seen == ["ceilings", "engine"]


BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
MATMUL_RATES = {  # a machine -> the FLOP/s of small and of large products in each dtype
    "without bfloat16": {BFLOAT16: (6e8, 6e8), FLOAT16: (6e8, 6e8), FLOAT32: (5e10, 7e10)},
    "with bfloat16": {BFLOAT16: (6e11, 8e11), FLOAT16: (6e8, 6e8), FLOAT32: (1e11, 1e11)},
    "slow to start": {BFLOAT16: (4e10, 8e11), FLOAT16: (4e10, 6e10), FLOAT32: (5e10, 7e10)},
}


@pytest.mark.parametrize(
    "machine, dtype, fastest",
    [
        ("without bfloat16", BFLOAT16, FLOAT32),
        ("without bfloat16", FLOAT16, FLOAT32),
        ("without bfloat16", FLOAT32, FLOAT32),
        ("with bfloat16", BFLOAT16, BFLOAT16),
        ("with bfloat16", FLOAT16, FLOAT32),
        ("with bfloat16", FLOAT32, FLOAT32),  # a model in float32 is not rounded to 16 bits
        ("slow to start", BFLOAT16, BFLOAT16),
        ("slow to start", FLOAT16, FLOAT32),
    ],
)
def test_matmul_ceiling_is_that_of_the_fastest_dtype(machine, dtype, fastest, monkeypatch):
    seconds = 0.0

    def time_best(statement, min_seconds, *_, left, right):
        nonlocal seconds
        assert left.dtype == right.dtype and left.shape == right.shape
        side = len(left)
        one_call = 2 * side**3 / MATMUL_RATES[machine][left.dtype][side > 128]
        seconds += max(min_seconds, one_call)
        return one_call

    monkeypatch.setattr("nanovllm.benchmark.roofline.time_best", time_best)
    rate, found = find_matmul_rate(torch.device("cpu"), dtype)
    assert found == fastest and rate == pytest.approx(MATMUL_RATES[machine][fastest][1])
    assert seconds < 1.0, "a large product in a slow dtype was timed"


def test_matmul_ceiling_of_a_gpu(monkeypatch):
    """Only the model's dtype is measured, because 16-bit GEMMs are never slower on a GPU."""
    rates = {torch.bfloat16: 4e14}
    monkeypatch.setattr(
        "nanovllm.benchmark.roofline.measure_matmul", lambda device, dtype, **_: rates[dtype]
    )
    assert find_matmul_rate(torch.device("cuda"), torch.bfloat16) == (4e14, torch.bfloat16)


def test_ceilings_name_their_dtype(monkeypatch):
    monkeypatch.setattr(
        "nanovllm.benchmark.roofline.time_best",
        lambda statement, min_seconds, **tensors: 2**28 / 5e9,
    )
    monkeypatch.setattr(
        "nanovllm.benchmark.roofline.find_matmul_rate", lambda device, dtype: (7e10, torch.float32)
    )
    ceilings = measure_peak_rates(torch.device("cpu"), torch.bfloat16)
    assert str(ceilings) == "5 GB/s and 0.07 TFLOP/s in float32"


def test_shares_are_of_a_whole():
    assert (
        find_roofline_fraction(1.0, 4.0) == 0.25
        and find_roofline_fraction(1.0, 1.0) == 1.0
        and find_roofline_fraction(4.0, 1.0) is None
    )


@pytest.mark.parametrize("error", [ValueError, OSError])
def test_error_of_a_run_is_no_bad_option(error, monkeypatch):
    def run(*_):
        raise error("while it is timed")

    monkeypatch.setattr(NanoVLLM, "run", run)
    with pytest.raises(error, match="while it is timed"):
        main(["--model", DEMO_MODEL, *TINY, "--set", "device=cpu"])


# --- Single kernels


def test_table():
    sizes = ["--num-seqs", "3", "--context-len", "20", "--prompt-len", "50", "--dtype", "float32"]
    done = bench("-m", "nanovllm.kernels.bench", *sizes)
    assert done.returncode == 0, done.stderr
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in done.stdout.splitlines()
        if line.startswith("|")
    ]
    rows = {(row[0], row[2]): row for row in cells[2:]}
    assert rows.keys() >= {(kernel, "torch") for kernel in ("store_kvcache", "decode", "prefill")}
    for row in rows.values():
        assert (
            all(0 < float(figure.split()[0]) < math.inf for figure in row[4:6])
            and float(row[6]) < 1e-4
        )
    assert rows["decode", "torch"][1] == "3 x 20" and "'flash_attn' cannot run here" in done.stderr


@pytest.mark.parametrize("option", ["--num-seqs", "--context-len", "--prompt-len", "--dtype"])
def test_bad_options_of_the_kernels(option, capsys):
    assert option in expect_rejection(kernels_bench.main, [option, "0"], capsys)


def skip_a_row(query, *arguments):
    output = torch.full_like(query, torch.nan)  # as memory may be
    output[:-1] = oracle.attend(query, *arguments)[:-1]
    return output


def zero_a_row(query, *arguments):
    output = oracle.attend(query, *arguments)
    output[-1, -1] = 0.0
    return output


def shift_blocks(key, value, kv_cache, slot_mapping):
    oracle.store_kvcache(key, value, kv_cache, slot_mapping.roll(1))


def store_too_much(key, value, kv_cache, slot_mapping):
    oracle.store_kvcache(key, value, kv_cache, slot_mapping)
    slots = kv_cache.flatten(1, 2)  # [2, num_slots, num_kv_heads, head_dim]
    foreign = set(range(slots.shape[1])) - set(slot_mapping.tolist())
    slots[:, foreign.pop()] = 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "query_len, changes, complaint",
    [
        (1, {"attend": skip_a_row}, "an error of nan"),
        (1, {"attend": zero_a_row}, "an error of"),
        (40, {"attend": skip_a_row}, "an error of nan"),
        (40, {"attend": zero_a_row}, "an error of"),
        (40, {"store_kvcache": shift_blocks}, "outside slot_mapping"),
        (1, {"store_kvcache": store_too_much}, "outside slot_mapping"),
    ],
)
def test_wrong_kernels_are_rejected(query_len, changes, complaint, dtype):
    shape = Shape(2, 40, query_len, *QWEN3_HEADS, block_size=16)
    tolerance = TOLERANCES[str(dtype).removeprefix("torch.")]
    settings = (shape, torch.device("cpu"), dtype, tolerance)
    compare_with_torch(oracle, *settings)
    wrong = SimpleNamespace(NAME="wrong", store_kvcache=oracle.store_kvcache, attend=oracle.attend)
    vars(wrong).update(changes)
    with pytest.raises(RuntimeError, match=f"wrong: .*{complaint}"):
        compare_with_torch(wrong, *settings)


@pytest.mark.parametrize("query_len", [1, 40])
def test_either_kernel_is_timed_alone(query_len):
    """A batch without decodes launches one kernel of Triton's two, a batch of decodes the other."""
    batch = make_batch(Shape(2, 40, query_len, *QWEN3_HEADS, block_size=16), torch.Generator())
    assert batch.min_seqlen_q == batch.max_seqlen_q == query_len
