"""The benchmark of the kernels runs, says what it ran, and tells right kernels from wrong ones."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from nanovllm.kernels.bench import check, oracle

ROOT = Path(__file__).parent.parent


def bench(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "nanovllm.kernels.bench", *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}  # its kernels, interpreted, are too slow to time
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_table_and_json() -> None:
    done = bench("--num-seqs", "3", "--context-len", "20", "--prompt-len", "50", "--dtype", "float32", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    rows = {(row["kernel"], row["backend"]): row for row in report["kernels"]}
    assert rows.keys() >= {(kernel, "torch") for kernel in ("store_kvcache", "decode", "prefill")}
    for row in rows.values():
        assert all(0 < row[figure] < math.inf for figure in ("seconds", "rate")) and row["max_error"] < 1e-4
        assert row["share"] is None or 0 < row["share"] <= 1
    assert "| decode | 3 x 20 | torch | float32 |" in done.stderr and "flash_attn" in done.stderr


@pytest.mark.parametrize("option", ["--num-seqs", "--context-len", "--prompt-len", "--dtype"])
def test_bad_options(option: str) -> None:
    done = bench(option, "0")
    assert done.returncode == 2 and option in done.stderr


def skip_a_row(query: Tensor, *arguments) -> Tensor:
    output = torch.empty_like(query)
    output[:-1] = oracle.attend(query, *arguments)[:-1]
    return output


def zero_a_row(query: Tensor, *arguments) -> Tensor:
    output = oracle.attend(query, *arguments)
    output[-1, -1] = 0.0
    return output


def shift_blocks(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    oracle.store_kvcache(key, value, kv_cache, slot_mapping.roll(1))


def store_too_much(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    oracle.store_kvcache(key, value, kv_cache, slot_mapping)
    slots = kv_cache.flatten(1, 2)  # [2, num_slots, num_kv_heads, head_dim]
    foreign = set(range(slots.shape[1])) - set(slot_mapping.tolist())
    slots[:, foreign.pop()] = 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kernel, changes, complaint",
    [
        ("decode", {"attend": skip_a_row}, "off by nan"),
        ("decode", {"attend": zero_a_row}, "off by"),
        ("prefill", {"attend": skip_a_row}, "off by nan"),
        ("prefill", {"attend": zero_a_row}, "off by"),
        ("prefill", {"store_kvcache": shift_blocks}, "off by"),
        ("store_kvcache", {"store_kvcache": shift_blocks}, "off by"),
        ("store_kvcache", {"store_kvcache": store_too_much}, "slots"),
    ],
)
def test_wrong_kernels_are_refused(
    kernel: str, changes: dict[str, Callable[..., object]], complaint: str, dtype: torch.dtype
) -> None:
    device = torch.device("cpu")
    check(kernel, oracle, 2, 40, 16, dtype, device)
    wrong = SimpleNamespace(NAME="wrong", store_kvcache=oracle.store_kvcache, attend=oracle.attend)
    vars(wrong).update(changes)
    with pytest.raises(RuntimeError, match=f"wrong: .*{complaint}"):
        check(kernel, wrong, 2, 40, 16, dtype, device)
