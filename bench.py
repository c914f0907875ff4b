"""Throughput of nanovllm, alone or beside transformers and vLLM, on the same prompts and lengths.

    python bench.py                                             a workload that suits this machine
    python bench.py --engine nanovllm transformers --repeat 3   alternating runs, then the ratio of their medians

A run is one batch of requests, all there from the start, timed until the last has its last token. Loading and warming up
are not timed. Every run has token ids of its own, so that no prefix cache can remember an earlier one.
"""

import argparse
import ast
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
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, Qwen3Config

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.models.checkpoint import find_checkpoint

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
        torch.manual_seed(options["seed"])
        self.device = torch.device(options["device"])
        how = {"dtype": getattr(torch, options["dtype"]), "attn_implementation": "sdpa"}
        if options["load_format"] == "dummy":
            with self.device:
                self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), **how).eval()
        else:
            self.model = AutoModelForCausalLM.from_pretrained(model, **how).eval().to(self.device)
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
    highest = min(10000, args.vocab_size - 1)
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


def at_least(low: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        if int(text) < low:
            raise argparse.ArgumentTypeError(f"{text} is below {low}")
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
    add("--model", help=f"directory, Hub id, or a shape to run with random weights: {', '.join(SHAPES)}")
    add("--num-seqs", type=at_least(1), metavar="N", help="requests")
    add("--input-len", type=at_least(1), nargs=2, metavar=("LO", "HI"), help="prompt tokens, a shared prefix not counted")
    add("--output-len", type=at_least(1), nargs=2, metavar=("LO", "HI"), help="tokens to generate")
    add("--shared-prefix", type=at_least(0), default=0, metavar="N", help="tokens that all prompts start with (0)")
    add("--repeat", type=at_least(1), default=1, metavar="N", help="runs of each engine (1)")
    add("--temperature", type=float, default=0.6, help="0 is greedy (0.6)")
    add("--seed", type=at_least(0), default=0, help="of lengths, token ids and sampling (0)")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="auto: the checkpoint's (auto)")
    add("--engine", nargs="+", default=["nanovllm"], choices=list(ENGINES), help="several get equal shares of a GPU (nanovllm)")
    add("--batch-size", type=at_least(1), metavar="N", help="of transformers; without it the best is searched in full runs")
    add("--set", type=option, action="append", default=[], metavar="NAME=VALUE", help="option of nanovllm's LLM; repeatable")
    add("--json", action="store_true", help="print one line of JSON, and everything else on stderr")
    parser.set_defaults(**(ON_GPU if torch.cuda.is_available() else ON_CPU))
    return parser


def make_engines(args: argparse.Namespace) -> dict[str, Engine]:
    """Load the model into each engine; settles args.vocab_size and the dtype. Raises ValueError or OSError if it cannot."""
    with TemporaryDirectory() as scratch:
        if args.model in SHAPES:
            Qwen3Config(**SHAPES[args.model], **COMMON).save_pretrained(scratch)
        model = scratch if args.model in SHAPES else str(find_checkpoint(args.model))
        config = AutoConfig.from_pretrained(model)
        args.vocab_size = config.vocab_size
        if args.options["dtype"] == "auto":
            args.options["dtype"] = str(config.dtype or torch.float32).removeprefix("torch.")
        return {name: ENGINES[name](model, args.options, args) for name in dict.fromkeys(args.engine)}


def compare(engines: dict[str, Engine], args: argparse.Namespace) -> dict[str, Any]:
    """Time the engines in turn and print a table. Returns what it says."""
    packages = dict.fromkeys(["torch", "transformers", *engines])
    setting: dict[str, Any] = {
        "hardware": describe_hardware(torch.device(args.options["device"])),
        "versions": {"python": platform.python_version(), **{name: find_version(name) for name in packages}},
        "model": args.model,
        "options": args.options,
        "workload": {name: getattr(args, name) for name in WORKLOAD},
    }
    for name, value in setting.items():
        print(f"{name}:", ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value, flush=True)
    requests = make_requests(args, run=0)
    for name, engine in engines.items():
        engine.warm_up(requests)
        setting[name] = engine.description
        print(f"{name}: {engine.description}")

    num_prompt_tokens = sum(len(request.prompt) for request in requests)
    num_output_tokens = sum(request.num_tokens for request in requests)
    num_tokens = num_prompt_tokens + num_output_tokens
    print(f"\n{'':22}{'prompt tokens':>14}{'output tokens':>15}{'seconds':>10}{'output tok/s':>14}{'total tok/s':>13}")

    def show(label: str, seconds: float, stats: dict[str, int]) -> None:
        rates = f"{num_output_tokens / seconds:14.1f}{num_tokens / seconds:13.1f}"
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
        "stats_of_last_run": {name: engine.stats for name, engine in engines.items()},
    }


def main(argv: list[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    for name, (low, high) in (("--input-len", args.input_len), ("--output-len", args.output_len)):
        if low > high:
            parser.error(f"{name}: {low} is above {high}")
    if not 0 <= args.temperature < math.inf:
        parser.error("--temperature must be a number >= 0")
    if "vllm" in args.engine and importlib.util.find_spec("vllm") is None:
        parser.error("--engine vllm: vllm is not installed here")
    args.options = {
        "dtype": args.dtype,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "seed": args.seed,
        "load_format": "dummy" if args.model in SHAPES else "auto",
        "max_model_len": args.shared_prefix + args.input_len[1] + args.output_len[1],
        "gpu_memory_utilization": 0.9 / len(set(args.engine)),
        **{name: value for name, value in args.set if value != "auto"},
    }
    try:
        Config.from_options(args.model, args.options)
    except (TypeError, ValueError) as error:
        parser.error(f"--set: {error}")
    with redirect_stdout(sys.stderr) if args.json else nullcontext():
        try:
            engines = make_engines(args)
        except (OSError, ValueError) as error:
            parser.error(str(error))
        report = compare(engines, args)
        for engine in engines.values():
            engine.close()
    if args.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
