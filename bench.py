"""Throughput of nanovllm, alone or beside transformers and vLLM, on the same prompts and lengths.

    python bench.py                                             a workload that suits this machine
    python bench.py --engine nanovllm transformers --repeat 3   alternating runs, then the ratio of their medians
    python bench.py --engine nanovllm --json                    one line of JSON; all else goes to stderr

A run is one batch of requests, all there from the start, timed until the last has its last token. Loading and warming up
are not timed. Every run has token ids of its own, so that no prefix cache can remember an earlier one. The seconds are set
against this machine's roofline (Williams et al. 2009): the least time in which it can move the bytes and do the operations.
Its ceilings are measured, not taken from a data sheet. `python -m nanovllm.kernels.bench` times single kernels.
"""

import argparse
import ast
import atexit
import json
import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, redirect_stdout
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.models.checkpoint import LOCAL, find_checkpoint, read_config
from nanovllm.terminal import run_program

# Models that run with random weights.
_qwen3 = partial(
    Qwen3Config, architectures=["Qwen3ForCausalLM"], tie_word_embeddings=True, dtype="bfloat16"
)
_llama3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "rope_theta": 5e5,
}
SHAPES: dict[str, PretrainedConfig] = {
    "qwen3-0.6b": _qwen3(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
    ),
    "small": _qwen3(
        vocab_size=32000, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=4096,
    ),
    "llama-3.2-1b": LlamaConfig(
        architectures=["LlamaForCausalLM"], tie_word_embeddings=True, dtype="bfloat16", vocab_size=128256, hidden_size=2048,
        intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64,
        max_position_embeddings=131072, rope_parameters={**_llama3, "original_max_position_embeddings": 8192},
    ),
    "opt-125m": OPTConfig(architectures=["OPTForCausalLM"], dtype="bfloat16"),
    "qwen3-moe": Qwen3MoeConfig(  # a 25th of Qwen3-30B-A3B: 1.0 billion weights, of which a token meets 0.2 billion
        architectures=["Qwen3MoeForCausalLM"], tie_word_embeddings=True, dtype="bfloat16", vocab_size=32000, hidden_size=1024,
        num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=4, moe_intermediate_size=384,
        num_experts=64, num_experts_per_tok=8, norm_topk_prob=True,
    ),
}  # fmt: skip
ON_GPU = {
    "model": "qwen3-0.6b",
    "num_seqs": 256,
    "input_len": [100, 1024],
    "output_len": [100, 1024],
}  # nano-vLLM's
ON_CPU = {"model": "small", "num_seqs": 32, "input_len": [32, 256], "output_len": [32, 256]}
WORKLOAD = ("num_seqs", "input_len", "output_len", "shared_prefix", "temperature", "seed")
OPTIONS_OF_VLLM = (  # those of nanovllm's that mean the same there
    "dtype", "seed", "load_format", "tensor_parallel_size", "max_model_len", "max_num_batched_tokens", "max_num_seqs",
    "gpu_memory_utilization", "enable_prefix_caching", "enable_chunked_prefill", "enforce_eager",
)  # fmt: skip


ABOVE = (
    "a share above 100% (null in JSON) means that caches or kernels outrun the measured ceilings"
)


class Request(NamedTuple):
    prompt: list[int]
    num_tokens: int  # to generate


class Engine(Protocol):
    """What is timed."""

    description: str
    stats: dict[str, int]  # of the last run

    def run(self, requests: list[Request]) -> list[list[int]]:
        """The generated token ids of each request."""


class NanoVLLM(Engine):
    def __init__(self, model: str, args: argparse.Namespace) -> None:
        self.llm = LLM(model, **args.options)
        atexit.register(self.llm.exit)
        self.temperature = args.temperature
        assert self.llm.model_runner is not None  # before exit()
        backend = self.llm.model_runner.executor.worker.backend
        self.description = (
            f"{backend.NAME} attention, {self.llm.stats['num_blocks']} blocks of KV cache"
        )

    def run(self, requests: list[Request]) -> list[list[int]]:
        params = [
            SamplingParams(temperature=self.temperature, ignore_eos=True, max_tokens=n)
            for _, n in requests
        ]
        before = self.llm.stats
        outputs = self.llm.generate(
            [request.prompt for request in requests], params, use_tqdm=False
        )
        self.stats = {
            name: self.llm.stats[name] - before[name]
            for name in ("num_cached_tokens", "num_preemptions")
        }
        return [output["token_ids"] for output in outputs]


class Transformers(Engine):
    """Static batches of requests of similar output length, each running until its longest output is complete."""

    def __init__(self, model: str, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed % 2**64)
        self.stats = {}
        self.device, self.batch_size = args.device, args.batch_size or args.num_seqs
        how = {"dtype": args.torch_dtype, "attn_implementation": "sdpa"}
        if args.options["load_format"] == "dummy":
            with self.device:
                self.model = AutoModelForCausalLM.from_config(
                    args.hf_config, trust_remote_code=False, **how
                ).eval()
        else:
            self.model = (
                AutoModelForCausalLM.from_pretrained(model, **LOCAL, **how).eval().to(self.device)
            )
        # In place of the checkpoint's own, which has an EOS and may have a top-k; with none given, top_k would be 50.
        sampling = (
            {"do_sample": True, "temperature": args.temperature, "top_k": 0}
            if args.temperature
            else {}
        )
        self.model.generation_config = GenerationConfig(pad_token_id=0, **sampling)
        self.description = f"sdpa attention, static batches of {self.batch_size}"

    @torch.inference_mode()
    def run(self, requests: list[Request]) -> list[list[int]]:
        order = sorted(
            range(len(requests)), key=lambda i: (requests[i].num_tokens, len(requests[i].prompt))
        )
        outputs: list[list[int]] = [[] for _ in requests]
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            lengths = torch.tensor([len(requests[i].prompt) for i in batch], device=self.device)
            width = int(lengths.max())
            padded = [[0] * (width - len(requests[i].prompt)) + requests[i].prompt for i in batch]
            input_ids = torch.tensor(
                padded, device=self.device
            )  # [batch, width], padding on the left
            mask = (torch.arange(width, device=self.device) >= width - lengths[:, None]).long()
            longest = requests[batch[-1]].num_tokens
            generated = self.model.generate(input_ids, attention_mask=mask, max_new_tokens=longest)[
                :, width:
            ]
            for i, token_ids in zip(batch, generated.tolist()):
                outputs[i] = token_ids[: requests[i].num_tokens]
        return outputs


class VLLM(Engine):
    description = "its own defaults for all but these options"

    def __init__(self, model: str, args: argparse.Namespace) -> None:
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        import vllm

        options = {name: args.options[name] for name in OPTIONS_OF_VLLM if name in args.options}
        self.llm = vllm.LLM(model=model, skip_tokenizer_init=True, **options)
        self.stats = {}
        self.make_params = partial(
            vllm.SamplingParams, temperature=args.temperature, ignore_eos=True, detokenize=False
        )

    def run(self, requests: list[Request]) -> list[list[int]]:
        params = [self.make_params(max_tokens=request.num_tokens) for request in requests]
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


MakeEngine = Callable[[str, argparse.Namespace], Engine]
ENGINES: dict[str, MakeEngine] = {"nanovllm": NanoVLLM, "transformers": Transformers, "vllm": VLLM}


def make_requests(args: argparse.Namespace, run: int) -> list[Request]:
    """The requests of a run: the lengths are the same in all runs, the token ids in none."""
    highest = min(10000, args.hf_config.vocab_size - 1)
    # Drawn in the order of nano-vLLM's bench.py, so that its lengths come out, those of its published figures.
    rng = random.Random(args.seed)
    prompts = [
        [rng.randint(0, highest) for _ in range(rng.randint(*args.input_len))]
        for _ in range(args.num_seqs)
    ]
    num_tokens = [rng.randint(*args.output_len) for _ in prompts]
    rng = random.Random(f"seed {args.seed}, run {run}")
    prefix = [rng.randint(0, highest) for _ in range(args.shared_prefix)]
    return [
        Request(prefix + [rng.randint(0, highest) for _ in prompt], n)
        for prompt, n in zip(prompts, num_tokens)
    ]


def time_run(engine: Engine, requests: list[Request]) -> float:
    """The seconds it took. Raises RuntimeError if a request did not get as many tokens as it asked for."""
    start = time.perf_counter()
    outputs = engine.run(requests)
    seconds = time.perf_counter() - start
    for request, token_ids in zip(requests, outputs, strict=True):
        if len(token_ids) != request.num_tokens:
            raise RuntimeError(f"a request for {request.num_tokens} tokens got {len(token_ids)}")
    return seconds


def compare(engines: dict[str, Engine], args: argparse.Namespace) -> dict[str, Any]:
    """Time the engines in turn and print a table. Returns what it says."""
    setting: dict[str, Any] = {
        "hardware": describe_hardware(args.device),
        "versions": find_versions(dict.fromkeys(["torch", "transformers", *engines])),
        "model": args.model,
        "options": args.options,
        "workload": {name: getattr(args, name) for name in WORKLOAD},
        **{name: engine.description for name, engine in engines.items()},
    }
    for name, value in setting.items():
        print(
            f"{name}:",
            ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value,
        )
    requests = make_requests(args, run=0)
    floor = find_floor(
        args.hf_config, args.torch_dtype, requests, args.shared_prefix, args.ceilings
    )
    print(f"roofline: {args.ceilings}, so at least {floor:.3g} seconds; {ABOVE}", flush=True)
    for engine in engines.values():  # a few requests, to warm up
        engine.run([Request(prompt, min(num_tokens, 8)) for prompt, num_tokens in requests[:8]])

    num_prompt_tokens = sum(len(request.prompt) for request in requests)
    num_output_tokens = sum(request.num_tokens for request in requests)
    num_tokens = num_prompt_tokens + num_output_tokens
    columns = (
        "prompt tokens",
        "output tokens",
        "seconds",
        "output tok/s",
        "total tok/s",
        "of roofline",
    )
    print(f"\n{'':20}" + "".join(f"{column:>15}" for column in columns))

    def show(label: str, seconds: float, stats: dict[str, int]) -> None:
        rates = f"{num_output_tokens / seconds:15.1f}{num_tokens / seconds:15.1f}{floor / seconds:15.1%}"
        notes = "".join(f"  {name} {value}" for name, value in stats.items() if value)
        print(
            f"{label:20}{num_prompt_tokens:15}{num_output_tokens:15}{seconds:15.2f}{rates}{notes}",
            flush=True,
        )

    times: dict[str, list[float]] = {name: [] for name in engines}
    for run in range(1, args.repeat + 1):
        requests = make_requests(args, run)
        for name, engine in engines.items():
            times[name].append(time_run(engine, requests))
            show(f"{name} {run}", times[name][-1], engine.stats)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    for name, seconds in medians.items() if args.repeat > 1 else ():
        show(f"{name} median", seconds, {})
    first, *others = medians
    ratios = {f"{first}/{other}": medians[other] / medians[first] for other in others}
    for pair, ratio in ratios.items():
        print(
            f"{pair}: {ratio:.2f} times the tokens per second{' (ratio of medians)' * (args.repeat > 1)}"
        )
    return {
        **setting,
        "prompt_tokens": num_prompt_tokens,
        "output_tokens": num_output_tokens,
        "seconds": times,
        "median_seconds": medians,
        "output_tokens_per_second": {
            name: num_output_tokens / seconds for name, seconds in medians.items()
        },
        "total_tokens_per_second": {
            name: num_tokens / seconds for name, seconds in medians.items()
        },
        "ratios": ratios,
        "roofline": {**args.ceilings._asdict(), "seconds": floor, "note": ABOVE},
        "share_of_roofline": {
            name: find_share(floor, seconds) for name, seconds in medians.items()
        },
        "stats_of_last_run": {name: engine.stats for name, engine in engines.items()},
    }


class Ceilings(NamedTuple):
    bytes_per_second: float
    flops_per_second: float
    matmul_dtype: str  # in which the matrix products were measured

    def __str__(self) -> str:
        bandwidth = f"{self.bytes_per_second / 1e9:.4g} GB/s"
        return f"{bandwidth}, {self.flops_per_second / 1e12:.4g} TFLOP/s in {self.matmul_dtype}"


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure memory bandwidth and matrix products, for a model in `dtype`.

    Bandwidth is that of large copies (GPU: read, write) or of large reductions (CPU: read).
    """
    on_gpu = device.type == "cuda"
    source = torch.rand(1 << 26, device=device)  # 256 MiB, more than a cache holds
    if on_gpu:
        seconds = time_best("target.copy_(source)", 0.3, source=source, target=source.clone())
    else:
        seconds = time_best("source.max()", 0.3, source=source)
    num_bytes = source.nbytes * (1 + on_gpu)
    rate, matmul_dtype = find_matmul_rate(device, dtype)
    return Ceilings(num_bytes / seconds, rate, str(matmul_dtype).removeprefix("torch."))


def find_matmul_rate(device: torch.device, dtype: torch.dtype) -> tuple[float, torch.dtype]:
    """Return the highest rate of matrix products for a model in `dtype`, and the dtype that has it.

    A CPU may multiply float32 numbers faster than 16-bit ones. Without instructions for bfloat16 or
    float16, torch is about a hundred times slower in these, and a large product takes seconds. Small
    products therefore decide which dtypes are worth a large one. These run on one thread, because
    on a busy machine threads wait for each other longer than a small product takes.
    """
    if device.type == "cuda":
        return measure_matmul(device, dtype, side=8192, min_seconds=0.3), dtype
    candidates = dict.fromkeys((dtype, torch.float32))
    trials = {each: measure_matmul(device, each, 128, 0.05, num_threads=1) for each in candidates}
    highest = max(trials.values())
    close = [each for each, rate in trials.items() if rate >= highest / 4]
    rates = {each: measure_matmul(device, each, side=1024, min_seconds=0.3) for each in close}
    best = max(rates, key=lambda each: rates[each])
    return rates[best], best


def measure_matmul(
    device: torch.device,
    dtype: torch.dtype,
    side: int,
    min_seconds: float,
    num_threads: int | None = None,
) -> float:
    """Measure the best FLOP/s of some products of matrices of `side` rows and columns."""
    left, right = torch.randn(2, side, side, device=device).to(dtype)
    seconds = time_best("left @ right", min_seconds, num_threads, left=left, right=right)
    return 2 * side**3 / seconds


def time_best(
    statement: str,
    min_seconds: float,
    num_threads: int | None = None,
    **tensors: Tensor,
) -> float:
    """Time `statement` repeatedly for at least `min_seconds`, and return the shortest time in seconds.

    The statement runs on `num_threads` threads (None: on all that torch uses).
    """
    timer = Timer(statement, globals=tensors, num_threads=num_threads or torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=min_seconds).times)


def find_share(least: float, seconds: float) -> float | None:
    """The share of the roofline of work that could take `least` seconds; None where it would be above 1."""
    return least / seconds if least <= seconds else None


def describe_hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {torch.cuda.get_device_properties(device).total_memory / 2**30:.0f} GiB"
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [
        line.partition(":")[2].strip()
        for line in cpuinfo.splitlines()
        if line.startswith("model name")
    ]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def find_versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of Python and of those of `packages` that are installed."""
    versions = {
        name: getattr(import_module(name), "__version__", "of this directory")
        for name in packages
        if find_spec(name)
    }
    return {"python": platform.python_version(), **versions}


def find_floor(
    config: PretrainedConfig,
    dtype: torch.dtype,
    requests: list[Request],
    shared_prefix: int,
    ceilings: Ceilings,
) -> float:
    """The least seconds for `requests`: all prompts, then the fewest decode steps. A shared prefix counts once.

        prefill        2 * matrices * tokens + 2 * head * prompts + attention * (n^2 / 2 of each prompt of n) FLOPs
        decode step i  for the requests that want more than i tokens, whose contexts are now their prompts and i tokens:
                       2 * (matrices + head) * sequences + attention * (tokens of the contexts) FLOPs,
                       matrices + head + key_value * (tokens of the contexts) numbers to read

    matrices are the weights of all linear layers but the output head (embeddings are looked up; of the experts, as many as a
    token meets); attention = 2 * 2 * layers * heads * head_dim, for q k and p v; key_value = 2 * layers * kv_heads * head_dim.
    Prefill takes its FLOPs at the matrix rate, a decode step that or its bytes at the bandwidth, whichever is longer.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    head = model.get_output_embeddings().weight.numel()
    matrices = (
        sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
        - head
    )
    experts = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 3)
    matrices += (
        experts * getattr(config, "num_experts_per_tok", 0) // getattr(config, "num_experts", 1)
    )
    num_heads, num_layers = config.num_attention_heads, config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    attention = 2 * 2 * num_layers * num_heads * head_dim
    key_value = (
        2 * num_layers * (getattr(config, "num_key_value_heads", None) or num_heads) * head_dim
    )

    lengths, repeats = [len(request.prompt) for request in requests], len(requests) - 1
    num_tokens = sum(lengths) - shared_prefix * repeats
    num_pairs = (sum(n**2 for n in lengths) - shared_prefix**2 * repeats) / 2
    flops = 2 * matrices * num_tokens + 2 * head * len(requests) + attention * num_pairs
    seconds = flops / ceilings.flops_per_second
    for step in range(1, max(request.num_tokens for request in requests)):
        contexts = [len(prompt) + step for prompt, num_wanted in requests if num_wanted > step]
        flops = 2 * (matrices + head) * len(contexts) + attention * sum(contexts)
        num_read = (
            matrices + head + key_value * (sum(contexts) - shared_prefix * (len(contexts) - 1))
        )
        seconds += max(
            flops / ceilings.flops_per_second, num_read * dtype.itemsize / ceilings.bytes_per_second
        )
    return seconds


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
        " out. On a CPU it is one of less than a minute: small, 32 requests, 32 to 256 in, 32 to 256 out.",
    )
    add = parser.add_argument
    add(
        "--model",
        help=f"directory, Hub id, or a shape to run with random weights: {', '.join(SHAPES)}",
    )
    add("--num-seqs", type=integer(1), metavar="N", help="requests")
    add(
        "--input-len",
        type=integer(1),
        nargs=2,
        metavar=("LO", "HI"),
        help="prompt tokens, a shared prefix not counted",
    )
    add("--output-len", type=integer(1), nargs=2, metavar=("LO", "HI"), help="tokens to generate")
    add(
        "--shared-prefix",
        type=integer(0),
        default=0,
        metavar="N",
        help="tokens that all prompts start with (0)",
    )
    add("--repeat", type=integer(1), default=1, metavar="N", help="runs of each engine (1)")
    add("--temperature", type=float, default=0.6, help="0 is greedy (0.6)")
    add(
        "--seed",
        type=integer(0, math.inf),
        default=0,
        help="of lengths, token ids and sampling (0)",
    )
    add(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="auto: the checkpoint's (auto)",
    )
    add(
        "--engine",
        nargs="+",
        default=["nanovllm"],
        choices=list(ENGINES),
        help="several get equal shares of a GPU (nanovllm)",
    )
    add(
        "--batch-size",
        type=integer(1),
        metavar="N",
        help="of transformers; less where memory runs out (all requests at once)",
    )
    add(
        "--set",
        type=option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="option of nanovllm's LLM; repeatable",
    )
    add("--json", action="store_true", help="print one line of JSON, and everything else on stderr")
    parser.set_defaults(**(ON_GPU if torch.cuda.is_available() else ON_CPU))
    return parser


def find_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of nanovllm's LLM; the others take what they know. Raises ValueError or TypeError if arguments are wrong."""
    for name, (low, high) in (("--input-len", args.input_len), ("--output-len", args.output_len)):
        if low > high:
            raise ValueError(f"{name}: {low} is above {high}")
    if args.batch_size and "transformers" not in args.engine:
        raise ValueError("--batch-size is for --engine transformers")
    if "vllm" in args.engine and find_spec("vllm") is None:
        raise ValueError("--engine vllm: vllm is not installed here")
    longest_prompt = args.shared_prefix + args.input_len[1]
    longest = longest_prompt + args.output_len[1]
    options = {
        "dtype": args.dtype,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "seed": args.seed,
        "load_format": "dummy" if args.model in SHAPES else "auto",
        "max_model_len": longest,
        "gpu_memory_utilization": 0.9 / len(set(args.engine)),
        **{name: value for name, value in args.set if value != "auto"},
    }
    config = Config.from_options(args.model, **options)
    SamplingParams(temperature=args.temperature)
    if (config.max_model_len or 0) < longest:
        raise ValueError(
            f"--set: max_model_len={config.max_model_len} is below the {longest} tokens of the longest request"
        )
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < longest_prompt:
        raise ValueError(
            f"--set: enable_chunked_prefill=False needs max_num_batched_tokens={longest_prompt} for the prompts"
        )
    return options


def make_engines(args: argparse.Namespace, scratch: str) -> dict[str, Engine]:
    """Load the model, which is made in `scratch` for a shape. Settles dtype, device and ceilings. May raise ValueError or
    OSError."""
    if args.model in SHAPES:
        SHAPES[args.model].save_pretrained(scratch)
    model = scratch if args.model in SHAPES else str(find_checkpoint(args.model))
    args.hf_config = read_config(Path(model))
    if args.options["dtype"] == "auto":
        args.options["dtype"] = str(args.hf_config.dtype or torch.float32).removeprefix("torch.")
    args.device, args.torch_dtype = (
        torch.device(args.options["device"]),
        getattr(torch, args.options["dtype"]),
    )
    args.ceilings = measure_ceilings(args.device, args.torch_dtype)  # while there is memory for it
    return {name: ENGINES[name](model, args) for name in dict.fromkeys(args.engine)}


def main(argv: list[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    with (
        redirect_stdout(sys.stderr) if args.json else nullcontext(),
        TemporaryDirectory() as scratch,
    ):
        try:
            args.options = find_options(args)
            engines = make_engines(args, scratch)
        except (OSError, TypeError, ValueError) as error:
            parser.error(str(error))
        report = compare(engines, args)
    if args.json:
        print(json.dumps(report))


if __name__ == "__main__":
    run_program(main)
