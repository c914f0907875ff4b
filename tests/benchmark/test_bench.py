"""bench.py and kernels/bench.py measure what they report, detect wrong kernels and reject options.

Peak rates take a second to measure. They are measured for real only where a process is started.
"""

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from conftest import make_shape
from project_helpers import ROOT, reject, start
from transformers import Qwen3_5TextConfig, Qwen3Config, Qwen3MoeConfig

from bench import main
from nanovllm import DEMO_MODEL
from nanovllm.benchmark import roofline
from nanovllm.benchmark.engines import NanoVLLM
from nanovllm.benchmark.roofline import PeakRates
from nanovllm.benchmark.workloads import Request
from nanovllm.checkpoints.quantization import FP8, GPTQ, Quantization
from nanovllm.kernels import bench as kernels_bench
from nanovllm.kernels.bench import TOLERANCES
from nanovllm.kernels.self_tests import BatchShape, compare_with_torch
from nanovllm.layers import attention as reference
from nanovllm.layers.quantized import INT4, INT8
from nanovllm.models.architectures import read_spec

SIZES = ["--num-seqs", "5", "--input-len", "4", "20", "--output-len", "2", "5"]
TINY = [*SIZES, "--model", DEMO_MODEL, "--set", "device=cpu"]
SMALL_SHAPE = {
    "vocab_size": 10,
    "num_hidden_layers": 3,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
}
QWEN3 = Qwen3Config(**SMALL_SHAPE, architectures=["Qwen3ForCausalLM"])
REQUESTS = [Request([1, 2, 3, 4], 3), Request([1, 2], 2)]
CPU = torch.device("cpu")
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def fixed_peak_rates(monkeypatch):
    peak = PeakRates(1e12, 1e12, "float32")
    monkeypatch.setattr(roofline, "measure_peak_rates", lambda *_: peak)


# --- Throughput


def test_command_runs_a_built_in_shape():
    sizes = ["--num-seqs", "2", "--input-len", "4", "4", "--output-len", "2", "2"]
    done = start(ROOT / "bench.py", "--model", "small", *sizes, "--set", "num_kvcache_blocks=64")
    assert done.returncode == 0, done.stderr
    assert "tok/s" in done.stdout


def test_engines_are_compared_on_the_same_work(capsys):
    shared = ["--shared-prefix", "32", "--repeat", "2"]
    main([*TINY, *shared, "--engine", "nanovllm", "transformers", "--json"])
    output, log = capsys.readouterr()
    report = json.loads(output)  # nothing else is on stdout
    runs = report["runs"]
    assert sorted(run["engine"] for run in runs) == ["nanovllm"] * 2 + ["transformers"] * 2
    for run in runs:
        assert 5 * (32 + 4) <= run["prompt_tokens"] <= 5 * (32 + 20)
        assert 5 * 2 <= run["output_tokens"] <= 5 * 5
        assert run["output_tokens_per_second"] == run["output_tokens"] / run["seconds"]
        assert run["share_of_roofline"] == run["roofline_seconds"] / run["seconds"]
    for median in report["medians"]:
        first, second = [run["seconds"] for run in runs if run["engine"] == median["engine"]]
        assert median["seconds"] == pytest.approx((first + second) / 2)
    nanovllm, transformers = [median["seconds"] for median in report["medians"]]
    assert report["ratios"] == {"nanovllm/transformers": transformers / nanovllm}
    assert runs[0]["stats"]["num_cached_tokens"] == 4 * 32
    assert "one static batch" in report["transformers"]
    assert report["hardware"]
    assert report["versions"]["torch"]
    assert "of roofline" in log


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--input-len", "9", "3"], "--input-len"),
        (["--input-len", "0", "3"], "--input-len"),
        (["--num-seqs", "1000000000"], "--num-seqs"),
        (["--repeat", "0"], "--repeat"),
        (["--temperature", "nan"], "temperature"),
        (["--shared-prefix", "5000"], "max_model_len=5025"),
        (["--set", "max_model_len=4"], "max_model_len"),
        (["--set", "num_kvcache_blocks=1"], "num_kvcache_blocks"),
        (["--set", "max_num_seq=3"], "max_num_seq"),
        (["--model", "./nowhere"], "directory"),
        (["--request-rate", "nan"], "--request-rate"),
        (["--request-rate", "1", "--engine", "transformers"], "--engine"),
        (["--request-rate", "1", "--set", "enable_chunked_prefill=False"], "leave it out"),
        (["--token-budget", "64"], "needs --request-rate"),
    ],
)
def test_invalid_options_are_named(arguments, complaint, capsys):
    assert complaint in reject(capsys, main, [*TINY, *arguments])


STAND_IN = """
from dataclasses import dataclass

@dataclass
class SamplingParams:
    temperature: float
    max_tokens: int
    ignore_eos: bool

class LLM:
    def __init__(self, model, gpu_memory_utilization, **options):
        assert options["max_model_len"] > 0
        self.share = gpu_memory_utilization

    def generate(self, prompts, params, use_tqdm):
        return [
            {"token_ids": [prompt[0]] * each.max_tokens, "share": self.share}
            for prompt, each in zip(prompts, params)
        ]
"""


def test_a_checkout_of_nano_vllm_runs_in_its_own_process(tmp_path, monkeypatch, capsys):
    """Its package has the name of ours."""
    package = tmp_path / "nanovllm"
    package.mkdir()
    (package / "__init__.py").write_text(STAND_IN)
    engine = ["--engine", "nano-vllm", "nanovllm", "--nano-vllm", str(tmp_path)]
    assert "no checkout of nano-vLLM" in reject(capsys, main, [*TINY, *engine])
    (package / "llm.py").touch()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3, 4))
    main([*TINY, *engine, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["ratios"].keys() == {"nano-vllm/nanovllm"}


def test_error_of_a_run_is_not_reported_as_an_invalid_option(monkeypatch):
    def run(*_):
        raise ValueError("raised by a run")

    monkeypatch.setattr(NanoVLLM, "run", run)
    with pytest.raises(ValueError, match="raised by a run"):
        main(TINY)


# --- Roofline


def test_peak_rates_are_measured_before_engines_take_the_memory(monkeypatch, capsys):
    calls = []

    def measure(*_):
        calls.append("peak rates")

    def make_engine(*_):
        calls.append("engine")
        raise ValueError

    monkeypatch.setattr(roofline, "measure_peak_rates", measure)
    monkeypatch.setattr(NanoVLLM, "__init__", make_engine)
    reject(capsys, main, TINY)
    assert calls == ["peak rates", "engine"]


SLOW_PROCESSOR = PeakRates(1e9, 1e3, "bfloat16")
SLOW_MEMORY = PeakRates(1e3, 1e6, "bfloat16")


@pytest.mark.parametrize(
    "shared_prefix, dtype, peak, seconds",
    [
        (0, BFLOAT16, SLOW_PROCESSOR, 22.304 + 8.0 + 4.192),
        (1, FLOAT32, SLOW_MEMORY, 7.328 + 7.808 + 7.712),
    ],
)
def test_roofline_counts_necessary_flops_and_bytes(shared_prefix, dtype, peak, seconds):
    """The terms are those of the prefill and of two decode steps, in thousands.

    Weights: 3 layers * (q, o 2 * 8 * 8, k, v 2 * 8 * 4, MLP 3 * 8 * 16) = 1728; head: 8 * 10 = 80.
    Query-context pair: 2 * 2 * 3 layers * 2 heads * 4 = 96 FLOPs.
    K/V of a token: 2 * 3 layers * 4 = 24 numbers.
    Prefill: 2 * 1728 * 6 + 2 * 80 * 2 + 96 * (1 + 2 + 3 + 4 + 1 + 2) = 22,304 FLOPs.
    Decodes with contexts of 5 and 3: 2 * 1808 * 2 + 96 * 8 FLOPs, 1808 + 24 * 6 numbers.
    Decode with a context of 6: 2 * 1808 + 96 * 6 FLOPs, 1808 + 24 * 5 numbers.
    The prefill reads 1808 numbers. If a token is shared, it reads 24 more.
    """
    spec = read_spec(QWEN3, dtype, 1)
    least = roofline.compute_roofline_seconds(spec, REQUESTS, shared_prefix, 0, peak)
    assert least == pytest.approx(seconds)


@pytest.mark.parametrize(
    "shared_prefix, peak, seconds",
    [
        (1, SLOW_PROCESSOR, 18.72 + 7.936 + 4.096),
        (0, SLOW_MEMORY, 3.616 + 3.872 + 3.808),
    ],
)
def test_roofline_counts_only_the_window_of_a_layer(shared_prefix, peak, seconds):
    """As above, but one of the layers has a window of 3 tokens. A pair has 32 FLOPs in each layer.

    Prompts of 4 and 2 tokens have 1 + 2 + 3 + 3 + 1 + 2 pairs there, and 1 less if it is shared.
    The first decodes have contexts of 5 and 3 tokens. They attend to 2 to 4 and 0 to 2, and read 4
    tokens. The last decode reads 2 tokens.
    """
    spec = replace(read_spec(QWEN3, BFLOAT16, 1), windows=(None, 3, None))
    least = roofline.compute_roofline_seconds(spec, REQUESTS, shared_prefix, 0, peak)
    assert least == pytest.approx(seconds)


def test_roofline_does_not_compute_a_cached_prefix():
    """As above, but the shared token is cached.

    Prefill: 2 * 1728 * 4 + 2 * 80 * 2 + 96 * (2 + 3 + 4 + 2) = 15,200 FLOPs.
    It reads 2 * (1808 + 24 * 2) bytes.
    """
    spec = read_spec(QWEN3, BFLOAT16, 1)
    count = partial(roofline.compute_roofline_seconds, spec, REQUESTS, 1, 1)
    assert count(SLOW_PROCESSOR) == pytest.approx(15.2 + 8.0 + 4.192)
    assert count(SLOW_MEMORY) == pytest.approx(3.712 + 3.904 + 3.856)


def test_roofline_counts_recurrent_states():
    """A decode step reads and writes the states of a sequence, and reads K/V of one layer.

    Weights: 2 layers with states * (8 * (2 * 4 + 12) qkv, 8 * 12 gate, 2 * 8 * 2 beta and decay,
    12 * 8 out) = 768; attention: q with gate 8 * 16, k, v 2 * 8 * 4, o 8 * 8 = 256; MLPs:
    3 layers * 3 * 8 * 16 = 1152; head: 80.
    K/V of a token: 2 * 4 = 8 numbers. State: 2 layers * (2 * 12 + (4 - 1) * (2 * 4 + 12)) = 168.
    Prefill: 2 bytes * 2256 + 168 * 2 sequences * 4 bytes = 5856, which take longer than its FLOPs.
    Decode: 2 bytes * (2256 + 8 * 6) + 2 * 168 * 2 sequences * 4 bytes = 7296.
    """
    config = Qwen3_5TextConfig(
        **SMALL_SHAPE,
        architectures=["Qwen3_5ForCausalLM"],
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=2,
        linear_value_head_dim=6,
    )
    requests = [Request([1, 2, 3, 4], 2), Request([1, 2], 2)]
    spec = read_spec(config, BFLOAT16, 1)
    least = roofline.compute_roofline_seconds(spec, requests, 0, 0, SLOW_MEMORY)
    assert least == pytest.approx(5.856 + 7.296)


def test_roofline_counts_the_experts_of_a_token():
    """In each of 3 layers a token uses attention, the router, and 2 of 6 experts."""
    config = Qwen3MoeConfig(
        **SMALL_SHAPE,
        architectures=["Qwen3MoeForCausalLM"],
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    )
    dense = 3 * (2 * 8 * 8 + 2 * 8 * 4 + 8 * 6)
    sizes = roofline.find_sizes(read_spec(config, BFLOAT16, 1))
    assert sizes.count_used(1) == pytest.approx(dense + 3 * 2 * 3 * 8 * 16)
    # Of two tokens, the second finds each of its experts unused with probability 4/6.
    assert sizes.count_used(2) == pytest.approx(dense + 3 * (2 + 2 * 4 / 6) * 3 * 8 * 16)
    assert sizes.count_used(1000) == pytest.approx(dense + 3 * 6 * 3 * 8 * 16)


def compute_seconds_of_weights(peak, quantization=None, num_tokens=4, **numbers):
    """Of a step of one prompt that has only these weights."""
    sizes = dict(dense=0, experts=0, used_share=1.0, head=0, state=0, attention=Counter())
    spec = SimpleNamespace(quantization=quantization or Quantization(), dtype=BFLOAT16)
    sizes = roofline.ModelSizes(**{**sizes, **numbers})
    return roofline.compute_step_seconds(spec, sizes, [(0, num_tokens)], peak)


def test_roofline_reads_the_experts_of_all_tokens_and_multiplies_by_those_of_each():
    """A token uses 25 of 100 weights. At least one of four tokens uses 68.36 of them."""
    experts = dict(experts=100, used_share=0.25)
    assert compute_seconds_of_weights(SLOW_MEMORY, **experts) == pytest.approx(0.13672, rel=1e-4)
    assert compute_seconds_of_weights(SLOW_PROCESSOR, **experts) == pytest.approx(0.2)


def test_a_step_is_bound_by_flops_or_by_bytes_as_a_whole():
    """Layers of 16,000 FLOPs and 2,000 bytes, and a head of 2,000 FLOPs and 2,000 bytes."""
    peak = PeakRates(1e3, 4e3, "bfloat16")
    assert compute_seconds_of_weights(peak, dense=1000, head=1000, num_tokens=8) == 18 / 4


def test_roofline_reads_a_head_in_its_own_format():
    """Codes of 8 bits take 1 byte, and 6 bytes for 128 of them."""
    head = dict(head=128, num_tokens=1)
    in_int8 = Quantization(INT4, INT8)
    assert compute_seconds_of_weights(SLOW_MEMORY, in_int8, **head) == pytest.approx(0.134)
    stored = GPTQ(bits=4, group_size=64, is_symmetric=True)
    kept = Quantization(format=stored)
    assert compute_seconds_of_weights(SLOW_MEMORY, kept, **head) == pytest.approx(0.256)


def test_roofline_counts_what_the_option_quantizes():
    """Also weights whose codes are read as floats, but not those whose codes are kept."""
    spec = read_spec(QWEN3, BFLOAT16, 1)
    requests = [Request([1, 2, 3, 4], 3)]

    def count(quantization):
        quantized = replace(spec, quantization=quantization)
        return roofline.compute_roofline_seconds(quantized, requests, 0, 0, SLOW_MEMORY)

    of_option = Quantization(INT4, INT8)
    assert count(replace(of_option, format=FP8())) == count(of_option) < count(Quantization())
    kept = GPTQ(bits=8, group_size=128, is_symmetric=True)
    assert count(of_option) < count(replace(of_option, format=kept)) < count(Quantization())


@pytest.mark.parametrize(
    "dtype, rates, fastest",  # rates: FLOP/s of small and of large GEMMs in each dtype
    [
        (BFLOAT16, {BFLOAT16: (6e8, 6e8), FLOAT32: (5e10, 7e10)}, FLOAT32),
        (FLOAT32, {BFLOAT16: (6e11, 8e11), FLOAT32: (1e11, 1e11)}, FLOAT32),
        (BFLOAT16, {BFLOAT16: (6e10, 8e11), FLOAT32: (5e10, 7e10)}, BFLOAT16),
    ],
)
def test_peak_flops_are_those_of_the_fastest_dtype(dtype, rates, fastest, monkeypatch):
    """A model in float32 is not rounded to 16 bits. No large GEMM runs in a slow dtype."""
    seconds = 0.0

    def time_best(statement, left, right):
        nonlocal seconds
        assert left.dtype == right.dtype
        small, large = rates[left.dtype]
        side = len(left)
        one_call = 2 * side**3 / (large if side > 512 else small)
        seconds += one_call
        return one_call

    monkeypatch.setattr(roofline, "time_best", time_best)
    rate, found = roofline.find_matmul_rate(CPU, dtype)
    assert found == fastest
    assert rate == pytest.approx(rates[fastest][1])
    assert seconds < 1.0


# --- Single kernels


def test_kernels_are_timed(monkeypatch, capsys):
    """Every call takes 100 ms on this clock."""
    clock = count()
    monkeypatch.setattr(kernels_bench.time, "perf_counter", lambda: next(clock) / 10)
    monkeypatch.setattr(kernels_bench, "BACKENDS", ["flash_attn", "torch"])
    layers = {"full": make_shape(16, 8, 128), "window": make_shape(16, 8, 128, window=10)}
    monkeypatch.setattr(kernels_bench, "LAYERS", layers)
    monkeypatch.setattr(kernels_bench, "BATCHES", {"cpu": [(1, 50, 50), (3, 20, 1)]})
    kernels_bench.measure("float32", CPU)
    output, log = capsys.readouterr()
    assert "| full | 1 x 50 | 50 | torch | float32 | 100 ms | 0 |" in output
    assert "| window | 3 x 20 | 1 | torch | float32 | 100 ms | 0 |" in output
    assert "flash_attn" in log


def skip_a_row(query, *arguments):
    output = torch.full_like(query, torch.nan)  # as uninitialized memory can be
    output[:-1] = reference.attend(query, *arguments)[:-1]
    return output


def shift_slots(key, value, kv_cache, slot_mapping):
    reference.store_kvcache(key, value, kv_cache, slot_mapping.roll(1))


def store_too_much(key, value, kv_cache, slot_mapping):
    reference.store_kvcache(key, value, kv_cache, slot_mapping)
    slots = kv_cache.flatten(1, 2)  # [2, num_slots, num_kv_heads, head_dim]
    foreign = set(range(slots.shape[1])) - set(slot_mapping.tolist())
    slots[:, foreign.pop()] = 1.0


@pytest.mark.parametrize(
    "query_len, dtype, name, kernel, complaint",
    [
        (1, FLOAT32, "attend", skip_a_row, "error of nan"),
        (40, FLOAT32, "store_kvcache", shift_slots, "error of"),
        (1, BFLOAT16, "store_kvcache", store_too_much, "slot_mapping"),
    ],
)
def test_wrong_kernels_are_detected(query_len, dtype, name, kernel, complaint):
    shape = BatchShape(2, 40, query_len, block_size=16)
    tolerance = TOLERANCES[str(dtype).removeprefix("torch.")]
    compare_with_torch(reference, make_shape(), shape, CPU, dtype, tolerance)
    wrong = SimpleNamespace(**{**vars(reference), "NAME": "wrong", name: kernel})
    with pytest.raises(RuntimeError, match=f"wrong: .*{complaint}"):
        compare_with_torch(wrong, make_shape(), shape, CPU, dtype, tolerance)
