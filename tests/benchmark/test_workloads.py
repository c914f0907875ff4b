"""The workloads of bench.py are those of other projects, and report what these publish.

They run with small models, and with a sixteenth of their tokens.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import make_checkpoint
from project_helpers import reject
from transformers import Gemma3TextConfig

from bench import main
from nanovllm import DEMO_MODEL
from nanovllm.benchmark import roofline
from nanovllm.benchmark.arguments import make_parser
from nanovllm.benchmark.report import report_memory
from nanovllm.benchmark.roofline import PeakRates
from nanovllm.benchmark.setting import make_settings
from nanovllm.benchmark.workloads import WORKLOADS, choose_workload, make_requests

TINY = ["--model", DEMO_MODEL, "--set", "device=cpu"]
SCALE = 16


@pytest.fixture(autouse=True)
def fixed_peak_rates(monkeypatch):
    peak = PeakRates(1e12, 1e12, "float32")
    monkeypatch.setattr(roofline, "measure_peak_rates", lambda *_: peak)


def shrink(bounds):
    return tuple(max(1, bound // SCALE) for bound in bounds)


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a workload with a sixteenth of its tokens. Return the line of JSON and the text."""
    for name, workload in WORKLOADS.items():
        cases = tuple(
            case._replace(
                input_len=shrink(case.input_len),
                output_len=shrink(case.output_len),
                num_seqs=min(case.num_seqs, 16),
                shared_prefix=case.shared_prefix // SCALE,
            )
            for case in workload.cases
        )
        monkeypatch.setitem(WORKLOADS, name, workload._replace(cases=cases))

    def run(name, *arguments):
        main(["--workload", name, "--json", *arguments])
        output, log = capsys.readouterr()
        return json.loads(output), log

    return run


def test_lengths_of_nano_vllm_are_those_of_its_readme():
    """It reports 133,966 output tokens, and in a later version 142,827 prompt tokens."""
    args = make_parser().parse_args(["--workload", "nano-vllm"])
    choose_workload(args)
    (case,) = args.cases
    requests = make_requests(case, 151936, 0)
    assert len(requests) == 256
    assert sum(request.num_tokens for request in requests) == 133_966
    assert sum(len(request.prompt) for request in requests) == 142_827


def check_report(name, report, log):
    tests = report.get("tests", {"": report})
    assert list(tests) == [case.title for case in WORKLOADS[name].cases]
    for test in tests.values():
        for seconds in test["seconds"].values():
            assert len(seconds) == WORKLOADS[name].repeat
    assert WORKLOADS[name].reading in log
    assert "anonymous memory" in log


CHECKED_BELOW = ("llama-bench-depth", "multi-turn")


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name not in CHECKED_BELOW])
def test_every_workload_runs(name, run):
    check_report(name, *run(name, *TINY))


def test_context_of_llama_bench_is_computed_before(run):
    report, log = run("llama-bench-depth", *TINY)
    check_report("llama-bench-depth", report, log)
    for depth, test in zip((64, 512, 2000), report["tests"].values(), strict=True):
        assert test["prompt_tokens"] == 1
        (stats,) = test["stats_of_last_run"].values()
        assert depth - 16 <= stats["num_cached_tokens"] <= depth


def test_models_are_compared_with_their_own_rooflines(run, monkeypatch, tmp_path):
    """A layer with full attention reads the whole context, and one with a window does not."""
    models = (str(tmp_path / "full"), str(tmp_path / "windows"))
    for model, kind in zip(models, ("full_attention", "sliding_attention")):
        options = {"layer_types": [kind] * 2, "sliding_window": 16}
        make_checkpoint(
            Path(model), family=Gemma3TextConfig, max_position_embeddings=2048, **options
        )
    workload = WORKLOADS["llama-bench-depth"]._replace(models=models)
    monkeypatch.setitem(WORKLOADS, "llama-bench-depth", workload)
    report, _ = run("llama-bench-depth", "--set", "device=cpu")
    least = [test["roofline"]["seconds"] for test in report["tests"].values()]
    assert all(set(seconds) == set(models) for seconds in least)
    assert least[2][models[0]] > 2 * least[0][models[0]]
    assert least[2][models[1]] == least[0][models[1]]
    for stats in report["tests"]["tg128 @ d8192"]["stats_of_last_run"].values():
        assert stats["num_cached_tokens"] >= 512 - 16


def test_a_turn_computes_only_its_message_with_the_prefix_cache(run):
    report, log = run("multi-turn", *TINY)
    check_report("multi-turn", report, log)
    cached = [
        [stats["num_cached_tokens"] for stats in test["stats_of_last_run"].values()]
        for test in report["tests"].values()
    ]
    for turn, (with_cache, without_cache) in enumerate(cached):
        assert 24 * turn - 16 < with_cache <= 24 * turn
        assert without_cache == 0


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_fit_their_models(name, tmp_path):
    args = make_parser().parse_args(["--workload", name, "--set", "device=cpu"])
    workload = choose_workload(args)
    for setting in make_settings(args, workload, str(tmp_path)).values():
        limit = setting.hf_config.max_position_embeddings
        assert setting.options["max_model_len"] <= limit


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ("--workload llama-bench --num-seqs 3", "--workload llama-bench.*--num-seqs"),
        ("--workload moe --request-rate 2", "--workload moe.*--request-rate"),
        ("--workload moe --token-budget 8", "--token-budget.*--request-rate"),
        (
            "--workload multi-turn --set enable_prefix_caching=False",
            "--workload multi-turn.*enable_prefix_caching",
        ),
    ],
)
def test_options_that_a_workload_fixes_are_rejected(arguments, complaint, capsys):
    message = reject(capsys, main, [*arguments.split(), *TINY])
    assert re.search(complaint, message, flags=re.DOTALL)


# --- What every run reports


def test_memory_is_that_of_all_processes_without_files(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(100_000_000))
    before = report_memory()["anonymous_memory_mb"]
    mapped = torch.from_file(str(path), size=100_000_000, dtype=torch.uint8)
    assert mapped.max() == 0
    code = "block = bytearray(b'1' * 100_000_000); print(flush=True); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as child:
        child.stdout.readline()
        during = report_memory()["anonymous_memory_mb"]
        child.stdin.close()
    assert 95 < during - before < 130
