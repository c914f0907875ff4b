"""Throughput of nanovllm, alone or beside transformers and vLLM, on the same prompts and lengths.

    python bench.py                                             a workload that suits this machine
    python bench.py --engine nanovllm transformers --repeat 3   alternating runs, then the ratio of their medians
    python bench.py --kernels                                   the attention kernels, and a decode step's profile

A run is one batch of requests, all there from the start, timed until the last has its last token. Loading and warming up
are not timed. Every run has token ids of its own, so that no prefix cache can remember an earlier one.

What is measured is set against a roofline (Williams et al. 2009): the memory bandwidth and the matrix rate of this very
machine, and so the least time that the same bytes and operations could take.
"""

import argparse
import ast
import cProfile
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import DeviceType
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, Qwen3Config

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.engine.batch import Batch
from nanovllm.layers.attention import select_backend
from nanovllm.layers.attention import torch as torch_backend
from nanovllm.models.checkpoint import LOCAL, find_checkpoint, read_config

SHAPES: dict[str, dict[str, Any]] = {  # config.json of models that run with random weights
    "qwen3-0.6b": {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    },
    "small": {
        "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096,
    },
}  # fmt: skip
COMMON: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16", "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
ON_GPU = {"model": "qwen3-0.6b", "num_seqs": 256, "input_len": [100, 1024], "output_len": [100, 1024]}  # nano-vLLM's
ON_CPU = {"model": "small", "num_seqs": 32, "input_len": [32, 256], "output_len": [32, 256]}
WORKLOAD = ("num_seqs", "input_len", "output_len", "shared_prefix", "temperature", "seed")
OPTIONS_OF_VLLM = (  # those of nanovllm's that mean the same there
    "dtype", "seed", "load_format", "tensor_parallel_size", "max_model_len", "max_num_batched_tokens", "max_num_seqs",
    "gpu_memory_utilization", "enable_prefix_caching", "enable_chunked_prefill", "enforce_eager",
)  # fmt: skip


class Request(NamedTuple):
    prompt: list[int]
    num_tokens: int  # to generate


class Engine:
    """What is timed: made from a checkpoint directory, nanovllm's options (the others take what they know) and `args`."""

    description: str
    stats: dict[str, int] = {}  # of the last run

    def run(self, requests: list[Request]) -> list[list[int]]:
        """The generated token ids of each request."""
        raise NotImplementedError

    def warm_up(self, requests: list[Request]) -> None:
        self.run([Request(prompt, min(num_tokens, 8)) for prompt, num_tokens in requests[:8]])

    def close(self) -> None:
        """Give back what outlives the object."""


class NanoVLLM(Engine):
    def __init__(self, model: str, options: dict[str, Any], args: argparse.Namespace) -> None:
        self.llm = LLM(model, **options)
        self.temperature = args.temperature
        backend = self.llm.model_runner.backend.__name__.rpartition(".")[2]
        self.description = f"{backend} attention, {self.llm.stats['num_blocks']} blocks of KV cache"

    def run(self, requests: list[Request]) -> list[list[int]]:
        params = [SamplingParams(temperature=self.temperature, ignore_eos=True, max_tokens=n) for _, n in requests]
        before = self.llm.stats
        outputs = self.llm.generate([request.prompt for request in requests], params, use_tqdm=False)
        self.stats = {name: self.llm.stats[name] - before[name] for name in ("num_cached_tokens", "num_preemptions")}
        return [output["token_ids"] for output in outputs]

    def close(self) -> None:
        self.llm.exit()


class Transformers(Engine):
    """Static batches of requests of similar output length, each running until its longest output is complete."""

    def __init__(self, model: str, options: dict[str, Any], args: argparse.Namespace) -> None:
        torch.manual_seed(options["seed"] % 2**64)
        self.device = torch.device(options["device"])
        how = {"dtype": getattr(torch, options["dtype"]), "attn_implementation": "sdpa"}
        if options["load_format"] == "dummy":
            with self.device:
                self.model = AutoModelForCausalLM.from_config(args.hf_config, trust_remote_code=False, **how).eval()
        else:
            self.model = AutoModelForCausalLM.from_pretrained(model, **LOCAL, **how).eval().to(self.device)
        # In place of the checkpoint's own, which has an EOS and may have a top-k; with none given, top_k would be 50.
        sampling = {"do_sample": True, "temperature": args.temperature, "top_k": 0} if args.temperature else {}
        self.model.generation_config = GenerationConfig(pad_token_id=0, **sampling)
        self.given_batch_size = args.batch_size
        self.batch_size = args.batch_size or 8

    def warm_up(self, requests: list[Request]) -> None:
        super().warm_up(requests)
        if self.given_batch_size is None:
            self.batch_size = self.find_batch_size(requests)
        self.description = f"sdpa attention, static batches of {self.batch_size}"

    def find_batch_size(self, requests: list[Request]) -> int:
        """The fastest: all requests at first, then half of that, and so on until it gets clearly slower."""
        best, best_size = math.inf, 1
        for halvings in range(len(requests).bit_length()):
            self.batch_size = len(requests) >> halvings
            try:
                seconds = time_run(self, requests)
            except torch.OutOfMemoryError:
                seconds = math.inf
            print(f"transformers: batches of {self.batch_size} take {seconds:.2f} s", flush=True)
            if seconds > 1.1 * best:
                break
            if seconds < best:
                best, best_size = seconds, self.batch_size
        return best_size

    @torch.inference_mode()
    def run(self, requests: list[Request]) -> list[list[int]]:
        order = sorted(range(len(requests)), key=lambda i: (requests[i].num_tokens, len(requests[i].prompt)))
        outputs: list[list[int]] = [[] for _ in requests]
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            lengths = torch.tensor([len(requests[i].prompt) for i in batch], device=self.device)
            width = int(lengths.max())
            padded = [[0] * (width - len(requests[i].prompt)) + requests[i].prompt for i in batch]
            input_ids = torch.tensor(padded, device=self.device)  # [batch, width], padding on the left
            mask = (torch.arange(width, device=self.device) >= width - lengths[:, None]).long()
            longest = requests[batch[-1]].num_tokens
            generated = self.model.generate(input_ids, attention_mask=mask, max_new_tokens=longest)[:, width:]
            for i, token_ids in zip(batch, generated.tolist()):
                outputs[i] = token_ids[: requests[i].num_tokens]
        return outputs


class VLLM(Engine):
    description = "its own defaults for all but these options"

    def __init__(self, model: str, options: dict[str, Any], args: argparse.Namespace) -> None:
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        import vllm

        options = {name: options[name] for name in OPTIONS_OF_VLLM if name in options}
        self.llm = vllm.LLM(model=model, skip_tokenizer_init=True, **options)
        self.make_params = vllm.SamplingParams
        self.temperature = args.temperature

    def run(self, requests: list[Request]) -> list[list[int]]:
        common = {"temperature": self.temperature, "ignore_eos": True, "detokenize": False}
        params = [self.make_params(max_tokens=request.num_tokens, **common) for request in requests]
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


MakeEngine = Callable[[str, dict[str, Any], argparse.Namespace], Engine]
ENGINES: dict[str, MakeEngine] = {"nanovllm": NanoVLLM, "transformers": Transformers, "vllm": VLLM}


def make_requests(args: argparse.Namespace, run: int) -> list[Request]:
    """The requests of a run: the lengths are the same in all runs, the token ids in none."""
    highest = min(10000, args.hf_config.vocab_size - 1)
    # Drawn in the order of nano-vLLM's bench.py, so that its lengths come out, those of its published figures.
    rng = random.Random(args.seed)
    prompts = [[rng.randint(0, highest) for _ in range(rng.randint(*args.input_len))] for _ in range(args.num_seqs)]
    num_tokens = [rng.randint(*args.output_len) for _ in prompts]
    rng = random.Random(f"seed {args.seed}, run {run}")
    prefix = [rng.randint(0, highest) for _ in range(args.shared_prefix)]
    return [Request(prefix + [rng.randint(0, highest) for _ in prompt], n) for prompt, n in zip(prompts, num_tokens)]


def time_run(engine: Engine, requests: list[Request]) -> float:
    """The seconds it took. Raises RuntimeError if a request did not get as many tokens as it asked for."""
    start = time.perf_counter()
    outputs = engine.run(requests)
    seconds = time.perf_counter() - start
    for request, token_ids in zip(requests, outputs, strict=True):
        if len(token_ids) != request.num_tokens:
            raise RuntimeError(f"a request for {request.num_tokens} tokens got {len(token_ids)}")
    return seconds


def describe_hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {torch.cuda.get_device_properties(device).total_memory / 2**30:.0f} GiB"
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def find_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(from source)"


def compare(engines: dict[str, Engine], args: argparse.Namespace) -> dict[str, Any]:
    """Time the engines in turn and print a table. Returns what it says."""
    device, dtype = torch.device(args.options["device"]), getattr(torch, args.options["dtype"])
    packages = dict.fromkeys(["torch", "transformers", *engines])
    setting: dict[str, Any] = {
        "hardware": describe_hardware(device),
        "versions": {"python": platform.python_version(), **{name: find_version(name) for name in packages}},
        "model": args.model,
        "options": args.options,
        "workload": {name: getattr(args, name) for name in WORKLOAD},
    }
    for name, value in setting.items():
        print(f"{name}:", ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value, flush=True)
    requests = make_requests(args, run=0)
    ceilings = measure_ceilings(device, dtype)
    floor = find_floor(args.hf_config, dtype, requests, args.shared_prefix, ceilings)
    print(f"roofline: {ceilings}, so at least {floor:.3g} seconds; {ABOVE}", flush=True)
    for name, engine in engines.items():
        engine.warm_up(requests)
        setting[name] = engine.description
        print(f"{name}: {engine.description}")

    num_prompt_tokens = sum(len(request.prompt) for request in requests)
    num_output_tokens = sum(request.num_tokens for request in requests)
    num_tokens = num_prompt_tokens + num_output_tokens
    columns = f"{'seconds':>10}{'output tok/s':>14}{'total tok/s':>13}{'of roofline':>13}"
    print(f"\n{'':22}{'prompt tokens':>14}{'output tokens':>15}{columns}")

    def show(label: str, seconds: float, stats: dict[str, int]) -> None:
        rates = f"{num_output_tokens / seconds:14.1f}{num_tokens / seconds:13.1f}{floor / seconds:13.1%}"
        notes = "".join(f"  {name} {value}" for name, value in stats.items() if value)
        print(f"{label:22}{num_prompt_tokens:14}{num_output_tokens:15}{seconds:10.2f}{rates}{notes}", flush=True)

    times: dict[str, list[float]] = {name: [] for name in engines}
    for run in range(1, args.repeat + 1):
        requests = make_requests(args, run)
        for name, engine in engines.items():
            times[name].append(time_run(engine, requests))
            show(f"{name} {run}", times[name][-1], engine.stats)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    if args.repeat > 1:
        for name, seconds in medians.items():
            show(f"{name} median", seconds, {})
    first, *others = engines
    ratios = {f"{first}/{other}": medians[other] / medians[first] for other in others}
    for pair, ratio in ratios.items():
        print(f"{pair}: {ratio:.2f} times the tokens per second{' (ratio of medians)' * (args.repeat > 1)}")
    return {
        **setting,
        "prompt_tokens": num_prompt_tokens,
        "output_tokens": num_output_tokens,
        "seconds": times,
        "median_seconds": medians,
        "output_tokens_per_second": {name: num_output_tokens / seconds for name, seconds in medians.items()},
        "total_tokens_per_second": {name: num_tokens / seconds for name, seconds in medians.items()},
        "ratios": ratios,
        "roofline": {**ceilings._asdict(), "seconds": floor, "note": ABOVE},
        "share_of_roofline": {name: find_share(floor, seconds) for name, seconds in medians.items()},
        "stats_of_last_run": {name: engine.stats for name, engine in engines.items()},
    }


# The roofline


class Ceilings(NamedTuple):
    """The most that this machine does, as measured."""

    bytes_per_second: float
    flops_per_second: float

    def __str__(self) -> str:
        return f"{self.bytes_per_second / 1e9:.4g} GB/s, {self.flops_per_second / 1e12:.4g} TFLOP/s"


ABOVE = "a share above 100% (null in JSON) says that caches or kernels outrun the measured ceilings"


def find_share(least: float, seconds: float) -> float | None:
    return least / seconds if least <= seconds else None


def time_calls(call: Callable[[int], object], device: torch.device) -> list[float]:
    """The seconds that call(0), call(1), ... take: means of some batches of calls, after a warm-up.

    On a GPU a batch waits behind a sleeping kernel until the host has queued it: so it is the GPU's own time, without
    the host's launches in between, as in a CUDA graph.
    """
    numbers = count()

    def run(num_calls: int) -> float:
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(10_000_000)  # clock cycles: some 5 ms
            begin.record()
        start = time.perf_counter()
        for _ in range(num_calls):
            call(next(numbers))
        if device.type != "cuda":
            return (time.perf_counter() - start) / num_calls
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / num_calls

    run(2)  # compiles, tunes, raises the clocks
    once = run(1)
    batch_size = min(max(int(0.005 / once), 1), 20)
    return [run(batch_size) for _ in range(min(max(int(0.2 / (once * batch_size)), 3), 20))]


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """The best of some large copies (GPU: read, write) or reductions (CPU: read), and of matrix products in `dtype`."""
    num_bytes, side = 1 << 28, 8192 if device.type == "cuda" else 1024
    source = torch.rand(num_bytes // 4, device=device)
    if device.type == "cuda":
        target = torch.empty_like(source)
        bandwidth = 2 * num_bytes / min(time_calls(lambda _: target.copy_(source), device))
    else:
        bandwidth = num_bytes / min(time_calls(lambda _: source.max(), device))
    if device.type == "cpu" and dtype == torch.float16:
        dtype = torch.float32  # which most CPUs multiply a hundred times as fast
    left, right = torch.randn(2, side, side, device=device).to(dtype)
    return Ceilings(bandwidth, 2 * side**3 / min(time_calls(lambda _: left @ right, device)))


def find_floor(
    config: PretrainedConfig, dtype: torch.dtype, requests: list[Request], shared_prefix: int, ceilings: Ceilings
) -> float:
    """The least seconds for `requests`: all prompts, then the fewest decode steps. A shared prefix counts once.

        prefill        2 * matrices * tokens + 2 * head * prompts + attention * (n^2 / 2 of each prompt of n) FLOPs
        decode step i  for the requests that want more than i tokens, whose contexts are now their prompts and i tokens:
                       2 * (matrices + head) * sequences + attention * (tokens of the contexts) FLOPs,
                       matrices + head + key_value * (tokens of the contexts) numbers to read

    matrices are the weights of all linear layers but the output head (embeddings are looked up, experts not counted);
    attention = 2 * 2 * layers * heads * head_dim, for q k and p v; key_value = 2 * layers * kv_heads * head_dim.
    Prefill takes its FLOPs at the matrix rate, a decode step that or its bytes at the bandwidth, whichever is longer.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    head = model.get_output_embeddings().weight.numel()
    matrices = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear)) - head
    num_heads, num_layers = config.num_attention_heads, config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    attention = 2 * 2 * num_layers * num_heads * head_dim
    key_value = 2 * num_layers * (getattr(config, "num_key_value_heads", None) or num_heads) * head_dim

    lengths, repeats = [len(request.prompt) for request in requests], len(requests) - 1
    num_tokens = sum(lengths) - shared_prefix * repeats
    num_pairs = (sum(n**2 for n in lengths) - shared_prefix**2 * repeats) / 2
    flops = 2 * matrices * num_tokens + 2 * head * len(requests) + attention * num_pairs
    seconds = flops / ceilings.flops_per_second
    for step in range(1, max(request.num_tokens for request in requests)):
        contexts = [len(prompt) + step for prompt, num_wanted in requests if num_wanted > step]
        flops = 2 * (matrices + head) * len(contexts) + attention * sum(contexts)
        num_read = matrices + head + key_value * (sum(contexts) - shared_prefix * (len(contexts) - 1))
        seconds += max(flops / ceilings.flops_per_second, num_read * dtype.itemsize / ceilings.bytes_per_second)
    return seconds


# Kernels

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 8, 128  # of qwen3-0.6b
COLD_BYTES = 1 << 28  # a kernel's calls go around in so much K/V, more than an L2 or L3 holds
# The largest error that rounding explains, in units of the root mean square of a head's numbers.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}


def measure_kernels(args: argparse.Namespace) -> dict[str, Any]:
    """Check and time the kernels of every attention backend that runs here and print a table. Returns what it says."""
    device, dtype_name = torch.device(args.options["device"]), args.options["dtype"]
    dtype = getattr(torch, dtype_name)
    backends: dict[str, tuple[ModuleType, int]] = {}
    for name in ("torch", "cpp", "triton", "flash_attn"):
        try:
            backends[name] = select_backend(name, device, dtype, HEAD_DIM, None)
        except ValueError as error:
            print(error)
    ceilings, hardware = measure_ceilings(device, dtype), describe_hardware(device)
    packages = filter(importlib.util.find_spec, ("torch", "triton", "flash_attn"))
    versions = {name: find_version(name) for name in packages}
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    print(f"\n{hardware}; {dtype_name}; {shown}; the machine does {ceilings}\n")
    print_row("kernel", "sequences x tokens", "backend", "dtype", "time", "rate", "of the machine's", "max error")
    print_row(*["---"] * 8)
    context_len, prompt_len = args.input_len[1], 8 * args.input_len[1]
    token_bytes = 2 * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize
    cases = [  # kernel, sequences, tokens of each, new ones among them; bytes to move or FLOPs to do
        ("store_kvcache", 1, prompt_len, prompt_len, 2 * prompt_len * token_bytes, "GB/s"),  # read and written
        ("decode", args.num_seqs, context_len, 1, args.num_seqs * context_len * token_bytes, "GB/s"),
        ("prefill", 1, prompt_len, prompt_len, 2 * 2 * NUM_HEADS * HEAD_DIM * prompt_len**2 / 2, "TFLOP/s"),
    ]
    rows: list[dict[str, Any]] = []
    for kernel, num_seqs, num_tokens, query_len, work, unit in cases:
        most, scale = (ceilings.bytes_per_second, 1e9) if unit == "GB/s" else (ceilings.flops_per_second, 1e12)
        num_batches = max(2, -(-COLD_BYTES // (num_seqs * num_tokens * token_bytes)))
        for name, (backend, block_size) in backends.items():
            batches = make_batches(num_batches, num_seqs, num_tokens, query_len, block_size, device)
            seconds, error = check_and_time(kernel, backend, batches, block_size, dtype)
            row = {"kernel": kernel, "shape": f"{num_seqs} x {num_tokens}", "backend": name, "dtype": dtype_name}
            rate, share = work / seconds / scale, find_share(work / most, seconds)
            figures = f"{seconds * 1e3:.4g} ms", f"{rate:.4g} {unit}", f"{work / seconds / most:.0%}", f"{error:.2g}"
            print_row(*row.values(), *figures)
            rows.append({**row, "seconds": seconds, "rate": rate, "unit": unit, "share": share, "max_error": error})
    return {"hardware": hardware, "versions": versions, "ceilings": {**ceilings._asdict(), "note": ABOVE}, "kernels": rows}


def make_batches(
    num_batches: int, num_seqs: int, context_len: int, query_len: int, block_size: int, device: torch.device
) -> list[Batch]:
    """Batches with blocks of their own, all in random order; slot_mapping covers the whole contexts."""
    block_ids = torch.randperm(num_batches * num_seqs * -(-context_len // block_size), device=device)
    positions = torch.arange(context_len, device=device)
    bounds = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * query_len
    context_lens = torch.full((num_seqs,), context_len, dtype=torch.int32, device=device)
    unused = positions[:0]
    batches: list[Batch] = []
    for table in block_ids.view(num_batches, num_seqs, -1):
        slots = (table[:, positions // block_size] * block_size + positions % block_size).flatten()
        batches.append(Batch(unused, unused, slots, bounds, context_lens, table.int(), query_len, context_len, unused))
    return batches


def check_and_time(
    kernel: str, backend: ModuleType, batches: list[Batch], block_size: int, dtype: torch.dtype
) -> tuple[float, float]:
    """Median seconds, and the largest error against the torch backend in float32. Raises RuntimeError if it is large.

    The numbers are new ones each time, so that no other backend's results, left in memory, can pass for this one's.
    During the check all blocks but those of the first batch are NaN, and must stay so.
    """
    first = batches[0]
    device, num_seqs, scale = first.slot_mapping.device, len(first.context_lens), HEAD_DIM**-0.5
    query = torch.randn(num_seqs * first.max_seqlen_q, NUM_HEADS, HEAD_DIM, device=device).to(dtype)
    key_value = torch.randn(2, len(first.slot_mapping), NUM_KV_HEADS, HEAD_DIM, device=device).to(dtype)
    num_blocks = len(batches) * first.block_tables.numel()
    kv_cache = torch.full((2, num_blocks, block_size, NUM_KV_HEADS, HEAD_DIM), torch.nan, dtype=dtype, device=device)

    backend.store_kvcache(*key_value, kv_cache, first.slot_mapping)
    if kv_cache.isnan().sum() != kv_cache.numel() - key_value.numel():
        raise RuntimeError(f"{backend.__name__}: store_kvcache writes more or fewer slots than it is told")
    if kernel == "store_kvcache":
        output, expected, tolerance = kv_cache.flatten(1, 2)[:, first.slot_mapping], key_value.float(), 0.0
    else:
        whole = key_value.float().unflatten(1, (num_seqs, -1))  # a KV cache with one block per sequence
        in_order = torch.arange(num_seqs, dtype=torch.int32, device=device)[:, None]
        expected = torch_backend.attend(query.float(), whole, replace(first, block_tables=in_order), scale)
        output, tolerance = backend.attend(query, kv_cache, first, scale), TOLERANCE[dtype]
    error = (output.float() - expected).abs()
    if not (error <= tolerance * expected.square().mean(-1, keepdim=True).sqrt()).all():  # nor is NaN
        raise RuntimeError(f"{backend.__name__}: {kernel} in {dtype} is off by {error.max():.2g}")

    sources = key_value.repeat(len(batches), 1, 1, 1, 1)
    for batch, source in zip(batches, sources):
        torch_backend.store_kvcache(*source, kv_cache, batch.slot_mapping)

    def call(number: int) -> None:
        number %= len(batches)
        if kernel == "store_kvcache":
            backend.store_kvcache(*sources[number], kv_cache, batches[number].slot_mapping)
        else:
            backend.attend(query, kv_cache, batches[number], scale)

    return statistics.median(time_calls(call, device)), error.max().item()


def print_row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


# Decode steps

NUM_STEPS = 8  # that are timed, and as many that are profiled
PACKAGE = Path(nanovllm.__file__).parent


def measure_decode(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    """Time steps in which all requests decode, and print where the time goes. Returns what it says."""

    def step() -> float:
        start = time.perf_counter()
        llm._step()  # as generate() does; llm.step() would also make outputs
        return time.perf_counter() - start

    params = SamplingParams(temperature=args.temperature, ignore_eos=True, max_tokens=args.output_len[1])
    for prompt, _ in make_requests(args, run=0):
        llm.add_request(prompt, params)
    while any(seq.num_computed_tokens < seq.num_prompt_tokens for seq in (request.seq for request in llm.requests.values())):
        step()
    step()  # the first one of nothing but decodes may compile
    context_lens = [len(seq.token_ids) for seq in llm.scheduler.running]
    seconds = statistics.median(step() for _ in range(NUM_STEPS))
    if args.options["device"].startswith("cuda"):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(NUM_STEPS):
                step()
        kernels = [event for event in profile.key_averages() if event.device_type == DeviceType.CUDA]
        parts = Counter({kernel.key.removeprefix("void "): kernel.self_device_time_total / 1e6 for kernel in kernels})
        total, kind, rest = seconds * NUM_STEPS, "kernel", "no kernel: the GPU waits"
        note = f"kernels run for {parts.total() / NUM_STEPS * 1e3:.4g} ms of it"
    else:
        with cProfile.Profile(builtins=False) as profile:  # built-in functions then count as their callers' own work
            total = sum(step() for _ in range(NUM_STEPS))
        parts = sum_functions(profile)
        kind, rest = "function", "outside of nanovllm"
        note = f"{total / NUM_STEPS * 1e3:.4g} ms under the profiler"
    shown = dict(parts.most_common(12))
    shown = {**shown, f"every other {kind}": parts.total() - sum(shown.values()), rest: total - parts.total()}
    setting = f"{args.model}, {len(context_lens)} sequences, {sum(context_lens)} tokens"
    print(f"\nA decode step of {setting}: {seconds * 1e3:.4g} ms, {note}\n")
    print_row(kind, "ms", "share")
    print_row(*["---"] * 3)
    for name, part in shown.items():
        print_row(f"`{name[:80]}`", f"{part / NUM_STEPS * 1e3:.4g}", f"{part / total:.1%}")
    return {"setting": setting, "seconds": seconds, "parts": {name: part / NUM_STEPS for name, part in shown.items()}}


def sum_functions(profile: cProfile.Profile) -> Counter[str]:
    """The seconds of each function of nanovllm, with what it calls outside of the package."""
    seconds: Counter[str] = Counter()
    for entry in profile.getstats():
        path = Path(entry.code.co_filename)
        if PACKAGE in path.parents:
            calls = [call for call in entry.calls or () if PACKAGE not in Path(call.code.co_filename).parents]
            name = f"{path.relative_to(PACKAGE)}:{entry.code.co_firstlineno} {entry.code.co_name}"
            seconds[name] += entry.inlinetime + sum(call.inlinetime for call in calls)
    return seconds


# The command line


def integer(low: int, high: float = 10**6) -> Callable[[str], int]:
    def integer(text: str) -> int:
        if not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text} is not in [{low}, {high}]")
        return int(text)

    return integer


def option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Throughput of nanovllm and its peers on random prompts.",
        epilog="The default on a GPU is nano-vLLM's workload: qwen3-0.6b, 256 requests, 100 to 1024 tokens in, 100 to 1024"
        " out. On a CPU it is one of less than a minute: small, 32 requests, 32 to 256 in, 32 to 256 out."
        " --kernels takes contexts as long as the longest prompt, one for each request, and a prompt of 8 times that.",
    )
    add = parser.add_argument
    add("--model", help=f"directory, Hub id, or a shape to run with random weights: {', '.join(SHAPES)}")
    add("--num-seqs", type=integer(1), metavar="N", help="requests")
    add("--input-len", type=integer(1), nargs=2, metavar=("LO", "HI"), help="prompt tokens, a shared prefix not counted")
    add("--output-len", type=integer(1), nargs=2, metavar=("LO", "HI"), help="tokens to generate")
    add("--shared-prefix", type=integer(0), default=0, metavar="N", help="tokens that all prompts start with (0)")
    add("--repeat", type=integer(1), default=1, metavar="N", help="runs of each engine (1)")
    add("--temperature", type=float, default=0.6, help="0 is greedy (0.6)")
    add("--seed", type=integer(0, math.inf), default=0, help="of lengths, token ids and sampling (0)")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="auto: the checkpoint's (auto)")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--engine", nargs="+", default=["nanovllm"], choices=list(ENGINES), help="several get equal shares of a GPU (nanovllm)")
    add("--kernels", action="store_true", help="check and time the attention kernels, and profile decode steps instead")
    add = parser.add_argument
    add("--batch-size", type=integer(1), metavar="N", help="of transformers; without it the best is searched in full runs")
    add("--set", type=option, action="append", default=[], metavar="NAME=VALUE", help="option of nanovllm's LLM; repeatable")
    add("--json", action="store_true", help="print one line of JSON, and everything else on stderr")
    parser.set_defaults(**(ON_GPU if torch.cuda.is_available() else ON_CPU))
    return parser


def find_model(args: argparse.Namespace, scratch: str) -> str:
    """A checkpoint directory, made in `scratch` for a shape. Settles args.hf_config and dtype; may raise ValueError."""
    if args.model in SHAPES:
        Qwen3Config(**SHAPES[args.model], **COMMON).save_pretrained(scratch)
    model = scratch if args.model in SHAPES else str(find_checkpoint(args.model))
    args.hf_config = read_config(Path(model))
    if args.options["dtype"] == "auto":
        args.options["dtype"] = str(args.hf_config.dtype or torch.float32).removeprefix("torch.")
    return model


def main(argv: list[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    for name, (low, high) in (("--input-len", args.input_len), ("--output-len", args.output_len)):
        if low > high:
            parser.error(f"{name}: {low} is above {high}")
    if args.kernels and args.output_len[1] < 3 * NUM_STEPS:
        parser.error(f"--kernels: --output-len must reach {3 * NUM_STEPS}, for enough decode steps")
    if args.batch_size and "transformers" not in args.engine:
        parser.error("--batch-size is for --engine transformers")
    if "vllm" in args.engine and importlib.util.find_spec("vllm") is None:
        parser.error("--engine vllm: vllm is not installed here")
    longest = args.shared_prefix + args.input_len[1] + args.output_len[1]
    args.options = {
        "dtype": args.dtype,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "seed": args.seed,
        "load_format": "dummy" if args.model in SHAPES else "auto",
        "max_model_len": longest,
        "gpu_memory_utilization": 0.9 / len(set(args.engine)),
        **{name: value for name, value in args.set if value != "auto"},
    }
    try:
        config = Config.from_options(args.model, args.options)
        SamplingParams(temperature=args.temperature)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    if (config.max_model_len or 0) < longest:
        parser.error(f"--set: max_model_len={config.max_model_len} is below the {longest} tokens of the longest request")
    try:
        with redirect_stdout(sys.stderr) if args.json else nullcontext(), TemporaryDirectory() as scratch:
            model = find_model(args, scratch)
            kernels = measure_kernels(args) if args.kernels else {}  # before an engine takes most of a GPU's memory
            engines = {name: ENGINES[name](model, args.options, args) for name in dict.fromkeys(args.engine)}
            if args.kernels:
                report = {**kernels, "decode_step": measure_decode(engines["nanovllm"].llm, args)}
            else:
                report = compare(engines, args)
            for engine in engines.values():
                engine.close()
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if args.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
