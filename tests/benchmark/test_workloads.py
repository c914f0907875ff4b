"""The workloads of bench.py are those of other projects, and report what these publish.

They run with small models, and with a sixteenth of their tokens.
"""

import json
from pathlib import Path

import pytest
from conftest import make_checkpoint
from transformers import Gemma3TextConfig

from bench import main
from nanovllm import DEMO_MODEL
from nanovllm.benchmark import roofline
from nanovllm.benchmark.arguments import list_variants, make_parser
from nanovllm.benchmark.roofline import PeakRates
from nanovllm.benchmark.workloads import SHAPES, WORKLOADS, make_requests
from nanovllm.checkpoints.checkpoint import read_config

TINY = ["--model", DEMO_MODEL, "--set", "device=cpu"]
SCALE = 16


@pytest.fixture(autouse=True)
def fixed_peak_rates(monkeypatch):
    peak = PeakRates(1e12, 1e12, "float32")
    monkeypatch.setattr(roofline, "measure_peak_rates", lambda *_: peak)


def parse(line):
    return make_parser().parse_args(line.split())


def shrink(line):
    """Divide the lengths of a command line. At most 16 requests are left."""
    args = parse(line)
    lengths = [max(1, bound // SCALE) for bound in (*args.input_len, *args.output_len)]
    return (
        f"{line} --num-seqs {min(args.num_seqs, 16)} --cached-prefix {args.cached_prefix // SCALE}"
        " --input-len {} {} --output-len {} {}".format(*lengths)
    )


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a workload with a sixteenth of its tokens. Return the lines of JSON and the text."""
    for name, workload in WORKLOADS.items():
        lines = {title: shrink(line) for title, line in workload.lines.items()}
        monkeypatch.setitem(WORKLOADS, name, workload._replace(lines=lines))

    def run(name, *arguments):
        main(["--workload", name, "--json", *arguments])
        output, log = capsys.readouterr()
        reports = [json.loads(line) for line in output.splitlines()]
        assert [report["title"] for report in reports] == list(WORKLOADS[name].lines)
        assert WORKLOADS[name].reading in log
        return reports

    return run


def test_lengths_of_nano_vllm_are_those_of_its_readme():
    """It reports 133,966 output tokens, and in a later version 142,827 prompt tokens."""
    requests = make_requests(parse(WORKLOADS["nano-vllm"].lines[""]), 151936, 0)
    assert len(requests) == 256
    assert sum(request.num_tokens for request in requests) == 133_966
    assert sum(len(request.prompt) for request in requests) == 142_827


def test_runs_have_the_same_lengths_and_no_common_prefix():
    args = parse("--num-seqs 20 --input-len 1 9 --output-len 1 9 --shared-prefix 3")
    first, second = (make_requests(args, 1000, run) for run in (1, 2))
    for one, other in zip(first, second, strict=True):
        assert (len(one.prompt), one.num_tokens) == (len(other.prompt), other.num_tokens)
        assert one.prompt[:3] == first[0].prompt[:3] != other.prompt[:3]


@pytest.mark.parametrize("name", ["quick", "nano-vllm", "llama-bench", "moe"])
def test_every_workload_runs(name, run):
    for line, report in zip(WORKLOADS[name].lines.values(), run(name, *TINY), strict=True):
        assert len(report["runs"]) == parse(line).repeat


def test_options_replace_those_of_a_workload(run):
    (report,) = run("quick", *TINY, "--num-seqs", "3", "--output-len", "2", "2")
    assert report["runs"][0]["output_tokens"] == 3 * 2


def test_context_of_llama_bench_is_computed_before(run):
    reports = run("llama-bench-depth", *TINY)
    for depth, report in zip((64, 512, 2000) * 2, reports, strict=True):
        (measured,) = report["runs"]
        assert measured["prompt_tokens"] == 1
        assert depth - 16 <= measured["stats"]["num_cached_tokens"] <= depth


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_a_window_bounds_the_roofline_of_a_context(run, tmp_path, kind):
    """A layer with full attention reads the whole context, and one with a window does not."""
    options = {"layer_types": [kind] * 2, "sliding_window": 16}
    make_checkpoint(tmp_path, family=Gemma3TextConfig, max_position_embeddings=2048, **options)
    reports = run("llama-bench-depth", "--model", str(tmp_path), "--set", "device=cpu")
    least = [report["runs"][0]["roofline_seconds"] for report in reports]
    if kind == "full_attention":
        assert least[2] > 2 * least[0]
    else:
        assert least[2] == least[0]
    for depth, report in zip((64, 512, 2000), reports):
        assert report["runs"][0]["stats"]["num_cached_tokens"] >= depth - 16


def test_a_turn_computes_only_its_message_with_the_prefix_cache(run):
    reports = run("multi-turn", *TINY)
    cached = [report["runs"][0]["stats"]["num_cached_tokens"] for report in reports]
    for turn in range(5):
        assert max(0, 24 * turn - 16) <= cached[2 * turn] <= 24 * turn
        assert cached[2 * turn + 1] == 0


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_fit_their_models(name):
    for line in WORKLOADS[name].lines.values():
        args = parse(line)
        (options,) = list_variants(args).values()
        config = read_config(Path(SHAPES[args.model]))
        assert options["max_model_len"] <= config.max_position_embeddings
