"""bench.py runs, says what it ran, and compares engines on the same work."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TINY = ["--num-seqs", "5", "--input-len", "4", "20", "--output-len", "3", "9"]


def bench(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "bench.py", *arguments], cwd=ROOT, capture_output=True, text=True)


def test_engines_side_by_side() -> None:
    done = bench("--model", "nanovllm/demo_model", *TINY, "--engine", "nanovllm", "transformers", "--repeat", "2", "--json")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    assert 15 <= report["output_tokens"] <= 45 and 20 <= report["prompt_tokens"] <= 100
    assert {name: len(seconds) for name, seconds in report["seconds"].items()} == {"nanovllm": 2, "transformers": 2}
    assert report["ratios"]["nanovllm/transformers"] > 0 and report["hardware"] and report["versions"]["torch"]


def test_built_in_shape_and_shared_prefix() -> None:
    done = bench("--model", "small", *TINY, "--shared-prefix", "32", "--set", "num_kvcache_blocks=64")
    assert done.returncode == 0, done.stderr
    assert "num_cached_tokens 128" in done.stdout and "output tok/s" in done.stdout


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--input-len", "9", "3"], "--input-len"),
        (["--set", "max_num_seq=3"], "max_num_seq"),
        (["--engine", "tgi"], "tgi"),
        (["--model", "./nowhere"], "no such directory"),
    ],
)
def test_bad_options(arguments: list[str], complaint: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 2 and complaint in done.stderr
